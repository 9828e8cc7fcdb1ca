"""Options: declared, read from command line, environment and file, merged and checked.

Door: :func:`resolve`, which gives a :class:`relax_cli.config.resolve.RunConfig` or raises :class:`ConfigError`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_cli.config.resolve import ConfigError, resolve

__all__ = ["ConfigError", "resolve"]


def __getattr__(name: str) -> Any:
    """Import the door when it is used: parts of this folder are imported by what the door itself imports."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from relax_cli.config import resolve as module

    return getattr(module, name)
