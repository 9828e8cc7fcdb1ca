"""The rollout loop: asks the engines for the groups of one training step after the other, and loses no prompt."""

import dataclasses
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from relax_data.hooks import load_function
from relax_data.prompts.ledger import PromptLedger, PromptState
from relax_data.prompts.saved_groups import SAMPLES_FILE
from relax_data.prompts.source import PromptSource
from relax_data.serialization import STATE_FORMAT, check_format
from relax_data.types import Sample, SampleGroup, WeightVersion

from relax_rollout.concurrency import UserFunctionError, guarded
from relax_rollout.engines.base import Engine
from relax_rollout.engines.pool import EnginePool
from relax_rollout.engines.router import EngineRouter
from relax_rollout.engines.usage import EngineTime
from relax_rollout.filters import GroupFilter, load_filter
from relax_rollout.generation import seam
from relax_rollout.generation.generate import GenerationContext, load_generate_function, sampling_params
from relax_rollout.loop.context import (
    DroppedPrompt,
    ProgressCallback,
    RolloutContext,
    RolloutFunction,
    RolloutProgress,
    collect_groups,
)
from relax_rollout.loop.feed import PromptFeed
from relax_rollout.loop.metrics import rollout_metrics, sample_histograms
from relax_rollout.loop.runner import STALL_TIMEOUT_S, GroupRunner, InflightGroups
from relax_rollout.rewards.base import RewardFunction
from relax_rollout.settings import RolloutSettings
from relax_rollout.staleness import OpenGroup, StalenessBound, surplus
from relax_rollout.timer import PhaseTimer

MAX_REJECTED_BATCHES = 16
"""A rollout fails when this many times ``--rollout-batch-size`` prompts in a row are dropped (by the filter, or too
long): training would wait for ever."""

GENERATED_ONLY = "generated only"
"""Reason under which the prompts of a run that trains nothing are dropped."""


@dataclasses.dataclass(kw_only=True)
class RolloutResult:
    """Result of one rollout.

    Attributes:
        groups: whole, scored and accepted, in the order of the prompts; ``--rollout-batch-size`` of them, or fewer at
            the end of the last epoch.
        metrics: see :mod:`relax_rollout.loop.metrics`.
        dropped: prompts that were dropped since the last rollout was returned.
        histograms: see :func:`relax_rollout.loop.metrics.sample_histograms`.
        usage: what each engine did since the rollout before, by its name; empty where nobody asked.
        row_ids: of the rows of all samples in a plane, in order; empty where nobody put them into one.
        picture_ids: likewise of the rows with their pictures; None for a sample without, empty when all are.
    """

    groups: list[SampleGroup]
    metrics: dict[str, float]
    dropped: list[DroppedPrompt]
    histograms: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    usage: dict[str, EngineTime] = dataclasses.field(default_factory=dict)
    row_ids: list[int] = dataclasses.field(default_factory=list)
    picture_ids: list[int | None] = dataclasses.field(default_factory=list)


