"""Sends requests to the least loaded of several engines, with a limit for each, and again when an engine is lost."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from relax_rollout.engines.base import Engine, EngineDied, GenerateRequest, GenerateResult
from relax_rollout.engines.pool import EnginePool, as_pool
from relax_rollout.timer import PhaseTimer

QUIET_ABORT_S = 3.0
"""Seconds that the clean-up after an error may spend on telling the engines."""
LAND_RETRY_S = 0.1
"""Seconds between two aborts of all requests for a push: one that reaches its engine late misses the first."""
LAND_DEADLINE_S = 60.0
LOOK_EVERY_S = 5.0
"""How often a request that waits for an engine looks whether there is still hope for one."""


@dataclasses.dataclass(eq=False)
class _Sent:
    """One request that is at an engine.

    Attributes:
        lost: the engine was excluded, so that its answer is not waited for.
        landing: it is aborted for a push of weights.
    """

    engine: Engine
    task: asyncio.Task[GenerateResult]
    lost: bool = False
    landing: bool = False


class EngineRouter:
    """The engines of one rollout or evaluation.

    A request whose engine dies or falls silent is sent again as it is, to another engine or to one that has come back:
    whoever waits for it notices only that it takes longer. The tokens that it had are lost.

    Args:
        engines: at least one; a pool, where lost engines come back, or engines of which every loss is an error.
        concurrency: most requests at the same time for each engine; the others wait here, in order.
        timer: told when requests begin and end.
    """

    def __init__(
        self, engines: Sequence[Engine] | EnginePool, concurrency: int, timer: PhaseTimer | None = None
    ) -> None:
        if not len(engines):
            raise ValueError("a rollout needs at least one engine")
        if concurrency < 1:
            raise ValueError(f"--sglang-server-concurrency is {concurrency}; it must be at least 1")
        self._pool = as_pool(engines)
        self._concurrency = concurrency
        self._queue: collections.deque[tuple[asyncio.Future[Engine | None], str | None]] = collections.deque()
        self._load: dict[Engine, int] = {}
        self._sent: dict[str, _Sent] = {}
        self._closed = False
        self._timer = timer or PhaseTimer()
        self.tokens = 0
        """Tokens that the engines returned so far, of aborted requests too."""
        self.resent = 0
        """Requests that were sent again because their engine was lost."""
        self.on_load: Callable[[], None] = lambda: None
        """Called when requests were admitted or have left: :attr:`has_room` may have changed."""

    @property
    def closed(self) -> bool:
        """True after :meth:`abort_all`."""
        return self._closed

    @property
    def running(self) -> dict[str, int]:
        """Number of requests at each engine by its name."""
        return {e.name: self._load.get(e, 0) for e in self._pool.serving}

    @property
    def has_room(self) -> bool:
        """Whether an engine would take another request at once: none waits here, and one has room for it."""
        return not self._queue and any(self._load.get(e, 0) < self._concurrency for e in self._pool.serving)

    @property
    def waiting_for(self) -> str:
        """What requests wait for while no engine serves; empty else."""
        return self._pool.waiting_for if self._queue else ""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's answer; an empty aborted one, without asking an engine, after :meth:`abort_all`.

        Raises:
            EngineDied: no engine is left, or one died that nobody restarts; the message names it.
        """
        first_time = True
        with self._pool.listening(self._on_change):
            while (engine := await self._admitted(request.engine, in_front=not first_time)) is not None:
                try:
                    result = await self._ask(engine, request)
                finally:
                    self._leave(engine)
                if result is not None:
                    self.tokens += len(result.tokens)
                    return result
                first_time = False
                self.resent += 1
        return GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="abort")

    async def _ask(self, engine: Engine, request: GenerateRequest) -> GenerateResult | None:
        """The engine's answer, or None when it was lost."""
        sent = self._sent[request.rid] = _Sent(engine, asyncio.ensure_future(engine.generate(request)))
        try:
            with self._timer.generating():
                result = await sent.task
            if sent.landing and result.finish_reason == "abort":
                return dataclasses.replace(result, finish_reason="held")
            return result
        except EngineDied as error:
            self._pool.exclude(engine, error)
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if sent.lost and not (task is not None and task.cancelling()):
                return None
            raise
        finally:
            del self._sent[request.rid]

    # ------------------------------------------------------------------ who may ask

    async def _admitted(self, wanted: str | None, *, in_front: bool) -> Engine | None:
        """Waits for an engine with room, if possible ``wanted``, and takes the place; None after :meth:`abort_all`."""
        place: asyncio.Future[Engine | None] = asyncio.get_running_loop().create_future()
        waiting = (place, wanted)
        (self._queue.appendleft if in_front else self._queue.append)(waiting)
        try:
            self._admit()
            while not place.done():
                self._pool.check_hope()
                await asyncio.wait([place], timeout=LOOK_EVERY_S)
            return place.result()
        except asyncio.CancelledError:
            if place.done() and place.exception() is None and (engine := place.result()) is not None:
                self._leave(engine)
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(waiting)

    def _admit(self) -> None:
        """Gives the requests that wait the room that there is, in order."""
        self._give_room()
        self.on_load()

    def _give_room(self) -> None:
        serving = self._pool.serving
        while self._queue:
            engine = None
            if not self._closed:
                if not serving or self._pool.held:
                    return
                engine = min(serving, key=functools.partial(self._last_taken, self._queue[0][1]))
                if self._load.get(engine, 0) >= self._concurrency:
                    return
                self._load[engine] = self._load.get(engine, 0) + 1
                self._pool.usage.began(engine.name)
            self._queue.popleft()[0].set_result(engine)

    def _last_taken(self, wanted: str | None, engine: Engine) -> tuple[bool, bool, int]:
        """Sorts the engines: those with room, of these the one that is wanted, of the others the least loaded."""
        load = self._load.get(engine, 0)
        return load >= self._concurrency, engine.name != wanted, load

    def _leave(self, engine: Engine) -> None:
        self._load[engine] -= 1
        self._pool.usage.ended(engine.name)
        self._admit()

    def _on_change(self) -> None:
        """An engine was lost or has come back: lets go of what is at lost ones, and admits."""
        for sent in self._sent.values():
            if not sent.lost and not self._pool.serves(sent.engine):
                sent.lost = True
                sent.task.cancel()
        self._admit()
        try:
            self._pool.check_hope()
        except EngineDied as error:
            while self._queue:
                self._queue.popleft()[0].set_exception(error)

    # ------------------------------------------------------------------ pushes of weights

    async def land(self, *, abort: bool = True, deadline_s: float = LAND_DEADLINE_S) -> None:
        """Returns when nothing of this router is at an engine any more; the pool is held, and no other router has any.

        Whoever waits for an aborted request gets what it has, with the reason ``held``.

        Args:
            abort: end the requests now; otherwise they are waited for, each for as long as it may take.
            deadline_s: most seconds until all have ended that are aborted.

        Raises:
            TimeoutError: some did not end; the message names engines and requests.
        """
        assert self._pool.held, "others would start meanwhile"
        give_up = time.monotonic() + deadline_s
        await asyncio.sleep(0)  # requests that were just admitted reach their engines first
        while self._sent:
            if abort:
                for sent in self._sent.values():
                    sent.landing = True
                # All at once: hundreds of calls would keep the engines busy for longer than what they abort.
                await asyncio.gather(*(self._abort_at(e, None) for e in {s.engine for s in self._sent.values()}))
            if self._sent:
                await asyncio.wait([s.task for s in self._sent.values()], timeout=LAND_RETRY_S)
                await asyncio.sleep(0)  # whoever waited for them takes the answer
            if abort and self._sent and time.monotonic() > give_up:
                left = ", ".join(f"{rid} at {sent.engine.name}" for rid, sent in list(self._sent.items())[:5])
                raise TimeoutError(
                    f"{len(self._sent)} requests did not end within {deadline_s:.0f} s for a push of weights: {left}"
                )

    # ------------------------------------------------------------------ ends

    async def abort_all(self) -> None:
        """Asks the engines to end every running request of this router, and lets no further one start.

        Requests return by themselves soon after. One that reaches its engine only now misses the call, so it is to be
        repeated while requests are running.
        """
        self._closed = True
        self._admit()
        await asyncio.gather(*(self._abort_at(engine, rid) for rid, engine in self.snapshot().items()))

    async def _abort_at(self, engine: Engine, rid: str | None) -> None:
        try:
            await engine.abort(rid)
        except EngineDied as error:
            self._pool.exclude(engine, error)

    async def abort_quietly(self, rids: dict[str, Engine]) -> None:
        """Frees the engines of requests whose tasks were cancelled; what fails here must not hide the first error."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(
                asyncio.gather(*(engine.abort(rid) for rid, engine in rids.items()), return_exceptions=True),
                QUIET_ABORT_S,
            )

    def snapshot(self) -> dict[str, Engine]:
        """Running requests: the engine by request id."""
        return {rid: sent.engine for rid, sent in self._sent.items()}
