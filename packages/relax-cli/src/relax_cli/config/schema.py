"""Reads the options out of the packages' settings classes, and turns what users write into values of the right type."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

ValueType = type[bool] | type[int] | type[float] | type[str] | type[dict]

LARGEST_INTEGER = 10**12
"""No count, size or seed of a run is larger; what is would overflow somewhere in the middle of it."""
DEEPEST = 32
"""Levels of nesting in a JSON value."""
UNSET = object()
"""What ``none`` is read as: the option gets its default, as if nobody had set it."""

_NOUNS: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kind of value that an option holds.

    Attributes:
        base: type of the value, or of one element when ``many``.
        many: a tuple of values; space separated on the command line, a list in a file.
        optional: the default is ``None``; users write ``none``.
        choices: the allowed values, empty for all.
    """

    base: ValueType
    many: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def may_be_unset(self) -> bool:
        """Whether ``none`` stands for "not set"."""
        return self.optional or self.many

    @property
    def noun(self) -> str:
        """The expected value, for error messages: ``an integer``, ``one of a, b``, ``a list of strings``."""
        if not self.many:
            return self.noun_of_one
        each = self.noun_of_one
        return f"a list, each {each}" if self.choices else f"a list of {each.split(' ', 1)[1]}s"

    @property
    def noun_of_one(self) -> str:
        """The expected value of one element, for error messages."""
        return "one of " + ", ".join(map(str, self.choices)) if self.choices else _NOUNS[self.base]


def kind_of(annotation: Any) -> Kind:
    """The kind behind a field's annotation; an assertion holds that it is one of those that options may have."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not types.NoneType]
        assert len(rest) == 1 == len(arguments) - 1, f"an option cannot be {annotation}"
        return dataclasses.replace(kind_of(rest[0]), optional=True)
    if origin is Literal:
        bases = {type(a) for a in arguments}
        assert bases in ({int}, {str}), f"an option cannot be {annotation}"
        return Kind(bases.pop(), choices=arguments)
    if origin is tuple:
        assert arguments[1:] == (Ellipsis,), f"an option cannot be {annotation}"
        element = kind_of(arguments[0])
        plain = element.base in (int, float, str) and not element.many and not element.optional
        assert plain, f"an option cannot be {annotation}"
        return dataclasses.replace(element, many=True)
    if origin in (dict, Mapping) or annotation is dict:
        return Kind(dict)
    assert annotation in (bool, int, float, str), f"an option cannot be {annotation}"
    return Kind(annotation)


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the command line.

    Attributes:
        name: in snake_case, as the field is called.
        owner: the settings class it belongs to; None for an argument that is passed through to the SGLang server.
        default: value when nobody says otherwise; ``dataclasses.MISSING`` when it is required.
        range: which values are right, in words (``1 or more``); empty for all of the kind.
    """

    name: str
    kind: Kind
    default: Any = None
    help: str = ""
    metavar: str | None = None
    owner: type | None = None
    range: str = ""

    @property
    def flag(self) -> str:
        """The flag, ``--max-tokens-per-gpu``."""
        return "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        """Whether the user must give a value."""
        return self.default is dataclasses.MISSING


def options_of(cls: type) -> list[Option]:
    """The options of one settings class, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        allowed = field.metadata.get("range")
        kind = kind_of(hints[field.name])
        # A choice whose values are the keys of a table, which a Literal cannot name.
        choices = tuple(field.metadata.get("choices", ()))
        found.append(
            Option(
                field.name,
                dataclasses.replace(kind, choices=choices) if choices else kind,
                default,
                field.metadata.get("help", ""),
                field.metadata.get("metavar"),
                cls,
                allowed.text if allowed is not None else "",
            )
        )
    return found


def merge_options(classes: Iterable[type]) -> dict[str, Option]:
    """All options in one flat namespace, by snake_case name.

    Raises:
        AssertionError: two classes own one name, or a name reads as the ``--no-`` form of a boolean option.
    """
    merged: dict[str, Option] = {}
    for cls in classes:
        for option in options_of(cls):
            other = merged.get(option.name)
            assert other is None, f"{option.flag} belongs to {other and other.owner} and to {cls}"
            merged[option.name] = option
    for name in merged:
        positive = merged.get(name.removeprefix("no_"))
        assert not name.startswith("no_") or positive is None or positive.kind.base is not bool, (
            f"--{name} is ambiguous"
        )
    return merged


