"""The gate of staleness: how many groups may be open, which of them a step takes, and when it may be closed.

Pure functions without torch or asyncio. Nothing is counted here: the caller derives what is open from its ledger, each
time.

A group is **open** from the moment it is started until its step is closed or it is dropped; running, interrupted and
finished ones all count. ``start`` is the version of the weights that served when it was started: no token of it is
older. When samples of it start again from the prompt, ``start`` may become that of the oldest token which is left; a
group without any token that waits to be started again is not open, and asks :func:`may_start` like a new one.

Step ``t`` trains with the weights of version ``t``, so a token is at most ``t - start`` versions old there. The bound
``max_staleness`` gives each group a deadline: ``start + max_staleness`` is the last step that may take it. With ``B``
groups a step and the installed version ``v``, three rules keep it:

    may start    open + 1 <= min(depth, B * (v + max_staleness + 1 - t))
    choose       the B finished groups with the earliest deadlines
    may close t  for every d >= t:  (open with deadline <= d) - (chosen with deadline <= d) <= B * (d - t)

Proof. Let ``N(d)`` be the number of open groups with deadline <= d. Before step ``t``: ``N(d) <= B * (d - t + 1)`` for
all d >= t, and ``N(t - 1) = 0``. A start changes ``N(d)`` only for d >= v + max_staleness, where ``N(d)`` is all that
is open, and the first rule limits it. A close leaves ``N(d) <= B * (d - t)``, which is the claim for step ``t + 1``; at
d = t it leaves none. A drop lowers ``N``, and a later ``start`` moves a deadline to a later step, never past that of a
group which is started now. So no group outlives its deadline. Taking the earliest deadlines makes (chosen with
deadline <= d) as large as it can be for every d at once: if any choice may be closed, this one may.

A step that may not be closed waits only for groups that are not finished. Where the third rule fails, at ``d``, fewer
than ``B`` of the chosen have a deadline <= d, because ``N(d) <= B * (d - t + 1)``; a finished group with such a
deadline would be among them. So all that is left with a deadline <= d still runs, and each that finishes helps.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable

from relax_data.types import WeightVersion


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessBound:
    """Limits of a run.

    Attributes:
        batch: groups that a training step takes (``B``).
        depth: most groups open at once, whatever the staleness allows.
        max_staleness: most versions between the oldest token of a sample and the weights that train on it; None: no
            limit, all deadlines are infinite.
    """

    batch: int
    depth: int
    max_staleness: int | None

    def most_open(self, *, version: WeightVersion, step: int) -> int:
        """Most groups that may be open at once.

        Args:
            version: that all engines in use serve.
            step: next training step to be closed; ``version - step`` is 0, or -1 while the step before still trains.
        """
        if self.max_staleness is None:
            return self.depth
        return min(self.depth, self.batch * max(0, version + self.max_staleness + 1 - step))

    def deadline(self, start: WeightVersion) -> float:
        """The last step that may take a group which was started with this version."""
        return math.inf if self.max_staleness is None else start + self.max_staleness


@dataclasses.dataclass(frozen=True, order=True)
class OpenGroup:
    """An open group, as far as the gate knows it.

    Attributes:
        start: version that served when it was started.
        prompt_id: of its prompt; breaks ties, the earlier prompt first.
    """

    start: WeightVersion
    prompt_id: int


def may_start(opened: int, bound: StalenessBound, *, version: WeightVersion, step: int) -> bool:
    """Whether one more group may be started beside those that are open; arguments of :meth:`StalenessBound.most_open`.

    Args:
        opened: number of open groups.
    """
    return opened + 1 <= bound.most_open(version=version, step=step)


def choose(finished: Iterable[OpenGroup], bound: StalenessBound, *, overdue: Collection[int] = ()) -> list[OpenGroup]:
    """The groups that the next step takes: up to ``batch`` finished ones with the earliest deadlines.

    Args:
        finished: open groups that are whole and scored.
        overdue: prompt ids of groups that were thrown away and generated again so often that they must not be once
            more. They come first among groups with the same deadline, and only there: before an earlier deadline they
            could keep a finished group waiting until it is too old.
    """
    return sorted(finished, key=lambda g: _urgency(g, bound, overdue))[: bound.batch]


def blocked_by(
    opened: Iterable[OpenGroup], chosen: Collection[OpenGroup], bound: StalenessBound, *, step: int
) -> list[OpenGroup]:
    """The groups of which step ``step`` has to wait for one more to finish; empty when the step may be closed.

    Without this wait a group that takes long would be consumed after its deadline, or not at all. No finished group is
    among them, and none is waited for that cannot help: a step that takes ``batch`` groups with the earliest deadlines
    is closed, also when more are left than the next ones can take, which :func:`surplus` names then.

    Args:
        opened: all open groups, the chosen ones among them.
        chosen: what :func:`choose` gave of all that are finished.
        step: the step to be closed.
    """
    taken = set(chosen)
    left = sorted(g for g in opened if g not in taken)
    for index, group in enumerate(left):
        # As many as `index + 1` of those left have this deadline or an earlier one.
        deadline = bound.deadline(group.start)
        if index + 1 > bound.batch * (deadline - step):
            if sum(bound.deadline(g.start) <= deadline for g in chosen) == bound.batch:
                return []
            return [g for g in left if bound.deadline(g.start) <= deadline]
    return []


def surplus(
    opened: Iterable[OpenGroup], bound: StalenessBound, *, step: int, overdue: Collection[int] = ()
) -> list[OpenGroup]:
    """Open groups that cannot all be taken in time and have to start again, so that the rules hold for the others.

    There are none unless ``batch`` or ``max_staleness`` became smaller at a resume, steps were skipped, or groups were
    started without asking :func:`may_start`. Of groups with the same deadline the later prompts start again.

    Args:
        opened: all open groups.
        step: the next step to be closed.
        overdue: prompt ids that are kept before others with the same deadline, as in :func:`choose`.
    """
    kept, again = 0, []
    for group in sorted(opened, key=lambda g: _urgency(g, bound, overdue)):
        if kept + 1 <= bound.batch * (bound.deadline(group.start) - step + 1):
            kept += 1
        else:
            again.append(group)
    return again


def _urgency(group: OpenGroup, bound: StalenessBound, overdue: Collection[int]) -> tuple[float, bool, int]:
    return bound.deadline(group.start), group.prompt_id not in overdue, group.prompt_id


def ages(versions: Iterable[WeightVersion | None], step: int) -> Counter[int]:
    """Number of samples by staleness at step ``step``.

    Args:
        versions: the oldest version among the tokens of each sample; None of one without tokens, which is left out.
    """
    return Counter(step - version for version in versions if version is not None)
