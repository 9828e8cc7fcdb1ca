"""The table of transports, and which one a run takes."""

from collections.abc import Callable, Sequence
from pathlib import Path

from relax_rollout.engines.base import Engine, EngineAddress
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.weight_sync.base import TransportSetup, WeightTransport
from relax_rollout.weight_sync.disk import disk_transport
from relax_rollout.weight_sync.group import group_transport
from relax_rollout.weight_sync.ipc import ipc_transport
from relax_rollout.weight_sync.value import value_transport

TRANSPORTS: dict[str, Callable[[TransportSetup], WeightTransport]] = {
    "ipc": ipc_transport,
    "value": value_transport,
    "group": group_transport,
    "disk": disk_transport,
}
"""Builds this rank's end of each way for weights to travel; collective over the ranks of the trainer."""


def transport_for(device: str) -> str:
    """Names the transport of a run whose engines share the trainer's device: no option, the mode decides."""
    return "value" if device == "cpu" else "ipc"


def make_transport(  # noqa: PLR0913  # what a rank knows of the run, by name
    engines: Sequence[EngineAddress],
    *,
    rank: int,
    world_size: int,
    device: str,
    gpus_per_engine: int,
    name: str | None = None,
    folder: Path | None = None,
    connect: Callable[[EngineAddress], Engine] = SGLangEngine.at,
) -> WeightTransport:
    """Builds this rank's end of the transport. Collective: every rank of the trainer calls it.

    Args:
        engines: all engines of the run, in order.
        rank: of this process in the trainer's world.
        world_size: ranks of the trainer.
        device: ``cpu`` or ``cuda``: where the trainer and the engines are.
        gpus_per_engine: tensor-parallel size of each engine.
        name: one of the table; None takes what suits engines on the trainer's own devices.
        folder: where ``disk`` writes.
        connect: makes the client of an engine.

    Raises:
        ValueError: the table has no such name.
    """
    name = name or transport_for(device)
    if name not in TRANSPORTS:
        raise ValueError(f"there is no weight transport {name!r}; known: {sorted(TRANSPORTS)}")
    setup = TransportSetup(
        engines=tuple(engines),
        rank=rank,
        world_size=world_size,
        gpus_per_engine=gpus_per_engine,
        connect=connect,
        device=device,
        folder=folder,
    )
    return TRANSPORTS[name](setup)
