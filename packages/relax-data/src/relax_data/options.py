"""Declaration of options by a settings class: one dataclass field is one flag with its documentation and its range.

A settings class is a frozen, keyword-only dataclass below :class:`Settings`. The name of a field in kebab-case is the
flag (``max_tokens_per_gpu`` is ``--max-tokens-per-gpu``), its annotation is the type of the value, and :func:`option`
carries the help text and the range. The command line, the configuration file, the environment, ``--help`` and the
checks all read this one declaration::

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RunSettings(Settings):
        TITLE: ClassVar[str] = "Run"

        num_rollout: int | None = option(None, "Rollouts of the whole run.", ge=1, le=LARGEST_COUNT)

Annotations that the command line understands: ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``,
``tuple[T, ...]`` (space-separated values), ``dict[str, Any]`` (a JSON object), and ``... | None``.
"""

import dataclasses
import math
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

LARGEST_COUNT = 2**31 - 1
"""Most of anything that is counted: tensors, engines and Ray hold counts and token ids in 32-bit integers."""
LARGEST_COEFFICIENT = 1e6
"""Most of a factor of the loss or of the optimizer: beyond it a step in float32 overflows or moves nothing else."""
LARGEST_FLOAT = 3e38
"""Most of a bound that may be set so high that it never holds: float32 ends at 3.4e38."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
    """The values of an option that are right: those within all bounds, and those of ``one_of``.

    Attributes:
        ge: least value.
        gt: the value must be above this one.
        le: greatest value.
        lt: the value must be below this one.
        one_of: values that are right whatever the bounds say, such as -1 for "all"; without bounds the only right ones.
        finite: whether a ``float`` must be a number: neither infinite nor NaN.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    one_of: tuple[Any, ...] = ()
    finite: bool = True

    @property
    def bounded(self) -> bool:
        """Whether there is a bound at all."""
        return any(bound is not None for bound in (self.ge, self.gt, self.le, self.lt))

    def expected(self, value: Any) -> str | None:
        """Says what ``value`` must be instead, for example ``1 or more``; None when it is right."""
        if value in self.one_of:
            return None
        also = f", or {_listed(self.one_of)}" if self.one_of else ""
        if self.one_of and not self.bounded:
            return _listed(self.one_of)
        if self.finite and isinstance(value, float) and not math.isfinite(value):
            return "a finite number" + also
        for bound, right, text in (
            (self.ge, self.ge is None or value >= self.ge, "{} or more"),
            (self.gt, self.gt is None or value > self.gt, "above {}"),
            (self.le, self.le is None or value <= self.le, "{} or less"),
            (self.lt, self.lt is None or value < self.lt, "below {}"),
        ):
            if not right:
                return text.format(bound) + also
        return None

    @property
    def text(self) -> str:
        """The range for ``--help``: ``1 or more``, ``above 0, at most 1``, ``1 or more, or -1``; empty for any value.

        Bounds that only keep numbers inside of 32 bits are left out.
        """
        if self.one_of and not self.bounded:
            return _listed(self.one_of)
        parts = []
        if self.ge is not None:
            parts.append(f"{self.ge} or more")
        if self.gt is not None:
            parts.append(f"above {self.gt}")
        if self.le is not None and self.le < LARGEST_COEFFICIENT:
            parts.append(f"at most {self.le}")
        if self.lt is not None:
            parts.append(f"below {self.lt}")
        return ", ".join(parts) + (f", or {_listed(self.one_of)}" if parts and self.one_of else "")


def _listed(values: Sequence[Any]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def option(  # noqa: PLR0913  # one argument for each fact of an option
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    metavar: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    one_of: Sequence[Any] = (),
    finite: bool = True,
) -> Any:
    """Declare one option of a settings class.

    The range holds for each value of an option that takes several, and not for ``None``. What depends on more than the
    one value is for :meth:`Settings._problems`.

    Args:
        default: value when the user says nothing; leave it out for a required option.
        help: one or two sentences for ``--help``: what it does, its unit, what it needs.
        metavar: placeholder of the value in ``--help``.
        ge: least value.
        gt: the value must be above this one.
        le: greatest value.
        lt: the value must be below this one.
        one_of: values that are right whatever the bounds say; without bounds the only right ones.
        finite: whether a ``float`` must be neither infinite nor NaN.
    """
    allowed = Range(ge=ge, gt=gt, le=le, lt=lt, one_of=tuple(one_of), finite=finite)
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, "range": allowed})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the settings classes: it checks the declared ranges.

    A subclass is a frozen, keyword-only dataclass with a ``TITLE``, the heading of its options in ``--help``.
    """

    TITLE: ClassVar[str]

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """List everything wrong with these values, each message with its flag and its fix.

        Args:
            given: names of the fields that the user set, of all settings classes; what was set by hand and has no
                effect is a problem, a default without effect is none.
        """
        return self._out_of_range() + self._problems(given)

    def _problems(self, given: frozenset[str]) -> list[str]:
        """List what is wrong and is not a range of one value; for subclasses to override.

        The values may lie outside of their ranges here: that is told already, and must only not raise.
        """
        return []

    def _out_of_range(self) -> list[str]:
        found = []
        for field in dataclasses.fields(self):
            allowed = field.metadata.get("range")
            held = getattr(self, field.name)
            if allowed is None or held is None:
                continue
            for value in held if isinstance(held, tuple) else (held,):
                if (expected := allowed.expected(value)) is not None:
                    found.append(f"{flag(field.name)} must be {expected}, not {value}")
        return found


def functions_help(table: Mapping[str, Callable[..., Any]]) -> str:
    """Name and first line of the docstring of every function of a table, for the help of an option that picks one."""
    lines = ((name, (function.__doc__ or "").strip().partition("\n")[0]) for name, function in table.items())
    return " ".join(f"{name}: {line}" for name, line in lines)


def flag(field_name: str) -> str:
    """``max_tokens_per_gpu`` -> ``--max-tokens-per-gpu``."""
    return "--" + field_name.replace("_", "-")


def url_problem(field_name: str, url: str) -> str | None:
    """Says what is wrong with the address of an HTTP server; None when nothing is that shows without asking it."""
    example = "write for example http://127.0.0.1:8000"
    if not url.startswith(("http://", "https://")):
        return f"{flag(field_name)} {url!r} is no address; it must start with http:// or https://, {example}"
    try:
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname or any(c.isspace() for c in url) or parts.port == 0:
            raise ValueError("it needs the name of a host, no blanks, and a port from 1 to 65535")
    except ValueError as error:  # an IPv6 address without its bracket, a port that is none
        return f"{flag(field_name)} {url!r} is no address ({error}); {example}"
    return None


def given_flags(names: Sequence[str]) -> str:
    """A readable list of flags for an error message: ``--a, --b``."""
    return ", ".join(flag(n) for n in names)
