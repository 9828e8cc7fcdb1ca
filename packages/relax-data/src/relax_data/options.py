"""How a settings class declares its options: one dataclass field is one flag with its documentation.

A settings class is a frozen, keyword-only dataclass. The name of a field in kebab-case is the flag
(``max_tokens_per_gpu`` is ``--max-tokens-per-gpu``), its annotation is the type of the value, and :func:`option`
carries the help text. The command line, the configuration file, the environment and ``--help`` all read this one
declaration.

Annotations that the command line understands: ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``,
``tuple[T, ...]`` (space-separated values), ``dict[str, Any]`` (a JSON object), and ``... | None``.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


def option(default: Any = dataclasses.MISSING, help: str = "", *, metavar: str | None = None) -> Any:
    """Declares one option of a settings class.

    Args:
        default: value when the user says nothing; leave it out for a required option.
        help: one or two sentences for ``--help``: what it does, its unit, what it needs.
        metavar: placeholder of the value in ``--help``.
    """
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar})


def flag(field_name: str) -> str:
    """``max_tokens_per_gpu`` -> ``--max-tokens-per-gpu``."""
    return "--" + field_name.replace("_", "-")


def given_flags(names: Sequence[str]) -> str:
    """A readable list of flags for an error message: ``--a, --b``."""
    return ", ".join(flag(n) for n in names)
