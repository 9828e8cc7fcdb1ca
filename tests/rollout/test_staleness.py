"""The functions of the gate of staleness, one at a time; whole runs are in ``test_staleness_schedules.py``."""

import random
from collections.abc import Iterable

import pytest
from relax_rollout.staleness import OpenGroup, StalenessBound, ages, blocked_by, choose, may_start, surplus


def bound_of(batch: int, max_staleness: int | None, depth: int = 10**6) -> StalenessBound:
    return StalenessBound(batch=batch, depth=depth, max_staleness=max_staleness)


def groups(*starts_and_ids: tuple[int, int]) -> list[OpenGroup]:
    return [OpenGroup(start, i) for start, i in starts_and_ids]


@pytest.mark.parametrize(
    ("batch", "max_staleness", "depth", "version", "step", "most"),
    [
        (4, 0, 99, 3, 3, 4),  # on-policy: one batch
        (4, 0, 99, 2, 3, 0),  # while the step before trains, nothing
        (4, 1, 99, 3, 3, 8),
        (4, 1, 99, 2, 3, 4),
        (4, 1, 6, 3, 3, 6),  # the depth is less
        (4, 1, 6, 2, 3, 4),
        (4, 1, 99, 0, 5, 0),  # far behind, and not negative
        (4, None, 6, 0, 5, 6),  # no bound but the depth
    ],
)
def test_how_many_groups_may_be_open(
    batch: int, max_staleness: int | None, depth: int, version: int, step: int, most: int
) -> None:
    bound = bound_of(batch, max_staleness, depth)
    assert bound.most_open(version=version, step=step) == most
    allowed = [n for n in range(12) if may_start(n, bound, version=version, step=step)]
    assert allowed == list(range(min(12, most)))


def test_the_earliest_deadlines_are_taken_and_among_equals_the_earliest_prompts() -> None:
    finished = groups((2, 5), (1, 9), (1, 7), (2, 4))
    assert choose(finished, bound_of(3, 2)) == groups((1, 7), (1, 9), (2, 4))
    assert choose(finished, bound_of(9, 2)) == groups((1, 7), (1, 9), (2, 4), (2, 5))
    assert choose([], bound_of(3, 2)) == []


def test_without_a_bound_the_order_of_the_prompts_decides() -> None:
    assert choose(groups((2, 4), (1, 9), (0, 7)), bound_of(2, None)) == groups((2, 4), (0, 7))


def test_an_overdue_group_comes_first_among_equal_deadlines_only() -> None:
    finished = groups((1, 7), (2, 4), (2, 8), (2, 9))
    assert choose(finished, bound_of(2, 2), overdue={9}) == groups((1, 7), (2, 9))
    assert choose(finished, bound_of(1, None), overdue={9}) == groups((2, 9))
    # In front of an earlier deadline it would leave two groups for step 2, which takes one: the step could never close.
    late = groups((0, 0), (0, 1), (1, 2))
    bound = bound_of(1, 2)
    assert blocked_by(late, groups((1, 2)), bound, step=1) == groups((0, 0), (0, 1))
    assert blocked_by(late, choose(late, bound, overdue={2}), bound, step=1) == []


def test_a_step_waits_for_a_group_whose_deadline_it_is() -> None:
    bound = bound_of(2, 1)
    running, finished = OpenGroup(0, 0), groups((0, 1), (1, 2))
    assert blocked_by([running, *finished], finished, bound, step=1) == [running]
    assert blocked_by([running, *finished], finished, bound, step=0) == []
    assert blocked_by(finished, finished, bound, step=1) == []
    assert blocked_by([], [], bound, step=1) == []


def test_a_step_waits_when_the_next_ones_could_not_take_all_that_is_left() -> None:
    """Three groups have their deadline at step 2, which takes two."""
    bound = bound_of(2, 2)
    running, finished = groups((0, 0), (0, 1), (0, 2)), groups((1, 3), (1, 4))
    assert blocked_by([*running, *finished], finished, bound, step=1) == running
    assert blocked_by([*running[:2], *finished], finished, bound, step=1) == []