class RolloutLoop:
    """Generates rollouts and books what becomes of every prompt.

    Args:
        settings: options of the rollout.
        engines: where requests go, least loaded first: a pool, or engines of which every loss is an error. The
            attribute may be replaced between rollouts.
        source: prompts.
        reward: scores the responses.
        tokenizer: transformers tokenizer; only its ``decode`` is used here.
        filter: decides about each scored group; default: that of ``--dynamic-sampling-filter-path``.
        concurrency: most requests at the same time for each engine.
        max_staleness: most versions between a sample's oldest token and the rollout that returns it
            (:mod:`relax_rollout.staleness`); None: no limit.
        trains: False when the samples train nothing (a debug run): they are booked as dropped.
        max_rejected: error after this many dropped prompts in a row;
            default: ``MAX_REJECTED_BATCHES * rollout_batch_size``.
        progress: called about every ``progress_interval_s`` seconds while engines or rewards are waited for.
        stall_timeout_s: error after this many seconds in which no sample was generated or scored.
        end_token_ids: tokens that end a sequence for the engines; default: the tokenizer's.

    Attributes:
        ledger: where each prompt of the run is, with the groups of the open ones.

    Raises:
        ValueError: the settings are wrong, or a function cannot be imported or used.
    """

    def __init__(  # noqa: PLR0913  # the parts of a rollout, by name
        self,
        settings: RolloutSettings,
        *,
        engines: Sequence[Engine] | EnginePool,
        source: PromptSource,
        reward: RewardFunction,
        tokenizer: Any,
        filter: GroupFilter | None = None,
        concurrency: int = 512,
        max_staleness: int | None = None,
        trains: bool = True,
        max_rejected: int | None = None,
        progress: ProgressCallback | None = None,
        progress_interval_s: float = 5.0,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        end_token_ids: Collection[int] | None = None,
    ) -> None:
        problems = settings.problems()
        if max_staleness is not None and max_staleness < 0:
            problems.append(f"--max-staleness is {max_staleness}; it must be at least 0")
        if problems:
            raise ValueError("\n".join(problems))
        self.settings = settings
        self.engines = engines
        self._reward = reward
        self._tokenizer = tokenizer
        if filter is None and settings.dynamic_sampling_filter_path is not None:
            filter = load_filter(settings.dynamic_sampling_filter_path)
        self._filter = filter
        partial = settings.partial_rollout
        self._generate = load_generate_function(settings.custom_generate_function_path, resumable=partial)
        self._collect: RolloutFunction = collect_groups
        if settings.rollout_function_path is not None:
            self._collect = load_function("--rollout-function-path", settings.rollout_function_path)
        self._concurrency = concurrency
        self._max_staleness = max_staleness
        self._ends = seam.end_token_ids(tokenizer) if end_token_ids is None else frozenset(end_token_ids)
        self._max_rejected = max_rejected or MAX_REJECTED_BATCHES * settings.rollout_batch_size
        self._progress = progress
        self._progress_interval_s = progress_interval_s
        self._stall_timeout_s = stall_timeout_s
        self._trains = trains
        self.ledger = PromptLedger()
        self._source = source
        self._feed = self._feed_of(self.ledger)
        self._dropped: list[DroppedPrompt] = []
        self._restarted = 0
        """Samples whose tokens were thrown away between rollouts; the next result tells of them."""
        self._busy = False

    @property
    def _bound(self) -> StalenessBound:
        settings = self.settings
        return StalenessBound(
            batch=settings.rollout_batch_size, depth=settings.submitted_prompts, max_staleness=self._max_staleness
        )

    def _feed_of(self, ledger: PromptLedger) -> PromptFeed:
        settings = self.settings
        return PromptFeed(
            self._source, ledger, settings.n_samples_per_prompt, keep_interrupted=settings.partial_rollout
        )

    @property
    def exhausted(self) -> bool:
        """True when the source has no more prompts and none is buffered: further rollouts would be empty."""
        return self._feed.source_exhausted and not self.ledger.groups(PromptState.PARTIAL, PromptState.BUFFERED)

    async def generate(self, rollout_id: int, version: WeightVersion) -> RolloutResult:
        """Collects the groups of one rollout, and assigns them to the training step that follows.

        What the rollout before returned is booked first (:meth:`book_returned`). When it raises or is cancelled, all
        its prompts wait for the next rollout and no request is left running, so that it may be called again.

        Args:
            rollout_id: absolute id, for messages and request ids.
            version: policy version that the engines serve.

        Raises:
            EngineDied: no engine is left, or one died that nobody restarts; the message names it.
            RewardError, GenerationError: naming the sample; the cause is chained.
            ValueError: too many prompts in a row were dropped, or a filter failed.
            TimeoutError: an engine does not abort, or nothing moves any more.
        """
        assert not self._busy, "one rollout of a loop at a time"
        self.book_returned()
        timer = PhaseTimer()
        router = EngineRouter(self.engines, self._concurrency, timer)
        rollout = self.open(rollout_id, version, router, timer)
        self._busy = True
        try:
            self.restart_unusable(rollout)
            groups = self._checked(rollout, await self._collected(rollout))
            self.ledger.assign(g.prompt.prompt_id for g in groups)
        except BaseException:
            self._restarted += rollout.runner.restarted  # no result of this rollout tells of them
            raise
        finally:
            self.put_back()
            self._busy = False
        return self.result(rollout, groups, version, router, timer)

    def result(
        self,
        rollout: RolloutContext,
        groups: list[SampleGroup],
        version: WeightVersion,
        router: EngineRouter,
        timer: PhaseTimer,
    ) -> RolloutResult:
        """Groups that were just assigned to a training step, with the metrics of how they came about.

        Args:
            rollout: in which they were collected.
            groups: in the order of the prompts.
            version: policy version that trains on them.
            router: which sent the requests.
            timer: the times of the rollout.
        """
        dropped, self._dropped[:] = list(self._dropped), []
        restarted, self._restarted = rollout.runner.restarted + self._restarted, 0
        metrics = rollout_metrics(
            groups,
            version=version,
            tokens=router.tokens,
            dropped=(d.reason for d in dropped),
            restarted=restarted,
            prompts=self.ledger.counts(),
            timer=timer,
        )
        if unusable := self._source.drops.unusable:
            metrics["prompts/bad_rows"] = float(unusable)
        return RolloutResult(
            groups=groups,
            metrics=metrics | self._interruption_metrics(rollout, groups),
            dropped=dropped,
            histograms=sample_histograms([s for g in groups for s in g.samples], version),
        )

    def _interruption_metrics(self, rollout: RolloutContext, groups: Sequence[SampleGroup]) -> dict[str, float]:
        """What interrupted samples cost and kept; see :mod:`relax_rollout.loop.metrics`."""
        carried = self.ledger.groups(PromptState.OUT, PromptState.PARTIAL, PromptState.BUFFERED)
        context, waited = rollout.runner.context, 0.0
        if rollout.full_since is not None:
            waited = time.monotonic() - rollout.full_since
        most = max((s.aborted_count for g in (*groups, *carried) for s in g.samples), default=0)
        metrics = {
            "rollout/interrupted_max": float(most),
            # As the gate counted them until this step took its own.
            "rollout/open_groups": float(len(groups) + sum(g.start_version is not None for g in carried)),
            "rollout/kept_tokens": float(context.kept_tokens),
            "rollout/reprefilled_tokens": float(context.reprefilled_tokens),
            "rollout/waited_for_deadline_s": waited,
        }
        if context.cut_at_pictures:
            metrics["rollout/cut_at_pictures"] = float(len(context.cut_at_pictures))
        return metrics

    def book_returned(self) -> None:
        """Books what the last rollout returned: by now the trainer has it. Does nothing when that is booked already."""
        returned = [g.prompt.prompt_id for g in self.ledger.assigned]
        if returned and self._trains:
            self.ledger.train(returned)
        elif returned:
            self.ledger.drop(returned, GENERATED_ONLY)

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Writes the numbers of the open samples into ``folder`` (:data:`SAMPLES_FILE`).

        Args:
            folder: is there.

        Returns:
            the rest as JSON values: the source's cursor, the ledger, and drops that no result has told yet.

        Raises:
            OSError: the file could not be written, for example on a full disk.
            ValueError: a value of the data cannot be stored; the message names its row.
        """
        state = self.state_dict()
        with (folder / SAMPLES_FILE).open("wb") as file:
            file.write(state["ledger"].pop("samples"))
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only now that they are full
        return state

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Goes on where :meth:`save_state` was called.

        Args:
            state: what it returned.
            folder: where its file is.

        Raises:
            ValueError: the file is missing or damaged; or as :meth:`load_state_dict`. Nothing was loaded then.
        """
        check_format(state)
        file = folder / SAMPLES_FILE
        try:
            samples = file.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{file} cannot be read: {error}; copy the checkpoint again from where it is whole, or load another"
            ) from error
        ledger = state.get("ledger")
        self.load_state_dict(state | {"ledger": {**ledger, "samples": samples} if isinstance(ledger, dict) else None})

    def state_dict(self) -> dict[str, Any]:
        """The source's cursor, the ledger with its open groups, and drops that no result has told yet.

        JSON values but for ``samples`` in the ledger, the numbers of the open samples as one binary file, which
        :meth:`save_state` writes. What the last rollout returned is booked first: a checkpoint is taken after the
        training step. May be called while a rollout runs: its groups are written as if it were interrupted now.
        """
        self.book_returned()
        return {
            "format": STATE_FORMAT,
            "source": self._source.state_dict(),
            "ledger": self.ledger.state_dict(keep_partial=self.settings.partial_rollout),
            "dropped": [dataclasses.asdict(d) for d in self._dropped],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was called.

        Raises:
            ValueError: it was written in another format, is damaged (the message names the prompts), or belongs to
                other data. Nothing was loaded then.
        """
        assert not self._busy, "a state is loaded between rollouts"
        check_format(state)
        try:
            dropped = [DroppedPrompt(**d) for d in state["dropped"]]
            ledger_state, source_state = state["ledger"], state["source"]
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"the rollout state of the checkpoint is damaged: {error!r}; load another checkpoint"
            ) from error
        ledger = PromptLedger()
        ledger.load_state_dict(ledger_state)
        self._source.load_state_dict(source_state)
        for group in ledger.groups():
            if group.prompt.multimodal:
                self._source.restore(group.prompt)
        self._dropped, self.ledger = dropped, ledger
        self._feed = self._feed_of(ledger)
        self._restarted = self._feed.restart_resized()
        if not self.settings.partial_rollout:
            self._restarted += self._feed.restart_unfinished()

    def open(
        self,
        rollout_id: int,
        version: WeightVersion,
        router: EngineRouter,
        timer: PhaseTimer,
        *,
        continuous: bool = False,
    ) -> RolloutContext:
        """The parts of a rollout that begins.

        Args:
            rollout_id: absolute id, for messages and request ids.
            version: policy version that the engines serve.
            router: sends the requests.
            timer: told when requests and scores begin and end.
            continuous: it goes on over training steps and pushes of weights, and interrupts no group for a full batch.
        """
        context = GenerationContext(
            router,
            sampling=sampling_params(self.settings),
            max_context_len=self.settings.rollout_max_context_len,
            tokenizer=self._tokenizer,
            version=version,
            label="run" if continuous else f"r{rollout_id}",
            end_token_ids=self._ends,
            keep_cache=not self.settings.recompute_kv_cache_after_weight_updates,
        )
        runner = GroupRunner(
            router,
            context,
            generate=self._generate,
            reward=self._reward,
            timer=timer,
            keep_interrupted=self.settings.partial_rollout,
            mask_off_policy=self.settings.mask_offpolicy_in_partial_rollout,
        )

        def report(rollout: RolloutContext, groups_done: int, running: InflightGroups) -> None:
            if self._progress is not None:
                self._progress(
                    RolloutProgress(
                        rollout_id=rollout.rollout_id,
                        groups_done=groups_done,
                        groups_wanted=self.settings.rollout_batch_size,
                        groups_running=len(running),
                        prompts_dropped=len(rollout.dropped),
                        tokens=router.tokens,
                        elapsed_s=timer.elapsed_s,
                        waiting_for="; ".join(filter(None, (running.waiting_for, rollout.waits_for))),
                    )
                )

        return RolloutContext(
            rollout_id=rollout_id,
            version=version,
            settings=self.settings,
            ledger=self.ledger,
            feed=self._feed,
            runner=runner,
            bound=self._bound,
            group_filter=self._filter,
            dropped=self._dropped,
            max_rejected=self._max_rejected,
            make_running=lambda on_wait: InflightGroups(
                runner,
                on_wait=on_wait,
                interval_s=self._progress_interval_s,
                stall_timeout_s=self._stall_timeout_s,
            ),
            progress=report,
            continuous=continuous,
        )

    def put_back(self) -> None:
        """Lets all groups that are out wait, after what ran them was ended."""
        self._restarted += self._feed.put_back()

    def restart_unusable(self, rollout: RolloutContext) -> None:
        """Lets samples at rest start again that cannot be trained as they are; none is dropped.

        Those are: samples of later weights than this rollout has (a run that begins again at a lower rollout than the
        checkpoint's trains other weights under the same versions), unfinished ones without room for another token
        (a limit was lowered), and groups that are, or would become, too old: see
        :func:`relax_rollout.staleness.surplus`.
        """
        at_rest, room = (*self.ledger.ready, *self.ledger.waiting), rollout.runner.context.room
        for group in at_rest:
            self._restart(
                rollout,
                group,
                lambda s: (
                    any(v > rollout.version for v in s.versions)
                    or (not s.status.finished and len(s.tokens) >= max(1, room(s.prompt)))
                ),
            )
        opened = [OpenGroup(g.start_version, g.prompt.prompt_id) for g in at_rest if g.start_version is not None]
        for late in surplus(opened, self._bound, step=rollout.version, overdue=rollout.overdue(at_rest)):
            old = self.ledger.group(late.prompt_id)
            assert old is not None, "an open group is in the ledger"
            self._restart(rollout, old, lambda sample: True)

    def _restart(self, rollout: RolloutContext, group: SampleGroup, unusable: Callable[[Sample], bool]) -> None:
        again = [s for s in group.samples if s.tokens and unusable(s)]
        for sample in again:
            rollout.runner.restart(sample)
        if again:
            group.settle()
            if self.ledger.state_of(group.prompt.prompt_id) is PromptState.BUFFERED:
                self.ledger.interrupt([group.prompt.prompt_id])

    async def _collected(self, rollout: RolloutContext) -> Any:
        try:
            return await guarded(self._collect, rollout)
        except UserFunctionError as e:
            path = self.settings.rollout_function_path
            raise ValueError(f"rollout {rollout.rollout_id}: --rollout-function-path {path} raised {e}") from e

    def _checked(self, rollout: RolloutContext, groups: Any) -> list[SampleGroup]:
        """The groups in the order of the prompts; what a function of the user returned is not trusted."""
        if self.settings.rollout_function_path is not None:
            name = f"--rollout-function-path {self.settings.rollout_function_path}"
            if not isinstance(groups, list) or not all(isinstance(g, SampleGroup) for g in groups):
                raise ValueError(f"{name} returned {type(groups).__name__}; it must return a list of SampleGroup")
            seen: set[int] = set()
            for group in groups:
                if not rollout.has(group) or group.prompt.prompt_id in seen:
                    raise ValueError(
                        f"{name} returned a group for {group.prompt.source} that it did not get from rollout.take "
                        "or rollout.chosen, or returned it twice"
                    )
                seen.add(group.prompt.prompt_id)
                if not group.scored:
                    raise ValueError(f"{name} returned an unfinished group for {group.prompt.source}")
        return sorted(groups, key=lambda g: g.prompt.prompt_id)
