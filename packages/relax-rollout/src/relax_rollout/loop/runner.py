"""Generates and scores groups, and waits for many of them at once. Used by the rollout and by evaluation."""

import asyncio
import time
from collections.abc import Callable

from relax_data.types import Sample, SampleGroup, SampleStatus

from relax_rollout.concurrency import cancel_all, gather_or_cancel
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import (
    GenerateFunction,
    GenerationContext,
    GenerationError,
    run_generate_function,
)
from relax_rollout.rewards.base import RewardFunction
from relax_rollout.timer import PhaseTimer

MAX_FOREIGN_ABORTS = 8
"""Times that an engine may abort a request without being asked (paused by someone else) before it is an error."""
ABORT_RETRY_S = 2.0
ABORT_DEADLINE_S = 60.0
STALL_TIMEOUT_S = 5400.0
"""Seconds without a single sample finished, after which a rollout or evaluation gives up. Engines and rewards have
deadlines of their own, which are shorter; this one is the last resort."""


class GroupRunner:
    """Brings groups from wherever they are to whole and scored."""

    def __init__(
        self,
        router: EngineRouter,
        context: GenerationContext,
        *,
        generate: GenerateFunction,
        reward: RewardFunction,
        timer: PhaseTimer,
        keep_interrupted: bool = False,
        mask_off_policy: bool = False,
    ) -> None:
        """Takes what it works with.

        Args:
            router: sends the requests.
            context: what generate functions get.
            generate: generates one response.
            reward: scores it.
            timer: told when scores are computed.
            keep_interrupted: interrupted samples keep their tokens and go on from there, instead of starting again.
            mask_off_policy: a finished sample is trained on the tokens of its newest weights alone.
        """
        self.router = router
        self.context = context
        self._keep, self._mask = keep_interrupted, mask_off_policy
        self._generate = generate
        self._reward = reward
        self._timer = timer
        self.restarted = 0
        """Samples whose tokens were thrown away."""
        self.steps = 0
        """Samples generated or scored so far; when it stands still, nothing happens."""
        self.scoring: dict[int, str] = {}
        """Names of what is being scored now, oldest first."""

    async def run_group(self, group: SampleGroup) -> bool:
        """Generates and scores what ``group`` lacks.

        Returns:
            True when it is whole and scored, False when the router was told to abort and interrupted it.

        Raises:
            EngineDied, GenerationError, RewardError: whichever comes first; the other samples are cancelled.
        """
        await gather_or_cancel(self._run_sample(s) for s in group.samples)
        if not group.finished:
            return False
        if self._reward.per_group and any(s.reward is None for s in group.samples):
            for sample in group.samples:  # scored together, or not at all
                sample.reward = None
            await self._score(group, group.prompt.source)
        assert all(s.reward is not None for s in group.samples), "a reward sets the reward of every sample"
        return True

    def interrupted(self, sample: Sample) -> None:
        """Decides what becomes of a sample that an engine aborted: it goes on from its tokens, or starts again.

        The only place that decides it.
        """
        if sample.tokens:
            sample.aborted_count += 1
        if self._keep:
            sample.status = SampleStatus.PENDING
        else:
            self.restart(sample)

    def restart(self, sample: Sample) -> None:
        """Throws the response away, so that the sample is generated from its prompt again; counted."""
        if sample.tokens:
            self.restarted += 1
        sample.restart()

    async def _run_sample(self, sample: Sample) -> None:
        aborts = 0
        while not sample.status.finished:
            self.context.continue_from(sample)
            await run_generate_function(self._generate, sample, self.context)
            self.steps += 1
            if sample.status is SampleStatus.ABORTED:
                self.interrupted(sample)
                if self.router.closed:
                    return
                aborts += 1
                if aborts == MAX_FOREIGN_ABORTS:
                    raise GenerationError(
                        f"{sample.name}: an engine aborted its request {aborts} times without being asked to; "
                        "look into the engine's log"
                    )
        if self._mask:
            _mask_off_policy(sample)
        if not self._reward.per_group and sample.reward is None:
            await self._score(sample, sample.name)

    async def _score(self, target: Sample | SampleGroup, name: str) -> None:
        self.scoring[id(target)] = name
        try:
            with self._timer.scoring():
                await self._reward(target)
        finally:
            del self.scoring[id(target)]
        self.steps += 1


def _mask_off_policy(sample: Sample) -> None:
    """Takes the tokens out of the loss that are older than the last one an engine sampled. Again without effect."""
    trained = [v for v, m in zip(sample.versions, sample.loss_mask, strict=True) if m]
    if trained:
        sample.mask_older_than(trained[-1])


