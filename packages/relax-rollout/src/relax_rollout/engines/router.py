"""Sends requests to the least loaded of several engines, with a limit for each."""

import asyncio
import contextlib
from collections.abc import Sequence

from relax_rollout.engines.base import Engine, EngineDied, GenerateRequest, GenerateResult
from relax_rollout.timer import PhaseTimer

QUIET_ABORT_S = 3.0
"""Seconds that the clean-up after an error may spend on telling the engines."""


class EngineRouter:
    """The engines of one rollout or evaluation.

    Args:
        engines: at least one.
        concurrency: most requests at the same time for each engine; the others wait here, in order.
        timer: told when requests begin and end.
    """

    def __init__(self, engines: Sequence[Engine], concurrency: int, timer: PhaseTimer | None = None) -> None:
        if not engines:
            raise ValueError("a rollout needs at least one engine")
        if concurrency < 1:
            raise ValueError(f"--sglang-server-concurrency is {concurrency}; it must be at least 1")
        self._engines = list(engines)
        self._permits = asyncio.Semaphore(concurrency * len(engines))
        self._load = [0] * len(engines)
        self._running: dict[str, int] = {}
        self._closed = False
        self._timer = timer or PhaseTimer()
        self.tokens = 0
        """Tokens that the engines returned so far, of aborted requests too."""

    @property
    def closed(self) -> bool:
        """True after :meth:`abort_all`."""
        return self._closed

    @property
    def running(self) -> dict[str, int]:
        """Number of requests at each engine by its name."""
        return {e.name: n for e, n in zip(self._engines, self._load, strict=True)}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's answer; an empty aborted one, without asking an engine, after :meth:`abort_all`.

        Raises:
            EngineDied: its message names the engine.
        """
        async with self._permits:
            if self._closed:
                return GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="abort")
            index = min(range(len(self._engines)), key=self._load.__getitem__)
            self._load[index] += 1
            self._running[request.rid] = index
            try:
                with self._timer.generating():
                    result = await self._engines[index].generate(request)
            except EngineDied as e:
                name = self._engines[index].name
                if name in str(e):
                    raise
                raise EngineDied(f"{name}: {e}") from e
            finally:
                self._load[index] -= 1
                del self._running[request.rid]
        self.tokens += len(result.tokens)
        return result

    async def abort_all(self) -> None:
        """Asks the engines to end every running request of this router, and lets no further one start.

        Requests return by themselves soon after. One that reaches its engine only now misses the call, so it is to be
        repeated while requests are running.
        """
        self._closed = True
        await asyncio.gather(*(self._engines[index].abort(rid) for rid, index in list(self._running.items())))

    async def abort_quietly(self, rids: dict[str, int]) -> None:
        """Frees the engines of requests whose tasks were cancelled; what fails here must not hide the first error."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(
                asyncio.gather(
                    *(self._engines[index].abort(rid) for rid, index in rids.items()), return_exceptions=True
                ),
                QUIET_ABORT_S,
            )

    def snapshot(self) -> dict[str, int]:
        """Running requests: index of the engine by request id."""
        return dict(self._running)
