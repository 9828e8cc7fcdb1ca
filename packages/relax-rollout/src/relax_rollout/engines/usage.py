"""What the engines of a run do with their time: busy, idle or paused, in seconds and as intervals of the wall clock."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

State = Literal["busy", "idle", "paused"]
"""At least one request is there; none is there, and one could come; requests are held back for a push of weights, those
included that end meanwhile."""
Interval = tuple[State, float, float]
"""State, begin and end, seconds."""

SHORTEST_S = 0.005
"""Seconds below which an interval becomes a part of its neighbour."""
MOST_INTERVALS = 32
"""Intervals of an engine between two calls of :meth:`EngineUsage.take`; of more, the shorter ones are merged."""
_MOST_KEPT = 8 * MOST_INTERVALS  # before they are merged on the way, so that an hour without take() costs no memory


@dataclasses.dataclass(frozen=True)
class EngineTime:
    """A stretch of time of one engine.

    Attributes:
        seconds: in each state; they are exact, and add up to the whole stretch.
        request_s: seconds of all requests together in each state: over ``seconds``, the mean number of requests.
        intervals: one after the other, in seconds since the epoch; short ones are merged (:func:`merged`).
    """

    seconds: dict[State, float]
    request_s: dict[State, float]
    intervals: tuple[Interval, ...] = ()

    def share(self, state: State) -> float:
        """Share of the time in a state; those of all three add up to 1."""
        return self.seconds[state] / sum(self.seconds.values())

    @property
    def running(self) -> float:
        """Mean number of requests at the engine."""
        return sum(self.request_s.values()) / sum(self.seconds.values())


class _Account:
    def __init__(self, since: float, requests: int = 0) -> None:
        self.since, self.requests = since, requests
        self.seconds: dict[State, float] = {"busy": 0.0, "idle": 0.0, "paused": 0.0}
        self.request_s: dict[State, float] = {"busy": 0.0, "idle": 0.0, "paused": 0.0}
        self.intervals: list[Interval] = []

    def until(self, end: float, *, paused: bool) -> None:
        """Adds the time since the last change."""
        begin, self.since = self.since, end
        if end <= begin:
            return
        state: State = "paused" if paused else "busy" if self.requests else "idle"
        self.seconds[state] += end - begin
        self.request_s[state] += self.requests * (end - begin)
        if self.intervals and self.intervals[-1][0] == state:
            begin = self.intervals.pop()[1]
        self.intervals.append((state, begin, end))
        if len(self.intervals) > _MOST_KEPT:
            self.intervals = merged(self.intervals, most=_MOST_KEPT // 4)


class EngineUsage:
    """Keeps the time of each engine by its name. Every change is told before it counts, so nothing is sampled."""

    def __init__(
        self,
        names: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Starts to count; all engines are idle.

        Args:
            clock: seconds, of any beginning.
            wall: seconds since the epoch; it may jump.
        """
        self._clock, self._wall = clock, wall
        self._accounts = {name: _Account(clock()) for name in names}
        self._paused = False

    def began(self, name: str) -> None:
        """A request goes to an engine."""
        self._change(name, 1)

    def ended(self, name: str) -> None:
        """A request has left an engine."""
        self._change(name, -1)

    def pause(self, paused: bool) -> None:
        """Requests are held back from now on, or not any more."""
        now = self._clock()
        for account in self._accounts.values():
            account.until(now, paused=self._paused)
        self._paused = paused

    def take(self) -> dict[str, EngineTime]:
        """The time of each engine since this was called last; nothing when no time has passed."""
        now = self._clock()
        shift, times = self._wall() - now, {}
        for name, account in self._accounts.items():
            account.until(now, paused=self._paused)
            if account.intervals:
                intervals = tuple((state, a + shift, b + shift) for state, a, b in merged(account.intervals))
                times[name] = EngineTime(account.seconds, account.request_s, intervals)
            self._accounts[name] = _Account(now, account.requests)
        return times

    def _change(self, name: str, requests: int) -> None:
        account = self._accounts[name]
        account.until(self._clock(), paused=self._paused)
        account.requests += requests


def merged(
    intervals: Sequence[Interval], *, shortest_s: float = SHORTEST_S, most: int = MOST_INTERVALS
) -> list[Interval]:
    """Fewer intervals over the same time: short ones join their neighbour, which gets the state of most of its time.

    Args:
        intervals: each begins where the one before ends.
        shortest_s: below which an interval is short; raised as far as ``most`` needs it.
        most: intervals of the result.
    """
    while True:
        blocks: list[tuple[float, float, dict[State, float]]] = []
        for state, begin, end in intervals:
            if blocks:
                first, last, parts = blocks[-1]
                if _most_of(parts) == state or last - first < shortest_s or end - begin < shortest_s:
                    blocks[-1] = (first, end, {**parts, state: parts.get(state, 0.0) + end - begin})
                    continue
            blocks.append((begin, end, {state: end - begin}))
        joined: list[Interval] = []
        for begin, end, parts in blocks:
            state = _most_of(parts)
            if joined and joined[-1][0] == state:
                begin = joined.pop()[1]
            joined.append((state, begin, end))
        if len(joined) <= most:
            return joined
        shortest_s *= 2


def _most_of(parts: dict[State, float]) -> State:
    return max(parts, key=parts.__getitem__)
