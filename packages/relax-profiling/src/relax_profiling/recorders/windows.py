"""Windows of profiled steps, in which of two counts. Needs no torch.

A rollout id is absolute and goes on across resume; a launch offset is 0 for the first training step of this launch,
whatever was resumed. They are distinct types, so that a window in one count cannot be asked about the other.
"""

import dataclasses
from collections.abc import Iterable
from typing import Generic, TypeVar


class RolloutId(int):
    """Absolute number of a rollout, from 0, the same before and after a resume."""


class LaunchOffset(int):
    """Training steps done by this launch before this one: 0 for its first step."""


CounterT = TypeVar("CounterT", RolloutId, LaunchOffset)


@dataclasses.dataclass(frozen=True)
class StepWindow(Generic[CounterT]):
    """A set of steps in one count.

    Attributes:
        counter: :class:`RolloutId` or :class:`LaunchOffset`.
        first: first step, inclusive.
        last: last step, inclusive; None is "to the end of the run".
        steps: an explicit list; it wins over ``first`` and ``last``.

    Raises:
        ValueError: for a negative bound, ``last < first`` or an empty list.
    """

    counter: type[CounterT]
    first: int = 0
    last: int | None = None
    steps: frozenset[int] | None = None

    def __post_init__(self) -> None:
        wrong = window_problem(self.first, self.last, self.steps)
        if wrong:
            raise ValueError(wrong)

    def __contains__(self, step: CounterT) -> bool:
        if not isinstance(step, self.counter):
            raise TypeError(f"this window counts in {self.counter.__name__}, not in {type(step).__name__}")
        if self.steps is not None:
            return int(step) in self.steps
        return self.first <= step and (self.last is None or step <= self.last)

    def is_over(self, step: CounterT) -> bool:
        """Whether no step from ``step`` on (inclusive) can be in the window."""
        if not isinstance(step, self.counter):
            raise TypeError(f"this window counts in {self.counter.__name__}, not in {type(step).__name__}")
        last = max(self.steps) if self.steps is not None else self.last
        return last is not None and step > last


def window_problem(first: int | None, last: int | None, steps: Iterable[int] | None = None) -> str | None:
    """The fault in the bounds of a window, or None. All bounds are inclusive."""
    if steps is not None:
        steps = list(steps)
        if not steps:
            return "the list of steps is empty; name at least one step"
        if min(steps) < 0:
            return f"step {min(steps)} is negative; steps count from 0"
    for bound in (first, last):
        if bound is not None and bound < 0:
            return f"step {bound} is negative; steps count from 0"
    if first is not None and last is not None and last < first:
        return f"the window ends at {last} before it starts at {first}; both ends are inclusive"
    return None
