"""The steps that a run has logged, of which every number is checked when it is used."""

import json
import reprlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_cli.simulate.settings import LONGEST

LENGTHS = "rollout/response_lengths"
_MOST = 1e15
"""More than any count of tokens and any number of seconds of a step."""
_ABOVE_0 = frozenset({"time/step", "time/generate", "time/train", "train/total_tokens", "train/samples"})
"""Metrics that no step that was trained has 0 of."""


class MeasuredStep:
    """All metrics of one step, and the lines of the file that they stand in.

    Args:
        path: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}
        self._lines: dict[str, int] = {}

    def add(self, row: dict[str, Any], line: int) -> None:
        """Takes the metrics of a line, which replace earlier ones of the same names."""
        self._values |= row
        self._lines |= dict.fromkeys(row, line)

    @property
    def is_async(self) -> bool:
        """Whether the trainer worked beside the engines: ``--fully-async``."""
        return "time/wait_for_rollout" in self._values

    def number(self, name: str) -> float | None:
        """A metric; None where it was not logged, or was ``null``, which stands for a number that is not finite.

        Raises:
            ValueError: no run logs such a value; the message names file and line.
        """
        value = self._values.get(name)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # A NaN is in no range, and an integer of any size can be compared.
        if not is_number or not 0 <= value <= _MOST or (value == 0 and name in _ABOVE_0):
            lowest = "above 0" if name in _ABOVE_0 else "of 0 or more"
            raise self._wrong(name, f"{name} is {reprlib.repr(value)}, not a number {lowest} and at most {_MOST:g}")
        return float(value)

    def lengths(self) -> dict[int, int]:
        """The response lengths and how often each occurs; empty when they were not logged.

        Raises:
            ValueError: they are something else; the message names file and line.
        """
        histograms = self._values.get("histograms") or {}
        pairs = histograms.get(LENGTHS) if isinstance(histograms, dict) else histograms
        if pairs is None:
            return {}
        counts: Counter[int] = Counter()
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            if not (isinstance(pair, list) and len(pair) == 2 and _is_count(pair[0]) and _is_count(pair[1])):
                what = f"not a pair of a length and how often it occurred, both integers of 1 to {LONGEST}"
                raise self._wrong("histograms", f"{LENGTHS} holds {reprlib.repr(pair)}, {what}")
            counts[pair[0]] += pair[1]
        return dict(counts)

    def _wrong(self, name: str, what: str) -> ValueError:
        return ValueError(f"{self._path}:{self._lines[name]}: {what}; mend the line, or take it out")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LONGEST


def read_steps(path: Path) -> tuple[list[MeasuredStep], str | None]:
    """The steps of a ``metrics.jsonl``, rising, and in words which lines are left out, if any are.

    Raises:
        OSError: the file cannot be read.
    """
    steps: dict[int, MeasuredStep] = {}
    skipped: list[tuple[int, str]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = _row(line)
            if isinstance(row, str):
                skipped.append((number, row))
            else:
                steps.setdefault(row["step"], MeasuredStep(path)).add(row, number)
    return [steps[step] for step in sorted(steps)], _told(path, skipped)


def _row(line: bytes) -> dict[str, Any] | str:
    """The metrics of a line, or what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # the second one: brackets in brackets
        return "no whole line of JSON, as after a kill"
    if not isinstance(row, dict):
        return "not an object with metrics"
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "without the number of its step"
    return row


def _told(path: Path, skipped: Sequence[tuple[int, str]]) -> str | None:
    if not skipped:
        return None
    number, why = skipped[0]
    count = "1 line" if len(skipped) == 1 else f"{len(skipped)} lines"
    first = "" if len(skipped) == 1 else "the first is "
    return f"{count} of {path} left out: {first}line {number}, {why}."


def of_last_mode(steps: Sequence[MeasuredStep]) -> tuple[Sequence[MeasuredStep], str | None]:
    """The last steps that were all made in one mode, and in words which ones are left out, if any are."""
    start = len(steps)
    while start and steps[start - 1].is_async == steps[-1].is_async:
        start -= 1
    if not start:
        return steps, None
    mode = "fully async" if steps[-1].is_async else "colocate"
    return steps[start:], (
        f"The run was made in both modes: only its last {len(steps) - start} steps, of {mode}, are used, not the "
        f"{start} before them."
    )
