"""The base of the settings classes: declared ranges, in the words that a user reads."""

import dataclasses
import math
from typing import Any, ClassVar

import pytest
from relax_data.options import LARGEST_COEFFICIENT, LARGEST_COUNT, Range, Settings, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Settings):
    TITLE: ClassVar[str] = "Example"

    count: int = option(1, ge=1, le=65535)
    share: float = option(0.5, gt=0, lt=1)
    top_k: int = option(-1, ge=1, one_of=(-1,))
    bits: int = option(4, one_of=(2, 4, 8))
    any_number: float = option(0.0)
    endless: float = option(0.0, finite=False)
    ids: tuple[int, ...] = option((), ge=0)
    limit: int | None = option(None, ge=1)
    name: str = option("a")

    def _problems(self, given: frozenset[str]) -> list[str]:
        return ["--limit has no effect without --name b"] if "limit" in given and self.name != "b" else []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"count": 0}, "--count must be 1 or more, not 0"),
        ({"count": 65536}, "--count must be 65535 or less, not 65536"),
        ({"share": 0.0}, "--share must be above 0, not 0.0"),
        ({"share": 1.0}, "--share must be below 1, not 1.0"),
        ({"share": math.nan}, "--share must be a finite number, not nan"),
        ({"top_k": 0}, "--top-k must be 1 or more, or -1, not 0"),
        ({"top_k": -2}, "--top-k must be 1 or more, or -1, not -2"),
        ({"bits": 3}, "--bits must be 2, 4 or 8, not 3"),
        ({"any_number": math.inf}, "--any-number must be a finite number, not inf"),
        ({"ids": (3, -1, 5)}, "--ids must be 0 or more, not -1"),
        ({"limit": 0, "name": "b"}, "--limit must be 1 or more, not 0"),
    ],
)
def test_a_value_out_of_its_range_is_one_problem_with_flag_range_and_value(
    values: dict[str, Any], problem: str
) -> None:
    assert Example(**values).problems(frozenset(values)) == [problem]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"count": 1},
        {"count": 65535},
        {"share": 1e-9},
        {"top_k": -1},
        {"top_k": 7},
        {"bits": 8},
        {"any_number": -1e300},
        {"endless": math.inf},
        {"ids": (0, 7)},
        {"limit": 1, "name": "b"},
    ],
)
def test_a_value_in_its_range_is_right(values: dict[str, Any]) -> None:
    assert Example(**values).problems(frozenset(values)) == []


def test_ranges_come_first_and_everything_is_told() -> None:
    assert Example(count=0, limit=0).problems(frozenset({"limit"})) == [
        "--count must be 1 or more, not 0",
        "--limit must be 1 or more, not 0",
        "--limit has no effect without --name b",
    ]


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (Range(), ""),
        (Range(ge=1, le=LARGEST_COUNT), "1 or more"),
        (Range(ge=0, le=LARGEST_COEFFICIENT), "0 or more"),
        (Range(gt=0, le=1), "above 0, at most 1"),
        (Range(ge=0, lt=1), "0 or more, below 1"),
        (Range(ge=1, le=LARGEST_COUNT, one_of=(-1,)), "1 or more, or -1"),
        (Range(one_of=(2, 4, 8)), "2, 4 or 8"),
    ],
)
def test_the_range_in_the_help_leaves_out_the_ends_of_number_types(allowed: Range, text: str) -> None:
    assert allowed.text == text
