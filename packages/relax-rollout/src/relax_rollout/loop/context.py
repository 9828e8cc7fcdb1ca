"""One rollout: from prompts to whole, scored, accepted groups."""

import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from relax_data.prompts.ledger import PromptLedger, PromptState
from relax_data.types import SampleGroup, WeightVersion

from relax_rollout.filters import GroupFilter, judge
from relax_rollout.loop.feed import PromptFeed
from relax_rollout.loop.runner import GroupRunner, InflightGroups
from relax_rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

MAX_INTERRUPTIONS = 4
"""Times that over-sampling may interrupt a sample before a rollout waits for its group."""

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
    return waits for the next rollout.
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
        group_filter: GroupFilter | None,
        dropped: list[DroppedPrompt],
        max_rejected: int,
        make_running: Callable[[Callable[[InflightGroups], None]], InflightGroups],
        progress: Callable[["RolloutContext", int, InflightGroups], None],
    ) -> None:
        self.rollout_id = rollout_id
        self.version = version
        self.settings = settings
        self.ledger = ledger
        self.runner = runner
        self.dropped = dropped
        self.groups_done = 0
        self._feed = feed
        self._filter = group_filter
        self._max_rejected = max_rejected
        self._make_running = make_running
        self._progress = progress
        self._rejected: Counter[str] = Counter()
        self._in_hand: set[int] = set()  # of the buffered prompts, those that this rollout took or kept

    def running(self) -> InflightGroups:
        """A set of groups that run at the same time, which reports progress while it is waited for."""
        return self._make_running(lambda running: self._progress(self, self.groups_done, running))

    async def run_group(self, group: SampleGroup) -> bool:
        """Generates and scores one group; False when it was interrupted."""
        return await self.runner.run_group(group)

    def take_ready(self, n: int) -> list[SampleGroup]:
        """Up to ``n`` whole, accepted groups that an earlier rollout left over."""
        taken = [g for g in self.ledger.ready if g.prompt.prompt_id not in self._in_hand][:n]
        self._in_hand.update(g.prompt.prompt_id for g in taken)
        return taken

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
                else:
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
            if group.prompt.prompt_id not in self._in_hand:
                self.ledger.buffer([group.prompt.prompt_id])
                self._in_hand.add(group.prompt.prompt_id)
        else:
            self.drop(group, reason)
        return kept

    def drop(self, group: SampleGroup, reason: str) -> None:
        """Books the prompt of a group that this rollout has as dropped."""
        self.ledger.drop([group.prompt.prompt_id], reason)
        self.dropped.append(DroppedPrompt(prompt_id=group.prompt.prompt_id, source=group.prompt.source, reason=reason))
        self._rejected[reason] += 1

    def has(self, group: SampleGroup) -> bool:
        """True when this rollout took this very group and did not drop it."""
        prompt_id = group.prompt.prompt_id
        if self.ledger.group(prompt_id) is not group:
            return False
        return self.ledger.state_of(prompt_id) is PromptState.OUT or prompt_id in self._in_hand

    def _check_rejected(self) -> None:
        if self._rejected.total() >= self._max_rejected:
            reasons = ", ".join(f"{r}: {n}" for r, n in self._rejected.most_common(5))
            raise ValueError(
                f"rollout {self.rollout_id}: {self._rejected.total()} prompts in a row were dropped ({reasons}), last "
                f"{self.dropped[-1].source}; check --dynamic-sampling-filter-path, the reward, and whether the model "
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


def _was_overdue(group: SampleGroup) -> bool:
    return any(s.aborted_count >= MAX_INTERRUPTIONS for s in group.samples)


def _is_overdue(group: SampleGroup) -> bool:
    return any(s.aborted_count >= MAX_INTERRUPTIONS and not s.status.finished for s in group.samples)


RolloutFunction = Callable[[RolloutContext], Awaitable[list[SampleGroup]]]


async def collect_groups(rollout: RolloutContext) -> list[SampleGroup]:
    """Collects the groups of a rollout; the default rollout function: over-sampling, first finished first.

    Submits ``--over-sampling-batch-size`` prompts for each ``--rollout-batch-size`` groups that are missing, and
    replaces rejected groups in the same proportion. When enough groups are accepted, the others are interrupted: whole
    ones are ready for the next rollout, unfinished samples start again there, before any new prompt. A group of which
    a sample was interrupted :data:`MAX_INTERRUPTIONS` times is waited for, and is among those returned: a long response
    would else be thrown away for ever.
    """
    settings = rollout.settings
    wanted = settings.rollout_batch_size
    done = rollout.take_ready(wanted)
    rollout.groups_done = len(done)
    running = rollout.running()
    try:
        while len(done) < wanted or any(map(_is_overdue, running.groups)):
            missing = wanted - len(done) - len(running)
            if missing > 0:
                # Rounded up; equal to `missing` without over-sampling, so that nothing is generated in vain.
                for group in rollout.take(-(-missing * settings.submitted_prompts // wanted)):
                    running.submit(group)
            if not len(running):
                break  # the last epoch is over
            finished = [g for g in await running.next_finished() if rollout.keep(g)]
            done = [g for g in finished if _was_overdue(g)] + done + [g for g in finished if not _was_overdue(g)]
            rollout.groups_done = min(len(done), wanted)
        for group, whole in await running.interrupt():
            if whole:
                rollout.keep(group)
    except BaseException:
        await running.cancel()
        raise
    return done[:wanted]
