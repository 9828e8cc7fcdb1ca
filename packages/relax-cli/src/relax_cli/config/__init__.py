"""Options: declared, read from command line, environment and file, merged and checked.

Door: :func:`resolve`, which gives a :class:`relax_cli.config.run_config.RunConfig` or raises :class:`ConfigError`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_cli.config.resolution import resolve
    from relax_cli.config.run_config import ConfigError

__all__ = ["ConfigError", "resolve"]


def __getattr__(name: str) -> Any:
    """Import the door when it is used: parts of this folder are imported by what the door itself imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relax_cli.config import resolution as module

    return getattr(module, name)
