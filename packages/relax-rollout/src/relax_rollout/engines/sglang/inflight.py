"""The requests of one client that are at the server: aborted for certain, and failed when the server is gone."""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Iterator

import httpx

from relax_rollout.engines.base import EngineSilent, GenerateResult
from relax_rollout.engines.sglang.log import last_words
from relax_rollout.engines.sglang.transport import Transport
from relax_rollout.engines.sglang.weight_status import WeightStatus

_LOOK_EVERY_S = 0.5
_PROBE_EVERY_S = 5.0


@dataclasses.dataclass(eq=False)
class InflightRequest:
    """One request that is at the server.

    Attributes:
        server_rid: its id there.
        task: waits for its answer.
        aborted: it is to end as soon as possible.
        failure: why it was given up; its task is cancelled then.
    """

    server_rid: str
    task: asyncio.Task[GenerateResult] | None = None
    aborted: bool = False
    failure: Exception | None = None

    def renew(self) -> str:
        """Another id of the same request, which nothing that the server was told of the first one can meet."""
        self.server_rid = f"{uuid.uuid4().hex[:16]}-{self.server_rid.split('-', 1)[1]}"
        return self.server_rid


class InflightRequests:
    """All requests of one client that are at the server, by the caller's id."""

    def __init__(self, transport: Transport, *, silence_deadline_s: float) -> None:
        self._transport, self._silence_deadline_s = transport, silence_deadline_s
        self._by_rid: dict[str, InflightRequest] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._abandoning: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._by_rid)

    @contextlib.contextmanager
    def entered(self, rid: str) -> Iterator[InflightRequest]:
        """Counts a request as in flight inside.

        Raises:
            ValueError: the id is in use.
        """
        if rid in self._by_rid:
            raise ValueError(f"request id {rid} is in use at {self._transport.name}")
        # SGLang aborts by prefix of the id: a random part of fixed length in front keeps "s1" from ending "s10".
        inflight = self._by_rid[rid] = InflightRequest(f"{uuid.uuid4().hex[:16]}-{rid}")
        loop = asyncio.get_running_loop()
        if self._watcher is None or self._watcher.done() or self._watcher.get_loop() is not loop:
            self._watcher = loop.create_task(self._look_after())
        try:
            yield inflight
        finally:
            del self._by_rid[rid]

    async def abort(self, rid: str | None) -> None:
        """Ends one request, or every request at the server (those of other clients too) when ``rid`` is None."""
        if rid is None:
            for inflight in self._by_rid.values():
                inflight.aborted = True
            await self._abort({"abort_all": True})
        elif (found := self._by_rid.get(rid)) is not None:
            found.aborted = True
            await self._abort({"rid": found.server_rid})

    def abandon(self, server_rid: str) -> None:
        """Ends a request at the server that nobody waits for any more; the server itself would notice after seconds."""

        async def end() -> None:
            with contextlib.suppress(Exception):
                await self._abort({"rid": server_rid})

        task = asyncio.get_running_loop().create_task(end())
        self._abandoning.add(task)
        task.add_done_callback(self._abandoning.discard)

    async def drained(self, seconds: float) -> None:
        """Waits until there is no request, or the time is over."""
        deadline = time.monotonic() + seconds
        while self._by_rid and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Stops looking after requests."""
        if self._watcher is not None and self._watcher.get_loop() is asyncio.get_running_loop():
            self._watcher.cancel()
        self._watcher = None

    async def _abort(self, body: dict[str, str | bool]) -> None:
        await self._transport.call("POST", "/abort_request", body=body)

    async def _look_after(self) -> None:
        """Runs as long as there are requests."""
        last_answer = last_probe = time.monotonic()
        while self._by_rid:
            await asyncio.sleep(_LOOK_EVERY_S)
            # An abort that overtakes its request is lost at the server, so it is repeated until the request ends.
            for inflight in [r for r in self._by_rid.values() if r.aborted]:
                with contextlib.suppress(Exception):
                    await self._abort({"rid": inflight.server_rid})
            now = time.monotonic()
            if now - last_probe < _PROBE_EVERY_S:
                continue
            last_probe = now
            answered, failure = await self._probe()
            if answered:
                last_answer = time.monotonic()
            elif failure is None and time.monotonic() - last_answer > self._silence_deadline_s:
                failure = EngineSilent(
                    f"{self._transport.name} ({self._transport.url}) has answered nothing for "
                    f"{self._silence_deadline_s:.0f} s. {last_words(self._transport.log_path)}"
                )
            if failure is not None:
                self._fail(failure)

    async def _probe(self) -> tuple[bool, Exception | None]:
        """Whether the server answers, and why its requests cannot end, if so."""
        try:
            info = await self._transport.probe()
        except httpx.ConnectError:
            return False, await self._transport.verdict()
        if info is None:
            return False, None
        weights = WeightStatus.parse(info["weight_version"])
        return True, weights.problem(self._transport.name) if weights.state == "broken" else None

    def _fail(self, failure: Exception) -> None:
        for inflight in self._by_rid.values():
            if inflight.task is not None and not inflight.task.done():
                inflight.failure = failure
                inflight.task.cancel()