def from_text(kind: Kind, words: list[str]) -> Any:
    """Converts the words after a flag, or of an environment variable.

    Returns:
        the value; :data:`UNSET` for ``none``, where the option may be left unset.

    Raises:
        ValueError: wrong number of words or a wrong value; the message says what was expected and what was found.
    """
    if not words:
        raise ValueError(f"expected {kind.noun}, found nothing")
    if kind.may_be_unset and words == ["none"]:
        return UNSET
    if kind.many:
        return tuple(_scalar_from_text(kind, w) for w in words)
    if len(words) > 1:
        raise ValueError(f"expected {kind.noun}, found {len(words)} values: {' '.join(words)[:80]}")
    return _scalar_from_text(kind, words[0])


def _scalar_from_text(kind: Kind, word: str) -> Any:
    value: Any = word
    try:
        if kind.base is bool:
            value = {"true": True, "1": True, "false": False, "0": False}[word.lower()]
        elif kind.base in (int, float):
            value = kind.base(word)
        elif kind.base is dict:
            value = json.loads(word, object_pairs_hook=_each_key_once)
    except _GivenTwiceError:
        raise
    except (ValueError, KeyError, RecursionError):
        expected = "a JSON object such as '{\"key\": 1}'" if kind.base is dict else kind.noun_of_one
        raise ValueError(f"expected {expected}, found {_shown(word)}") from None
    return _checked(kind, value, word)


class _GivenTwiceError(ValueError):
    """A key stands twice in a JSON object: one of its values would have no effect."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _GivenTwiceError(f"the key {_shown(key)} is given twice in it; remove one")
        found[key] = value
    return found


def from_object(kind: Kind, value: Any) -> Any:
    """Checks a value of a configuration file; a string is never taken for a number or a boolean.

    Returns:
        the value; :data:`UNSET` for ``none``, where the option may be left unset.

    Raises:
        ValueError: the type is wrong; the message says what was expected and what was found.
    """
    if kind.may_be_unset and value in (None, "none", ["none"]):
        return UNSET
    if kind.many:
        return tuple(_scalar_from_object(kind, v) for v in (value if isinstance(value, list) else [value]))
    return _scalar_from_object(kind, value)


def _scalar_from_object(kind: Kind, value: Any) -> Any:
    if kind.base is dict and isinstance(value, str):
        return _scalar_from_text(kind, value)
    if kind.base is float and isinstance(value, int) and not isinstance(value, bool):
        _check_integer(value)
        value = float(value)
    return _checked(kind, value, value)


def _checked(kind: Kind, value: Any, shown: Any) -> Any:
    right = isinstance(value, kind.base) and not (kind.base is int and isinstance(value, bool))
    if right and isinstance(value, float) and not math.isfinite(value):
        right = False
    if right and kind.choices and value not in kind.choices:
        right = False
    if not right:
        raise ValueError(f"expected {kind.noun_of_one}, found {_shown(shown)}")
    if value == "":
        raise ValueError("an empty string means nothing here; leave the option out, or is a shell variable not set?")
    _check_plain(value)
    return value


def _check_plain(value: Any, depth: int = 0) -> None:  # noqa: C901  # one check after the other
    """Holds that a value can be printed, written as TOML and sent to other processes, nested ones in all their parts.

    Raises:
        ValueError: it cannot; the message says what is wrong.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if isinstance(value, str):
        if "\0" in value:
            raise ValueError("holds a NUL character")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{_shown(value)} is not valid UTF-8") from None
    elif isinstance(value, int):
        _check_integer(value)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"holds {value}, which is no number of JSON")
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"has the key {_shown(key)}; keys are strings")
            _check_plain(key)
            _check_plain(item, depth + 1)
    elif value is not None:
        raise ValueError(f"holds a {type(value).__name__}; it may hold what JSON can hold")


def _check_integer(value: int) -> None:
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{_shown(value)} is out of range; integers lie between -10^12 and 10^12")


def _shown(value: Any) -> str:
    """A value in a message: short, and for integers that Python does not print, their size."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        return f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
