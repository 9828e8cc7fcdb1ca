"""Reads a label for ``--rm-type math``: whole, as a number, a formula or a text; never in part.

math-verify is made for responses: in a text without marks it looks for the last number, so it would read ``2x+3`` as 2
and ``12:30`` as 12. A label is the answer and nothing else, so here it is read whole, or it is an error.
"""

import dataclasses
import itertools
import re
from decimal import Decimal
from typing import Any

LONGEST_TEXT = 100
"""Characters: a longer text without a marked formula is a solution, no answer."""
_LARGEST_EXPONENT = 300

_NUMBER = re.compile(r"[+-]?(\d+|\d{1,3}(,\d{3})+|\d{1,3}( \d{3})+)?(\.\d+)?(?<=\d)\s*(\\?%)?")
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d+)?[eE][+-]?\d{1,4}")
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)\s*/\s*(\d+)")
_MARKED = re.compile(r"(?<!\\)\$\$?[^$]+(?<!\\)\$\$?|\\\(.+?\\\)|\\\[.+?\\\]", re.DOTALL)
_WHOLE = re.compile(r"(?<!\\)\$\$?([^$]+)(?<!\\)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"\s*(,|,?\s*\b(and|or)\b)\s*")
_INTRODUCED = re.compile(r"(the\s+)?(final\s+)?answer(\s+is\b|\s*:)\s*:?\s*", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_CODE = re.compile(r"(?<![\d.,])0[0-9A-Za-z]")
"""A date (2024-01-01), a clock time (09:30), hexadecimal digits: zeros that no number begins with."""
_NAMES = frozenset(
    {
        "sqrt",
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
        "pi",
        "infty",
        "infinity",
        "inf",
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "theta",
        "lambda",
        "sigma",
        "omega",
        "varphi",
    }
)
"""Functions and constants that are also written as words."""
_PERCENT = re.compile(r"\s*\\?%\s*$")
_ROOT_CALL = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_ROOT = re.compile(r"√\s*(\w+|\([^()]*\))")
_AREA = re.compile(r"(?<=[\d}])(\s*)(mm|cm|dm|km|ft|in|yd|mi)\s*\^\{?([23])\}?")
"""Units of areas and volumes as they are typed; math-verify takes them away where they stand in ``\\text{...}``."""
_SIGNS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "\N{MIDDLE DOT}": r"\cdot ",
        "\N{DIVISION SIGN}": r"\div ",
        "\N{LESS-THAN OR EQUAL TO}": r"\le ",
        "\N{GREATER-THAN OR EQUAL TO}": r"\ge ",
        "\N{NOT EQUAL TO}": r"\ne ",
        "\N{INFINITY}": r"\infty ",
        "\N{GREEK SMALL LETTER PI}": r"\pi ",
        "\N{DEGREE SIGN}": r"^\circ ",
        "\N{SUPERSCRIPT TWO}": "^2",
        "\N{SUPERSCRIPT THREE}": "^3",
        "\N{UNION}": r"\cup ",
        "\N{INTERSECTION}": r"\cap ",
        "\N{ELEMENT OF}": r"\in ",
    }
)


class LabelError(ValueError):
    """A label that cannot be read whole; the message says why."""


@dataclasses.dataclass(frozen=True)
class Gold:
    """A label as it is compared: one of the two is set.

    Attributes:
        latex: what math-verify reads, all formulas marked; empty when it is a text.
        text: words, compared as they are written (:func:`plain_text`).
    """

    latex: str = ""
    text: str | None = None


def label_text(label: Any) -> str | None:
    """The label as text; None when it is neither a text nor a finite number."""
    if isinstance(label, str):
        return label
    if isinstance(label, bool) or not isinstance(label, int | float | Decimal):
        return None
    number = Decimal(repr(label)) if isinstance(label, float) else Decimal(label)
    # 1e-07 and 1e+22 would be read as a product with Euler's number.
    return f"{number:f}" if number.is_finite() else None


def read_label(label: str) -> Gold:
    """Says how a label is compared.

    A number, a formula (marked or not) and words are told apart by what is written; nothing is parsed here, so a
    formula may still turn out to be none.

    Raises:
        LabelError: it is empty, holds numbers among words, or is a text longer than
            :data:`LONGEST_TEXT`.
    """
    label = label.rpartition("####")[2].strip()  # GSM8K writes the solution before this mark
    if "\\boxed{" in label:
        content = last_boxed(label)
        if content is None:
            raise LabelError("the braces of its \\boxed{ do not match")
        return _formula(content, letters_are_words=True)
    marked = _WHOLE.fullmatch(label)
    if marked is not None:
        return _formula(next(g for g in marked.groups() if g is not None))
    if _MARKED.search(label):
        return Gold(latex=_marked_among_words(label))
    return _unmarked(_INTRODUCED.sub("", label, count=1) if _INTRODUCED.match(label) else label)


