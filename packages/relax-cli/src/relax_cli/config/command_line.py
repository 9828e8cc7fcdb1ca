"""The command line and the environment: words in, typed values out, every error collected.

argparse writes the help. It does not read the command line, because it stops at the first error, and because it takes
a value that begins with a dash for an option.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from relax_data.options import flag

from relax_cli.config.schema import UNSET, Option, from_text
from relax_cli.config.suggest import did_you_mean

ENVIRONMENT_PREFIX = "RELAX_"
NOT_OPTIONS = frozenset({"RELAX_CACHE_DIR"})
"""Variables of that prefix that are no options: they belong to the machine, not to a run."""
MOST_SUGGESTIONS = 20
"""Names of one source that get suggestions: a file of thousands of wrong names is no file of options."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A value that the user gave, and where: ``command line``, ``RELAX_LR``, ``train.toml:3``."""

    value: Any
    origin: str


@dataclasses.dataclass
class Layer:
    """The options that one source holds.

    Attributes:
        values: by snake_case name.
        errors: what could not be read.
        failed: names of the options that those errors are about.
        unknown: how many names there are no options of.
    """

    values: dict[str, Given] = dataclasses.field(default_factory=dict)
    errors: list[str] = dataclasses.field(default_factory=list)
    failed: set[str] = dataclasses.field(default_factory=set)
    unknown: int = 0

    def no_such_option(self, namespace: "Namespace", written: str, spell: Callable[[str], str] = str) -> ValueError:
        """Count a name that does not exist, and make its error, with the nearest names for the first few of them."""
        self.unknown += 1
        if self.unknown > MOST_SUGGESTIONS:
            return ValueError("no such option")
        return ValueError(namespace.unknown(written, spell))


@dataclasses.dataclass(frozen=True)
class Namespace:
    """All options there are: ours by name, and those of the SGLang server that are passed through.

    Attributes:
        options: ours, by snake_case name.
        passed: looks up an option of the server; ValueError with the reason when the system sets it itself.
        passed_names: names of the options that may be passed through, for suggestions.
    """

    options: Mapping[str, Option]
    passed: Callable[[str], Option | None] = lambda name: None
    passed_names: Sequence[str] = ()

    def find(self, name: str) -> Option | None:
        """The option of that snake_case name, or None.

        Raises:
            ValueError: it is a server argument that users may not set; the message says why.
        """
        return self.options.get(name) or self.passed(name)

    def unknown(self, written: str, spell: Callable[[str], str] = str) -> str:
        """``no such option; did you mean ...?`` for a name that does not exist; ``spell`` writes the nearest ones."""
        return "no such option" + did_you_mean(written, [*self.options, *self.passed_names], spell)


def read_command_line(words: Sequence[str], namespace: Namespace) -> Layer:
    """Read ``--flag value ...``, ``--flag=value``, ``--boolean`` and ``--no-boolean``, each option once.

    Every word up to the next one that begins with ``--`` belongs to the flag before it, so ``-1`` and ``-1e-6`` are
    values. A value that begins with ``--`` is written ``--flag=--value``.
    """
    layer = Layer()
    seen: dict[str, str] = {}
    for written, values in _split(words):
        if written is None:
            layer.errors.append(f"{' '.join(values)}: a value without a flag; flags begin with --")
            continue
        _read_flag(written, values, namespace, layer, seen)
    return layer


def _split(words: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    groups: list[tuple[str | None, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            groups.append((name, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append((None, [word]))
    return groups


def _read_flag(written: str, words: list[str], namespace: Namespace, layer: Layer, seen: dict[str, str]) -> None:
    """Read one flag into ``layer``; ``seen`` holds how each option before it is written."""
    name = written.replace("-", "_")
    where = f"--{written}"
    try:
        if "_" in written or written != written.lower():
            raise layer.no_such_option(namespace, written, flag)
        option, positive = namespace.find(name), True
        if option is None and name.startswith("no_"):
            option, positive = namespace.find(name.removeprefix("no_")), False
        if option is None:
            raise layer.no_such_option(namespace, written, flag)
        name = option.name
        if name in seen:
            also = f", also as {seen[name]}" if seen[name] != where else ""
            raise ValueError(f"given twice{also}; one of them would have no effect: remove it")
        seen[name] = where
        value = _value(option, positive, words)
    except ValueError as error:
        layer.errors.append(f"{where}: {error}")
        layer.failed.add(name)
        return
    layer.values[name] = Given(value, "command line")


def _value(option: Option, positive: bool, words: list[str]) -> Any:
    """The value of the words after a flag, or after its ``--no-`` form when it is not ``positive``."""
    if option.kind.base is not bool:
        if not positive:
            raise ValueError(f"{option.flag} takes a value, so there is no --no-{option.flag[2:]}")
        return from_text(option.kind, words)
    if positive and option.kind.may_be_unset and words == ["none"]:
        return UNSET
    if words:
        raise ValueError(f"takes no value, found {' '.join(words)!r}; write {option.flag} or --no-{option.flag[2:]}")
    return positive


def read_environment(environ: Mapping[str, str], namespace: Namespace) -> Layer:
    """Reads ``RELAX_<KEY>``. Booleans are true/false or 1/0; lists are split as a shell would."""
    layer = Layer()
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_OPTIONS:
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        try:
            option = namespace.find(name)
            if option is None or variable != variable.upper():
                raise layer.no_such_option(namespace, name, lambda n: ENVIRONMENT_PREFIX + n.upper())
            text = environ[variable]
            words = shlex.split(text) if option.kind.many else [text]
            layer.values[name] = Given(from_text(option.kind, words), variable)
        except ValueError as error:
            layer.errors.append(f"environment {variable}: {error}")
            layer.failed.add(name)
    return layer


class _Help(argparse.ArgumentParser):
    """Only formats: nothing is parsed with it."""

    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command for its help: how it is called, what it does, and what stands at the end."""

    usage: str
    description: str
    epilog: str = ""


def help_text(
    classes: Iterable[type], options: Mapping[str, Option], epilogs: Mapping[type, str], command: Command
) -> str:
    """The text of ``--help``: one group a settings class, titled by its ``TITLE``.

    Args:
        classes: the settings classes in the order of the groups.
        options: all options by name.
        epilogs: a sentence under the title of a group.
        command: whose help it is.
    """
    parser = _Help(
        usage=command.usage,
        description=command.description,
        epilog=f"List values are separated by spaces. `none` is the value of an option that is not set. "
        f"{command.epilog}",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    for cls in classes:
        group = parser.add_argument_group(getattr(cls, "TITLE"), epilogs.get(cls))  # noqa: B009
        for option in options.values():
            if option.owner is cls:
                _add_to_help(group, option)
    return parser.format_help()


def _add_to_help(group: Any, option: Option) -> None:
    facts = [option.range] if option.range else []
    if option.required:
        facts.append("required")
    elif option.default not in (None, False, (), {}) and "default" not in option.help:
        facts.append(f"default: {_shown(option.default)}")
    text = (option.help + (f" ({'; '.join(facts)})" if facts else "")).replace("%", "%%")
    if option.kind.base is bool:
        group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        return
    kind = option.kind
    metavar = option.metavar or ("JSON" if kind.base is dict else {int: "N", float: "X"}.get(kind.base, "VALUE"))
    group.add_argument(
        option.flag,
        nargs="+" if kind.many else None,
        choices=kind.choices or None,
        metavar=None if kind.choices and not option.metavar else metavar,
        default=argparse.SUPPRESS,
        help=text,
    )


def _shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
