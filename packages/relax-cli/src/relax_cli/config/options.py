"""The packages whose settings make up the one flat namespace of ``relax train``."""

import dataclasses
import functools
import typing
from typing import Any

from relax_cli.config import settings
from relax_cli.config.command_line import Namespace
from relax_cli.config.schema import Option, kind_of, merge_options


def settings_classes() -> tuple[type, ...]:
    """All settings classes in the order of ``--help``."""
    import relax_data.settings
    import relax_profiling.settings
    import relax_rollout.settings
    import relax_train.settings

    run, cluster, logging, debug = settings.SETTINGS
    return (
        run,
        *relax_data.settings.SETTINGS,
        *relax_rollout.settings.SETTINGS,
        *relax_train.settings.SETTINGS,
        cluster,
        logging,
        debug,
        *relax_profiling.settings.SETTINGS,
    )


@functools.cache
def namespace() -> Namespace:
    """Every option of ``relax train``, ours and those passed through to the SGLang server."""
    from relax_rollout.engines.sglang.arguments import owner, server_arguments

    options = {name: option for name, option in merge_options(settings_classes()).items() if name != "sglang_extra"}
    names = [f"sglang_{name.replace('-', '_')}" for name in server_arguments() if owner(name) is None]
    return Namespace(options, _passed_option, [n for n in names if n not in options])


def _passed_option(name: str) -> Option | None:
    """The argument of SGLang's server behind ``sglang_<name>``, or None when it has none of that name.

    Raises:
        ValueError: it has, but the system sets it itself.
    """
    from relax_rollout.engines.sglang.arguments import owner, server_arguments

    key = name.removeprefix("sglang_").replace("_", "-")
    if not name.startswith("sglang_") or key not in server_arguments():
        return None
    if (reason := owner(key)) is not None:
        raise ValueError(f"cannot be set: {reason}")  # who asks names the option
    argument = server_arguments()[key]
    base = {"flag": bool, "int": int, "float": float}.get(argument.kind, str)
    choices = tuple(c for c in argument.choices if isinstance(c, base))
    return Option(name, dataclasses.replace(kind_of(base), many=argument.many, choices=choices))


def attributes(config_class: type) -> dict[str, type]:
    """The settings classes of ``RunConfig`` by attribute."""
    hints = typing.get_type_hints(config_class)
    return {name: hint for name, hint in hints.items() if _is_settings(hint)}


@functools.cache
def part_class(cls: type, field: str) -> type | None:
    """The settings class of a field of a composed settings class; None when the field is an option."""
    hint = typing.get_type_hints(cls)[field]
    return hint if _is_settings(hint) else None


def _is_settings(hint: Any) -> bool:
    from relax_train.settings import TrainSettings

    return isinstance(hint, type) and (hasattr(hint, "TITLE") or hint is TrainSettings)
