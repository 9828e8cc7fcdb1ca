"""Generates groups without end in the background, while training steps take them and new weights come.

    producer    [start what the gate allows] -> [whole? filter, keep] -> [put its rows] -> ... until no prompt is left
                      ^                                |
    next_step(t) -----|------ waits for the groups that step t takes, and gives them
    settle(t)         |       step t has trained them; their rows are cleared
    begin_push()      |       holds new requests, ends running ones; samples rest with their tokens
    end_push(t + 1) --+       engines serve t + 1: samples go on from their tokens, new groups may start

The gate is :mod:`relax_rollout.staleness`; how many groups are open is asked of the ledger each time. ``version`` is
what all engines in use serve, ``step`` the training step that is closed next.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from relax_data.types import SampleGroup, WeightVersion

from relax_rollout.engines.pool import EnginePool
from relax_rollout.engines.router import EngineRouter
from relax_rollout.engines.usage import EngineTime
from relax_rollout.loop.context import RolloutContext
from relax_rollout.loop.publisher import RowPublisher
from relax_rollout.loop.rollout_loop import RolloutLoop, RolloutResult
from relax_rollout.loop.runner import InflightGroups
from relax_rollout.timer import PhaseTimer

PROTECTED_POLL_S = 0.05
"""How often a push looks whether the samples that it must not interrupt have finished."""


class _ClosedGate:
    """The time in which only the gate kept the engines from more work, as a share of all time."""

    def __init__(self) -> None:
        self._begin = self._since = self._now()
        self._closed, self._closed_s = False, 0.0

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def note(self, closed: bool) -> None:
        """Tells how it is from now on."""
        now = self._now()
        self._closed_s += (now - self._since) * self._closed
        self._since, self._closed = now, closed

    def take(self) -> float:
        """The share since the last call."""
        self.note(self._closed)
        passed, closed = self._since - self._begin, self._closed_s
        self._begin, self._closed_s = self._since, 0.0
        return closed / passed if passed > 0 else 0.0


class Producer:
    """The groups of a run in the fully-async mode. One object for one event loop; one caller at a time."""

    def __init__(
        self,
        loop: RolloutLoop,
        pool: EnginePool,
        *,
        concurrency: int = 512,
        end: int | None = None,
        publisher: RowPublisher | None = None,
    ) -> None:
        """Starts nothing yet: the first :meth:`end_push` does.

        Args:
            loop: the parts of a rollout, and the ledger; nobody else generates with it.
            pool: the engines.
            concurrency: most requests at the same time for each engine.
            end: the first step that will not be trained, when it is known: nothing is generated for it.
            publisher: puts the rows of whole groups where the trainer fetches them; None: nobody fetches any.
        """
        self._publisher = publisher
        self._loop, self._pool, self._end = loop, pool, end
        self._timer = PhaseTimer()
        self._router = EngineRouter(pool, concurrency, self._timer)
        self._rollout: RolloutContext | None = None
        self._gate: _ClosedGate | None = None
        self._running: InflightGroups | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()  # for the producer: the gate may have opened
        self._moved = asyncio.Event()  # for who waits: a group has ended, or the producer has
        if publisher is not None:
            publisher.on_failure = self._moved.set

    @property
    def version(self) -> WeightVersion | None:
        """What the engines serve, as far as this knows; None before the first push."""
        return None if self._rollout is None else self._rollout.version

    # ------------------------------------------------------------------ the background

    def _start(self, version: WeightVersion) -> None:
        self._rollout = self._loop.open(version, version, self._router, self._timer, continuous=True)
        self._rollout.end = self._end
        self._loop.restart_unusable(self._rollout)
        if self._publisher is not None:
            self._publisher.watch()
            for group in self._loop.ledger.ready:  # of a checkpoint, which holds no rows
                self._publisher.add(group)
        self._running = self._rollout.running()
        self._timer.lap()
        self._pool.usage.take()
        self._gate = _ClosedGate()
        self._router.on_load = self._note_gate
        self._task = asyncio.ensure_future(self._produce(self._rollout, self._running))

    async def _produce(self, rollout: RolloutContext, running: InflightGroups) -> None:
        try:
            while True:
                if not self._pool.held:
                    for group in rollout.take(rollout.startable(full=False)):
                        running.submit(group)
                self._note_gate()
                self._moved.set()
                for group, whole in await running.next_change(self._wake):
                    if whole and rollout.keep(group) and self._publisher is not None:
                        self._publisher.add(group)
        except BaseException:
            await running.cancel()
            self._loop.put_back()
            raise
        finally:
            self._moved.set()

    def _note_gate(self) -> None:
        """The producer starts whatever the gate allows: with prompts left and room at an engine, it allows no more."""
        assert self._gate is not None, "the first push begins it"
        assert self._rollout is not None
        self._gate.note(self._router.has_room and not self._pool.held and not self._rollout.source_exhausted)

    def _parts(self) -> tuple[RolloutContext, InflightGroups]:
        """What a run works with that has begun; raises what ended the producer, if something has."""
        assert self._rollout is not None, "the first push begins it"
        assert self._running is not None
        assert self._task is not None
        if self._task.done():
            self._task.result()
        if self._publisher is not None:
            self._publisher.check()
        return self._rollout, self._running

    async def _until_moved(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    # ------------------------------------------------------------------ a training step

    async def next_step(self, step: int) -> RolloutResult:
        """Waits for the groups that a training step takes, and assigns them to it.

        Args:
            step: which one; the weights that train have this version.

        Returns:
            ``--rollout-batch-size`` groups, or what is left at the end of the last epoch, in the order of the prompts.

        Raises:
            EngineDied, RewardError, GenerationError, ValueError, TimeoutError: as
                :meth:`relax_rollout.loop.rollout_loop.RolloutLoop.generate`; then nothing runs any more.
            PlaneFailed: the plane of the rows broke; the message says which part of it.
        """
        rollout, running = self._parts()
        assert step == rollout.step, f"step {rollout.step} comes next, not {step}"
        assert not self._loop.ledger.assigned, "the step before is settled first"
        while True:
            chosen = rollout.chosen()
            rollout.groups_done = len(chosen)
            full = len(chosen) == rollout.settings.rollout_batch_size
            if (full and not rollout.awaited(running, chosen)) or (not full and self._is_over(rollout, running)):
                break
            await self._until_moved()
            self._parts()
        result = self._close(rollout, running, sorted(chosen, key=lambda g: g.prompt.prompt_id))
        if self._publisher is not None and result.groups:
            result.row_ids = await self._publisher.row_ids(result.groups)
            result.picture_ids = self._publisher.picture_ids(result.groups)
            result.metrics |= self._publisher.metrics()
        return result

    def _is_over(self, rollout: RolloutContext, running: InflightGroups) -> bool:
        return rollout.source_exhausted and not len(running) and not self._loop.ledger.waiting

    def _close(self, rollout: RolloutContext, running: InflightGroups, groups: list[SampleGroup]) -> RolloutResult:
        step, loop = rollout.step, self._loop
        _check_bound(groups, step, rollout.bound.max_staleness)
        loop.ledger.assign(g.prompt.prompt_id for g in groups)
        result = loop.result(rollout, groups, step, self._router, self._timer.lap())
        result.usage = self._pool.usage.take()
        result.metrics |= self._metrics(running, result.usage)
        self._router.tokens = rollout.runner.restarted = 0
        rollout.runner.context.kept_tokens = rollout.runner.context.reprefilled_tokens = 0
        rollout.runner.context.cut_at_pictures.clear()
        rollout.full_since, rollout.waits_for = None, ""
        rollout.step = rollout.rollout_id = step + 1
        self._wake.set()
        return result

    def _metrics(self, running: InflightGroups, usage: Mapping[str, EngineTime]) -> dict[str, float]:
        """What is open after a step was closed, and what the engines did since the one before."""
        ledger = self._loop.ledger
        resumed = sum(any(s.tokens and not s.status.finished for s in g.samples) for g in running.groups)
        metrics = {
            "async/ready_groups": float(len(ledger.ready)),
            "async/running_groups": float(len(running)),
            "async/interrupted_groups": float(resumed),
            "async/admission_closed_share": 0.0 if self._gate is None else self._gate.take(),
        }
        shares: dict[str, dict[str, float]] = {
            "engine_busy_share": {engine: spent.share("busy") for engine, spent in usage.items()},
            "engine_idle_share": {engine: spent.share("idle") for engine, spent in usage.items()},
            "engine_paused_share": {engine: spent.share("paused") for engine, spent in usage.items()},
            "running_requests_mean": {engine: spent.running for engine, spent in usage.items()},
        }
        for name, values in shares.items():
            if values:
                metrics[f"async/{name}"] = sum(values.values()) / len(values)
            if len(values) > 1:
                metrics |= {f"async/{name}/{engine}": value for engine, value in values.items()}
        return metrics

    def settle(self, step: int) -> None:
        """Books the groups of a step as trained."""
        rollout, _ = self._parts()
        assert step == rollout.step - 1, f"step {rollout.step - 1} was closed last, not {step}"
        trained = [g.prompt.prompt_id for g in self._loop.ledger.assigned]
        self._loop.book_returned()
        if self._publisher is not None:
            self._publisher.forget(trained)

    # ------------------------------------------------------------------ pushes of weights

    async def begin_push(self) -> dict[str, float]:
        """Brings every sample to rest: no request is at an engine until :meth:`end_push`.

        Running requests are ended and their samples keep what they have; without ``--partial-rollout`` they are waited
        for. Samples that were interrupted too often (``--partial-rollout-max-aborted-count``) are waited for before,
        while everything else goes on.

        Returns:
            seconds: ``pause`` that protected samples took, ``land`` until all rested.

        Raises:
            TimeoutError: an engine does not end its requests; the message names them.
        """
        begin = time.monotonic()
        if self._rollout is None:  # the first push: nothing has been asked for yet
            self._pool.hold()
            return {"pause": 0.0, "land": 0.0}
        rollout, running = self._parts()
        while rollout.protected(running):
            await asyncio.sleep(PROTECTED_POLL_S)
            self._parts()
        self._pool.hold()
        self._note_gate()
        held = time.monotonic()
        await self._router.land(abort=rollout.settings.partial_rollout)
        return {"pause": held - begin, "land": time.monotonic() - held}

    def end_push(self, version: WeightVersion) -> None:
        """Goes on with the weights that every engine in use has now; the first time it starts to generate."""
        assert self._pool.held, "begin_push() comes first"
        if self._rollout is None:
            self._start(version)
        else:
            self._parts()
            self._rollout.version = self._rollout.runner.context.version = version
        self._pool.open()
        self._note_gate()
        self._wake.set()

    async def stop(self) -> None:
        """Ends everything that runs; the groups wait in the ledger."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._publisher is not None:
            await self._publisher.close()


def _check_bound(groups: list[SampleGroup], step: int, most: int | None) -> None:
    late: list[Any] = [
        (s.name, step - s.oldest_version)
        for g in groups
        for s in g.samples
        if most is not None and s.oldest_version is not None and step - s.oldest_version > most
    ]
    assert not late, f"step {step} would train samples that are older than {most} version(s): {late[:5]}"