@pytest.mark.parametrize("step", [0, 7, 10**6])
def test_without_a_bound_nothing_is_waited_for_and_nothing_is_surplus(step: int) -> None:
    opened = groups((0, 0), (0, 1), (3, 2))
    assert blocked_by(opened, opened[2:], bound_of(1, None), step=step) == []
    assert surplus(opened, bound_of(1, None), step=step) == []


def test_on_policy_a_step_waits_for_all_that_is_open() -> None:
    opened = groups((4, 0), (4, 1), (4, 2))
    assert blocked_by(opened, opened[:1], bound_of(3, 0), step=4) == opened[1:]
    assert blocked_by(opened, opened, bound_of(3, 0), step=4) == []


def test_the_last_step_of_an_epoch_may_take_fewer() -> None:
    opened = groups((3, 0), (4, 1))
    chosen = choose(opened, bound_of(5, 1))
    assert chosen == opened
    assert blocked_by(opened, chosen, bound_of(5, 1), step=4) == []


def test_a_wait_that_cannot_help_is_none() -> None:
    """More groups than a step takes have their deadline now: they were started without asking."""
    opened, bound = groups((0, 0), (0, 1), (0, 2)), bound_of(1, 0)
    assert blocked_by(opened, opened[:1], bound, step=0) == []
    assert blocked_by(opened, [], bound, step=0) == opened


def test_the_later_prompts_of_a_surplus_start_again() -> None:
    opened = groups((1, 6), (0, 5), (1, 1), (1, 8), (0, 2))
    # Step 1 takes 2 of the deadline 1; with the 2 of deadline 2 it is 4 groups for steps 1 and 2.
    assert surplus(opened, bound_of(2, 1), step=1) == groups((1, 8))
    assert surplus(opened, bound_of(1, 1), step=1) == groups((0, 5), (1, 6), (1, 8))
    assert surplus(opened, bound_of(2, 1), step=1, overdue={8}) == groups((1, 6))
    assert surplus(opened, bound_of(9, 1), step=1) == []
    assert surplus([], bound_of(1, 0), step=0) == []


def test_what_is_past_its_deadline_starts_again() -> None:
    assert surplus(groups((0, 0), (1, 1), (2, 2)), bound_of(4, 1), step=3) == groups((0, 0), (1, 1))


def test_a_step_closes_and_groups_are_kept_exactly_as_the_rules_say() -> None:
    """Against the rules word for word, at random: neither an early close nor a wait too many, and the least surplus."""
    draw = random.Random(0)
    waits = 0
    for _ in range(3000):
        bound, step = bound_of(draw.randint(1, 3), draw.randint(0, 3)), draw.randint(0, 4)
        staleness = bound.max_staleness
        assert staleness is not None
        started = [OpenGroup(draw.randint(max(0, step - staleness), step), i) for i in range(draw.randint(0, 12))]
        ends = range(step, step + staleness + 1)

        def within(some: Iterable[OpenGroup], last: int, bound: StalenessBound = bound) -> int:
            return sum(bound.deadline(g.start) <= last for g in some)

        again = surplus(started, bound, step=step)
        opened = [g for g in started if g not in again]
        assert all(within(opened, d) <= bound.batch * (d - step + 1) for d in ends)
        for group in again:  # none of them has room beside those that stay
            assert any(within([*opened, group], d) > bound.batch * (d - step + 1) for d in ends)

        chosen = choose([g for g in opened if draw.random() < 0.6], bound)
        fits = all(within(opened, d) - within(chosen, d) <= bound.batch * (d - step) for d in ends)
        assert (blocked_by(opened, chosen, bound, step=step) == []) == fits
        waits += not fits
    assert 500 < waits < 2500


def test_ages_are_counted_by_sample() -> None:
    assert ages([3, 5, None, 3, 4], 5) == {2: 2, 0: 1, 1: 1}
    assert ages([], 5) == {}
    assert ages([None], 5) == {}
