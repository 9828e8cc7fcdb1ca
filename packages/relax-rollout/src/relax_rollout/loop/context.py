"""One rollout: from prompts to whole, scored, accepted groups."""

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from relax_data.prompts.ledger import PromptLedger, PromptState
from relax_data.types import SampleGroup, WeightVersion

from relax_rollout.filters import GroupFilter, judge
from relax_rollout.loop.feed import PromptFeed
from relax_rollout.loop.runner import GroupRunner, InflightGroups
from relax_rollout.settings import RolloutSettings
from relax_rollout.staleness import OpenGroup, StalenessBound, blocked_by, choose

logger = logging.getLogger(__name__)

MAX_INTERRUPTIONS = 4
"""Times that over-sampling may throw a sample's tokens away before a rollout waits for its group."""

PROMPT_TOO_LONG = "prompt_too_long"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DroppedPrompt:
    """A prompt that will not be trained on."""

    prompt_id: int
    source: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutProgress:
    """Progress of a rollout; ``waiting_for`` says what is still running."""

    rollout_id: int
    groups_done: int
    groups_wanted: int
    groups_running: int
    prompts_dropped: int
    tokens: int
    elapsed_s: float
    waiting_for: str


ProgressCallback = Callable[[RolloutProgress], None]


class RolloutContext:
    """Parts that a rollout works with; the argument of a function of ``--rollout-function-path``.

    Such a function takes prompts with :meth:`take`, runs them (:meth:`running`, or :meth:`run_group` for one), asks
    :meth:`keep` about each whole group, and returns the list of groups to train on. Whatever it took and does not
    return waits for the next rollout: groups that were kept are in :meth:`chosen`, the others come with :meth:`take`.
    """

    def __init__(  # noqa: PLR0913  # the parts of a rollout, by name
        self,
        *,
        rollout_id: int,
        version: WeightVersion,
        settings: RolloutSettings,
        ledger: PromptLedger,
        feed: PromptFeed,
        runner: GroupRunner,
        bound: StalenessBound,
        group_filter: GroupFilter | None,
        dropped: list[DroppedPrompt],
        max_rejected: int,
        make_running: Callable[[Callable[[InflightGroups], None]], InflightGroups],
        progress: Callable[["RolloutContext", int, InflightGroups], None],
        continuous: bool = False,
    ) -> None:
        self.rollout_id = rollout_id
        self.version = version
        """Policy version that the engines serve."""
        self.step = version
        """The training step that is closed next, as a version: its weights have this one. Behind ``version``, or one
        more while a step trains and its weights have not reached the engines."""
        self.end: int | None = None
        """The first step that will not be trained, when it is known: no group is started for it."""
        self.settings = settings
        self.ledger = ledger
        self.runner = runner
        self.bound = bound
        self.dropped = dropped
        self.groups_done = 0
        self.waits_for = ""
        """Why the rollout goes on although the batch is full; empty when it does not."""
        self.full_since: float | None = None
        """When it began to wait so, in seconds of ``time.monotonic()``."""
        self._continuous = continuous  # no group is ever interrupted for a full batch
        self._feed = feed
        self._filter = group_filter
        self._max_rejected = max_rejected
        self._make_running = make_running
        self._progress = progress
        self._rejected: Counter[str] = Counter()
        self._last_rejected = ""

    def running(self) -> InflightGroups:
        """A set of groups that run at the same time, which reports progress while it is waited for."""
        return self._make_running(lambda running: self._progress(self, self.groups_done, running))

    async def run_group(self, group: SampleGroup) -> bool:
        """Generates and scores one group; False when it was interrupted."""
        return await self.runner.run_group(group)

    def take(self, n: int) -> list[SampleGroup]:
        """``n`` groups to generate; fewer only at the end of the last epoch.

        A prompt that leaves no room for a response (``--rollout-max-context-len``) is dropped and counted.

        Raises:
            ValueError: too many prompts in a row were dropped.
        """
        groups: list[SampleGroup] = []
        while len(groups) < n:
            self._check_rejected()
            taken = self._feed.take(n - len(groups))
            if not taken:
                break
            for group in taken:
                if self.runner.context.room(group.prompt) < 1:
                    self._drop_too_long(group)
                    continue
                if group.start_version is None:
                    group.start_version = self.version
                groups.append(group)
        return groups

    def keep(self, group: SampleGroup) -> bool:
        """Asks the filter about a whole group. False: it is dropped and counted with the filter's reason.

        Raises:
            ValueError: the filter raised, or returned no bool.
        """
        kept, reason = judge(group, self._filter)
        if kept:
            self._rejected.clear()
            if self.ledger.state_of(group.prompt.prompt_id) is not PromptState.BUFFERED:
                self.ledger.buffer([group.prompt.prompt_id])
        else:
            self.drop(group, reason)
        return kept

    def drop(self, group: SampleGroup, reason: str) -> None:
        """Books the prompt of a group that this rollout has as dropped."""
        self.ledger.drop([group.prompt.prompt_id], reason)
        self.dropped.append(DroppedPrompt(prompt_id=group.prompt.prompt_id, source=group.prompt.source, reason=reason))
        self._rejected[reason] += 1
        self._last_rejected = group.prompt.source

    @property
    def source_exhausted(self) -> bool:
        """The source gave fewer prompts than it was asked for: it has no more."""
        return self._feed.source_exhausted

    def has(self, group: SampleGroup) -> bool:
        """True when this rollout may return this very group: it took it, or it is one that was kept, also earlier."""
        prompt_id = group.prompt.prompt_id
        if self.ledger.group(prompt_id) is not group:
            return False
        return self.ledger.state_of(prompt_id) in (PromptState.OUT, PromptState.BUFFERED)

    def _check_rejected(self) -> None:
        if self._rejected.total() >= self._max_rejected:
            reasons = ", ".join(f"{r}: {n}" for r, n in self._rejected.most_common(5))
            raise ValueError(
                f"rollout {self.rollout_id}: {self._rejected.total()} prompts in a row were dropped ({reasons}), last "
                f"{self._last_rejected}; check --dynamic-sampling-filter-path, the reward, and whether the model "
                "sometimes solves such prompts"
            )

    def _drop_too_long(self, group: SampleGroup) -> None:
        prompt, limit = group.prompt, self.settings.rollout_max_context_len
        assert limit is not None, "without a limit every prompt has room"
        logger.warning(
            "%s: dropped, its prompt of %d tokens leaves no room for a response in the %d tokens of a sample "
            "(--rollout-max-context-len, or what the model and --max-tokens-per-gpu allow); filter such rows with "
            "--rollout-max-prompt-len %d",
            prompt.source,
            len(prompt.input_ids),
            limit,
            limit - 1,
        )
        self.drop(group, PROMPT_TOO_LONG)

    # ------------------------------------------------------------------ the gate

    def startable(self, *, full: bool) -> int:
        """How many groups to take now: those that have tokens, and as many others as may be open beside them.

        Args:
            full: the batch is; nothing new is started then.
        """
        interrupted = sum(g.start_version is not None for g in self.ledger.waiting)
        most = self.settings.submitted_prompts
        if self.settings.partial_rollout or self._continuous:  # else what is not whole starts again, and has no age
            most = self.bound.most_open(version=self.version, step=self.step)
        if self.end is not None:
            most = min(most, self.settings.rollout_batch_size * max(0, self.end - self.step))
        return interrupted + (0 if full else max(0, most - len(self._opened())))

    def chosen(self) -> list[SampleGroup]:
        """The groups that the training step takes if the rollout ends now, the most urgent first."""
        ready = {g.prompt.prompt_id: g for g in self.ledger.ready}
        taken = choose(map(_opened, ready.values()), self.bound, overdue=self.overdue(ready.values()))
        return [ready[g.prompt_id] for g in taken]

    def overdue(self, groups: Iterable[SampleGroup]) -> set[int]:
        """Prompt ids of those groups whose samples were thrown away so often that they must not be once more."""
        if self.settings.partial_rollout:
            return set()
        return {g.prompt.prompt_id for g in groups if any(s.aborted_count >= MAX_INTERRUPTIONS for s in g.samples)}

    def awaited(self, running: InflightGroups, chosen: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Groups that a full batch waits for, because they would become too old or were interrupted too often.

        Args:
            running: the groups that run.
            chosen: what :meth:`chosen` gave.
        """
        opened, taken = self._opened(), [_opened(g) for g in chosen]
        if not (self.settings.partial_rollout or self._continuous):
            opened = [g for g in opened if g.start < self.version]
        late = {g.prompt_id for g in blocked_by(opened, taken, self.bound, step=self.step)}
        groups = self.ledger.groups(PromptState.OUT, PromptState.PARTIAL)
        found = [g for g in groups if g.prompt.prompt_id in late]
        if not self._continuous:
            found += [g for g in self.protected(running) if g not in found]
        self._note_wait(found)
        return found

    def protected(self, running: InflightGroups) -> list[SampleGroup]:
        """Running groups with a sample that was interrupted so often that it is not interrupted again."""
        limit: float = MAX_INTERRUPTIONS
        if self.settings.partial_rollout:
            limit = self.settings.partial_rollout_max_aborted_count or math.inf
        return [g for g in running.groups if _is_overdue(g, limit)]

    def _opened(self) -> list[OpenGroup]:
        """The groups that count for the gate: started, and neither given to a training step nor dropped."""
        groups = self.ledger.groups(PromptState.OUT, PromptState.PARTIAL, PromptState.BUFFERED)
        return [_opened(g) for g in groups if g.start_version is not None]

    def _note_wait(self, groups: Sequence[SampleGroup]) -> None:
        self.waits_for = ""
        if not groups:
            return
        if self.full_since is None:
            self.full_since = time.monotonic()
        first = min(groups, key=lambda g: g.prompt.prompt_id)
        age = self.step - (self.step if first.start_version is None else first.start_version)
        self.waits_for = (
            f"the batch is full, but {len(groups)} group(s) cannot wait any longer: {first.prompt.source}, {age} "
            f"version(s) old, interrupted up to {max(s.aborted_count for s in first.samples)} times"
        )


def _opened(group: SampleGroup) -> OpenGroup:
    assert group.start_version is not None, "a group that has tokens was started"
    return OpenGroup(group.start_version, group.prompt.prompt_id)


def _is_overdue(group: SampleGroup, limit: float) -> bool:
    return any(s.aborted_count >= limit and not s.status.finished for s in group.samples)


RolloutFunction = Callable[[RolloutContext], Awaitable[list[SampleGroup]]]


async def collect_groups(rollout: RolloutContext) -> list[SampleGroup]:
    """Collects the groups of a rollout; the default rollout function: over-sampling, first finished first.

    Keeps ``--over-sampling-batch-size`` groups open: those that earlier rollouts left over, whole or interrupted, and
    new prompts; a rejected group is replaced. When ``--rollout-batch-size`` groups are accepted, the others are
    interrupted: whole ones are ready for the next rollout, unfinished samples go on there from the tokens that they
    have (``--partial-rollout``) or start again. The rollout waits for groups that could not be trained in time
    otherwise (:mod:`relax_rollout.staleness`), and for those that were interrupted too often
    (``--partial-rollout-max-aborted-count``; :data:`MAX_INTERRUPTIONS` times when they start again: a long response
    would else be thrown away for ever).
    """
    wanted = rollout.settings.rollout_batch_size
    running = rollout.running()
    try:
        while True:
            chosen = rollout.chosen()
            rollout.groups_done = len(chosen)
            full = len(chosen) == wanted
            if full and not rollout.awaited(running, chosen):
                break
            for group in rollout.take(rollout.startable(full=full)):
                running.submit(group)
            if not len(running):
                break  # the last epoch is over
            for group in await running.next_finished():
                rollout.keep(group)
        for group, whole in await running.interrupt():
            if whole:
                rollout.keep(group)
    except BaseException:
        await running.cancel()
        raise
    return rollout.chosen()
