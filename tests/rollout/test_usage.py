"""The time of engines as seconds, which are exact, and as intervals, which are few."""

import random

import pytest
from relax_rollout.engines.usage import MOST_INTERVALS, EngineUsage, Interval, merged


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_intervals_are_told_by_the_wall_clock() -> None:
    clock = Clock()
    usage = EngineUsage(["a"], clock, lambda: clock.now + 1000)
    clock.now = 51.0
    usage.began("a")
    usage.began("a")
    clock.now = 53.0
    usage.pause(True)
    clock.now = 53.5
    usage.ended("a")
    clock.now = 54.0
    usage.pause(False)
    clock.now = 55.0
    spent = usage.take()["a"]
    assert spent.intervals == (("idle", 1050, 1051), ("busy", 1051, 1053), ("paused", 1053, 1054), ("busy", 1054, 1055))
    assert spent.seconds == {"busy": 3.0, "idle": 1.0, "paused": 1.0}
    assert spent.request_s == {"busy": 5.0, "idle": 0.0, "paused": 1.5}
    clock.now = 56.0
    assert usage.take()["a"].intervals == (("busy", 1055, 1056),)


def test_short_intervals_join_their_neighbours() -> None:
    flicker: list[Interval] = [("busy", 0.0, 1.0), ("idle", 1.0, 1.001), ("busy", 1.001, 2.0), ("idle", 2.0, 3.0)]
    assert merged(flicker) == [("busy", 0.0, 2.0), ("idle", 2.0, 3.0)]
    begins_short: list[Interval] = [("idle", 0.0, 0.001), ("busy", 0.001, 2.0)]
    assert merged(begins_short) == [("busy", 0.0, 2.0)]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_many_changes_stays_small_and_exact(seed: int) -> None:
    clock, draw = Clock(), random.Random(seed)
    usage = EngineUsage(["a"], clock, clock)
    spent = {"busy": 0.0, "idle": 0.0}
    for _ in range(20_000):
        for state, change in (("idle", usage.began), ("busy", usage.ended)):
            seconds = draw.expovariate(100)
            spent[state] += seconds
            clock.now += seconds
            change("a")
    taken = usage.take()["a"]
    assert {state: taken.seconds[state] for state in spent} == pytest.approx(spent)  # type: ignore[index]
    assert 1 <= len(taken.intervals) <= MOST_INTERVALS
    assert taken.intervals[0][1] == 50.0
    assert taken.intervals[-1][2] == pytest.approx(clock.now)
    assert all(a[2] == b[1] for a, b in zip(taken.intervals, taken.intervals[1:], strict=False)), "without a gap"