class InflightGroups:
    """Groups that a runner works on at the same time.

    Args:
        on_wait: called about every ``interval_s`` seconds while something is waited for.
        stall_timeout_s: most seconds without any sample generated or scored.
    """

    def __init__(
        self,
        runner: GroupRunner,
        *,
        on_wait: Callable[["InflightGroups"], None],
        interval_s: float,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        self._runner = runner
        self._tasks: dict[asyncio.Task[bool], SampleGroup] = {}
        self._on_wait = on_wait
        self._interval_s = interval_s
        self._stall_timeout_s = stall_timeout_s
        self._reported = self._moved = time.monotonic()
        self._steps = -1

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def groups(self) -> list[SampleGroup]:
        """The groups that run now."""
        return list(self._tasks.values())

    def submit(self, group: SampleGroup) -> None:
        """Starts generating a group."""
        if not self._tasks:
            self._moved = time.monotonic()  # nobody waited before
        self._tasks[asyncio.ensure_future(self._runner.run_group(group))] = group

    @property
    def waiting_for(self) -> str:
        """The groups that are still running, for messages."""
        parts = [f"{n} requests at {name}" for name, n in self._runner.router.running.items() if n]
        if engines := self._runner.router.waiting_for:
            parts.append(engines)
        if self._runner.scoring:
            parts.append(
                f"the reward of {len(self._runner.scoring)}, first {next(iter(self._runner.scoring.values()))}"
            )
        rows = sorted(self._tasks.values(), key=lambda g: g.prompt.prompt_id)
        return ", ".join(parts or ["nothing"]) + (f"; first prompt {rows[0].prompt.source}" if rows else "")

    async def next_finished(self) -> list[SampleGroup]:
        """Waits for at least one group to be whole; all that are, in the order of the prompts.

        Raises:
            TimeoutError: nothing moved for too long; it says what was waited for.
        """
        assert self._tasks, "nothing was submitted"
        while True:
            groups = [g for g, whole in await self._wait(self._interval_s) if whole]
            if groups:
                return groups

    async def next_change(self, woken: asyncio.Event) -> list[tuple[SampleGroup, bool]]:
        """Waits until groups have ended or the event is set, which is cleared; nothing needs to run.

        Returns:
            the groups that have ended, each with whether it is whole; maybe none when the event was set.

        Raises:
            TimeoutError: nothing moved for too long; it says what was waited for.
        """
        waking = asyncio.ensure_future(woken.wait())
        try:
            while True:
                awaited = {waking, *self._tasks}
                await asyncio.wait(awaited, timeout=self._interval_s, return_when=asyncio.FIRST_COMPLETED)
                groups = self._ended({task for task in self._tasks if task.done()})
                if waking.done():
                    woken.clear()
                    return groups
                if groups:
                    return groups
        finally:
            waking.cancel()

    async def interrupt(self) -> list[tuple[SampleGroup, bool]]:
        """Ends all running groups; each with whether it became whole before.

        Scores that are being computed are waited for: they are paid for, and a plain function cannot be stopped.

        Raises:
            TimeoutError: an engine does not end its requests.
        """
        groups: list[tuple[SampleGroup, bool]] = []
        deadline = time.monotonic() + ABORT_DEADLINE_S
        while self._tasks:
            await self._runner.router.abort_all()
            groups += await self._wait(ABORT_RETRY_S, asyncio.ALL_COMPLETED)
            if any(self._runner.router.running.values()) and time.monotonic() > deadline:
                raise TimeoutError(f"requests were not aborted within {ABORT_DEADLINE_S:.0f} s: {self.waiting_for}")
        return groups

    async def cancel(self) -> None:
        """Drops everything that runs, after an error: no task is left, and the engines are told."""
        running = self._runner.router.snapshot()
        await cancel_all(self._tasks)
        self._tasks.clear()
        await self._runner.router.abort_quietly(running)

    async def _wait(
        self, timeout_s: float, return_when: str = asyncio.FIRST_COMPLETED
    ) -> list[tuple[SampleGroup, bool]]:
        finished, _ = await asyncio.wait(self._tasks, timeout=timeout_s, return_when=return_when)
        return self._ended(finished)

    def _ended(self, finished: set[asyncio.Task[bool]]) -> list[tuple[SampleGroup, bool]]:
        pairs = sorted(((self._tasks.pop(t), t) for t in finished), key=lambda pair: pair[0].prompt.prompt_id)
        errors = [e for _, task in pairs if (e := task.exception()) is not None]
        if errors:
            raise errors[0]
        self._watch()
        return [(group, task.result()) for group, task in pairs]

    def _watch(self) -> None:
        now = time.monotonic()
        if self._runner.steps != self._steps:
            self._steps, self._moved = self._runner.steps, now
        elif self._tasks and now - self._moved > self._stall_timeout_s:
            raise TimeoutError(f"no sample finished for {self._stall_timeout_s:.0f} s; waiting for {self.waiting_for}")
        if self._tasks and now - self._reported >= self._interval_s:
            self._reported = now
            self._on_wait(self)