def _formula(content: str, *, letters_are_words: bool = False) -> Gold:
    """What stands between marks: letters are variables there, but not those of a LaTeX text."""
    content = content.strip()
    if _NUMBER.fullmatch(content):
        return _number(content)
    may_be_words = _TEXT_COMMAND.search(content) or (letters_are_words and not any(c.isdigit() for c in content))
    if may_be_words and _is_words(content):
        return Gold(text=content)
    return _with_percent(content)


def _number(text: str) -> Gold:
    return _with_percent(text.lstrip("+").replace(" ", ""))


def _with_percent(formula: str) -> Gold:
    """The formula between marks, a percent sign behind them: math-verify reads it there only."""
    percent = _PERCENT.search(formula)
    return Gold(latex=f"${formula}$" if percent is None else f"${formula[: percent.start()]}$%")


def _marked_among_words(label: str) -> str:
    formulas = list(_MARKED.finditer(label))
    between = [label[a.end() : b.start()] for a, b in itertools.pairwise(formulas)]
    outside = _MARKED.sub("", label)
    if any(c.isdigit() for c in outside):
        raise LabelError("it holds numbers outside its marked formula, and which of them is the answer is not said")
    if not all(_JOINED.fullmatch(text) for text in between):
        raise LabelError("it holds several marked formulas that are not joined by a comma, 'and' or 'or'")
    return label


def _unmarked(label: str) -> Gold:
    label = label.strip()
    if label.endswith(".") and not label.endswith(".."):
        label = label[:-1].rstrip()
    bare = label.strip("$€£¥ ")
    if len(bare) < len(label) and _NUMBER.fullmatch(bare):
        label = bare
    number = _ROOT_CALL.sub(r"\\sqrt{\1}", label.translate(_SIGNS))
    number = _AREA.sub(r"\1\\text{ \2}^\3", _ROOT.sub(r"\\sqrt{\1}", number))
    if number and _NUMBER.fullmatch(number):
        return _number(number)
    if _SCIENTIFIC.fullmatch(number):
        if abs(int(number.lower().partition("e")[2])) > _LARGEST_EXPONENT:
            raise LabelError(f"its exponent is beyond {_LARGEST_EXPONENT}")
        return Gold(latex=f"${Decimal(number):f}$")
    if mixed := _MIXED.fullmatch(number):
        sign, whole, upper, lower = mixed.groups()
        return Gold(latex=f"${sign.replace('+', '')}(" + whole + "+\\frac{" + upper + "}{" + lower + "})$")
    if not label:
        raise LabelError("it is empty")
    if "\n" in label and "\\" not in label:
        raise LabelError("it has several lines, and marks no formula as the answer")
    if _is_words(label) or _CODE.search(label):
        if len(label) > LONGEST_TEXT:
            raise LabelError(f"it is a text of more than {LONGEST_TEXT} characters, and marks no formula as the answer")
        return Gold(text=label)
    return _with_percent(_named_commands(number))


def _is_words(label: str) -> bool:
    """Whether it holds words rather than variables.

    Raises:
        LabelError: words and numbers stand together.
    """
    from math_verify.parser import NormalizationConfig, normalize_latex

    # As math-verify does with the response: units go, "and" and "or" become commas.
    config = NormalizationConfig(basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="none")
    bare = _COMMAND.sub(" ", _TEXT_COMMAND.sub(r" \1 ", normalize_latex(_ENVIRONMENT.sub(" ", label), config)))
    runs = [r for r in re.findall(r"[^\W\d_]+", bare) if r.lower() not in _NAMES]
    only_letters = all(c.isalpha() or c.isspace() or c in ".,;!?'\"()-{}" for c in bare)
    words = [r for r in runs if len(r) >= (2 if only_letters else 4)]
    if words and any(c.isdigit() for c in bare):
        raise LabelError(f"it holds a number and the word {words[0]!r}, which is no unit that math-verify knows")
    return bool(words)


def _named_commands(label: str) -> str:
    """Puts the backslash before a function or constant that is written as a word: pi/2."""
    return re.sub(
        r"(?<![\\A-Za-z])([A-Za-z]+)(?![A-Za-z])",
        lambda m: f"\\{m[1]} " if m[1] in _NAMES - {"sqrt", "inf", "infinity"} else m[1],
        label,
    )


def last_boxed(text: str) -> str | None:
    """Gives what stands in the last box with matching braces, or None."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for end in range(begin - 1, len(text)):
        if text[end] in "{}" and text[end - 1] != "\\":
            depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[begin:end]
    return None


def answer_text(response: str) -> str:
    """The answer of a response in words: its last box; else the last line, or what follows ``answer is`` in it."""
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed
    lines = response.rpartition("####")[2].strip().splitlines()
    line = lines[-1] if lines else ""
    introduced = list(_INTRODUCED.finditer(line))
    return line[introduced[-1].end() :] if introduced else line


def plain_text(text: str) -> str:
    """A text without marks, case, full stop and repeated blanks, to compare with another."""
    text = _TEXT_COMMAND.sub(r" \1 ", text)
    text = re.sub(r"\\[,;: ]|[$*~]", " ", text)
    return " ".join(text.casefold().split()).rstrip(".")
