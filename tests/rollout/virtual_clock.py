"""An event loop whose clock is moved instead of waited for, and an engine of constant rate on it.

A minute of a pipeline passes in milliseconds, and nothing depends on how fast the machine is.
"""

import asyncio
import dataclasses
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relax_rollout.engines.base import GenerateRequest, GenerateResult

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Waits for nothing: the time that it should wait passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everything waits for ever: a deadlock")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its ``time()`` begins at 0 and goes on only when every task waits for it."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop of its own whose time is virtual.

    Raises:
        RuntimeError: all tasks wait for each other.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclasses.dataclass(eq=False)
class _Job:
    begin: float
    length: int
    version: int
    limit: int
    done: asyncio.Future[GenerateResult]
    service: Callable[[], float]

    def result(self, reason: Any) -> GenerateResult:
        n = min(self.length, self.limit) if reason != "abort" else int(self.service() - self.begin + 1e-9)
        if reason != "abort" and self.length > self.limit:
            reason = "length"
        return GenerateResult(
            tokens=[20 + i % 9 for i in range(n)],
            log_probs=[-1.0] * n,
            versions=[self.version] * n,
            finish_reason=reason,
        )


class RateEngine:
    """Makes ``rate`` tokens a second, shared evenly by the requests that run. Lengths are decided for each sample.

    Attributes:
        version: that it serves; nothing may run while it is changed.
    """

    def __init__(self, length: Callable[[GenerateRequest], int], *, rate: float, name: str = "engine0") -> None:
        self.name, self.version = name, 0
        self._length, self._rate = length, rate
        self._jobs: dict[str, _Job] = {}
        self._service, self._since = 0.0, 0.0  # tokens that each running request got so far, and when that was true
        self._timer: asyncio.TimerHandle | None = None

    @property
    def running(self) -> int:
        return len(self._jobs)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._advance()
        done: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._jobs[request.rid] = _Job(
            self._service,
            self._length(request),
            self.version,
            request.sampling.max_new_tokens,
            done,
            lambda: self._service,
        )
        self._schedule()
        try:
            return await done
        finally:
            if self._jobs.pop(request.rid, None) is not None:
                self._schedule()

    async def abort(self, rid: str | None = None) -> None:
        self._advance()
        for name in [rid] if rid is not None else list(self._jobs):
            if (job := self._jobs.pop(name, None)) is not None:
                job.done.set_result(job.result("abort"))
        self._schedule()

    async def weight_version(self) -> int:
        return self.version

    async def close(self) -> None:
        pass

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._jobs:
            self._service += (now - self._since) * self._rate / len(self._jobs)
        self._since = now

    def _schedule(self) -> None:
        self._advance()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            left = min(j.begin + min(j.length, j.limit) for j in self._jobs.values()) - self._service
            seconds = max(0.0, left) * len(self._jobs) / self._rate
            self._timer = asyncio.get_running_loop().call_later(seconds, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        for name, job in list(self._jobs.items()):
            if job.begin + min(job.length, job.limit) <= self._service + 1e-6:
                del self._jobs[name]
                job.done.set_result(job.result("stop"))
        self._schedule()
