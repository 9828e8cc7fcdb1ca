"""The table of modes: which controller runs a configuration."""

from relax_cli.config.settings import ClusterSettings
from relax_cli.controllers.base import Controller
from relax_cli.controllers.colocate import ColocateController
from relax_cli.controllers.fully_async import FullyAsyncController

CONTROLLERS: dict[str, type[Controller]] = {
    "colocate": ColocateController,
    "fully_async": FullyAsyncController,
}
"""One entry a mode, under its name in :data:`relax_cli.config.settings.MODES`. A mode without an entry is planned and
checked, but a start is refused."""


def mode_refusal(cluster: ClusterSettings) -> str | None:
    """Why this version cannot start a run of that mode; None when it can."""
    mode = cluster.mode
    if mode in CONTROLLERS:
        return None
    flag = f"--{mode.replace('_', '-')}"
    known = " and ".join(f"--{name.replace('_', '-')}" for name in CONTROLLERS)
    return f"{flag} is planned and checked by this version, but it runs {known} only: remove {flag}"
