"""Arithmetic on sorted, disjoint intervals of time."""

import bisect
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as sorted disjoint intervals."""
    merged: list[Interval] = []
    start, end = None, 0.0
    for s, e in sorted(intervals):
        if start is None:
            start, end = s, e
        elif s <= end:
            if e > end:
                end = e
        else:
            merged.append((start, end))
            start, end = s, e
    if start is not None:
        merged.append((start, end))
    return merged


def total(intervals: Iterable[Interval]) -> float:
    """The summed length."""
    return sum(e - s for s, e in intervals)


def intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The times in both; both sorted and disjoint."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        s = a[i][0] if a[i][0] > b[j][0] else b[j][0]
        e = a[i][1] if a[i][1] < b[j][1] else b[j][1]
        if s < e:
            found.append((s, e))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


class Cover:
    """Sorted disjoint intervals that are asked many times about small windows."""

    def __init__(self, intervals: list[Interval]) -> None:
        self._intervals = intervals
        self._starts = [s for s, _ in intervals]

    def __bool__(self) -> bool:
        return bool(self._intervals)

    def within(self, start: float, end: float) -> list[Interval]:
        """The parts inside the window."""
        i = max(0, bisect.bisect_right(self._starts, start) - 1)
        found: list[Interval] = []
        while i < len(self._intervals) and self._intervals[i][0] < end:
            s, e = self._intervals[i]
            s, e = max(s, start), min(e, end)
            if s < e:
                found.append((s, e))
            i += 1
        return found

    def outside(self, start: float, end: float) -> list[Interval]:
        """The parts of the window that no interval covers."""
        found: list[Interval] = []
        at = start
        for s, e in self.within(start, end):
            if s > at:
                found.append((at, s))
            at = e
        if at < end:
            found.append((at, end))
        return found
