"""Requests that start together travel in one call, so that they reach the server's scheduler together.

SGLang computes what has arrived. Of hundreds of requests that come one by one it prefills one to three at a time, each
time with the cost of a whole forward pass; one call that carries them all is prefilled in as few passes as its limits
allow, and spares both sides the work of hundreds of HTTP requests. The answer is a stream that gives each response when
it is finished, so that the first finished is the first to return, as with calls of their own.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_rollout.engines.sglang.messages import list_body, raise_error_event, raise_refusal, read_answer
from relax_rollout.engines.sglang.transport import Transport

MOST_TOGETHER = 512
"""Requests in one call. More than an engine runs at once gain nothing by it, and a call is lost as a whole."""
MOST_TOKENS = 1 << 20
"""Prompt tokens in one call (some 7 MB of JSON), unless a single request has more."""


class WaveRefused(Exception):
    """The server refused a whole call, for one of its requests; nothing says for which, and none was answered."""


@dataclasses.dataclass(eq=False)
class _Asked:
    """One request: what is sent, and the pieces of its answer when it is whole."""

    body: dict[str, Any]
    answer: asyncio.Future[list[Mapping[str, Any]]]
    pieces: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Waves:
    """Gathers the requests of one client that start at the same time, and sends them."""

    def __init__(self, transport: Transport, *, timeout_s: float, abandon: Callable[[str], None]) -> None:
        """Stores where they go.

        Args:
            transport: to the server.
            timeout_s: longest time without a single response of a call.
            abandon: tells the server, without waiting, that nobody waits for the request of an id.
        """
        self._transport, self._timeout_s, self._abandon = transport, timeout_s, abandon
        self._waiting: list[_Asked] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, body: dict[str, Any]) -> list[Mapping[str, Any]]:
        """The pieces of one answer, which :class:`relax_rollout.engines.sglang.messages.ResponseBuilder` takes.

        Args:
            body: as of :func:`relax_rollout.engines.sglang.messages.generate_body`, without a stream.

        Raises:
            WaveRefused: send it again with :meth:`alone`, under another id.
            ValueError: the server refuses this request.
            RuntimeError: any other failure of this request; and the errors of
                :meth:`relax_rollout.engines.sglang.transport.Transport.call`.
        """
        loop = asyncio.get_running_loop()
        if self._waiting and self._waiting[0].answer.get_loop() is not loop:
            self._waiting = []  # of a loop that has ended
        asked = _Asked(body, loop.create_future())
        self._waiting.append(asked)
        if len(self._waiting) == 1:
            loop.call_soon(self._send_or_wait, 0)
        return await asked.answer

    async def alone(self, body: dict[str, Any]) -> list[Mapping[str, Any]]:
        """The answer to a request that is a call of its own; errors as of :meth:`ask`, without the first."""
        response = await self._transport.call("POST", "/generate", body=body, timeout_s=self._timeout_s, retry=False)
        return [read_answer(response.status_code, response.content, self._transport.name)]

    def close(self) -> None:
        """Ends what is being read; whoever waits for an answer gets a ``RuntimeError``."""
        for task in self._calls:
            if task.get_loop() is asyncio.get_running_loop():
                task.cancel()
        for asked in self._waiting:
            if asked.answer.get_loop() is asyncio.get_running_loop():
                asked.fail(self._closed())
        self._waiting.clear()

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"the client of {self._transport.name} was closed before the answer came")

    def _send_or_wait(self, before: int) -> None:
        """Sends what waits, once a turn of the event loop has brought nothing more."""
        if len(self._waiting) > before:
            asyncio.get_running_loop().call_soon(self._send_or_wait, len(self._waiting))
            return
        waiting = [asked for asked in self._waiting if not asked.answer.done()]
        self._waiting = []
        for wave in _cut(waiting):
            task = asyncio.get_running_loop().create_task(self._call(wave))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call(self, wave: Sequence[_Asked]) -> None:
        try:
            if len(wave) == 1:
                pieces = await self.alone(wave[0].body)
                if not wave[0].answer.done():
                    wave[0].answer.set_result(pieces)
            else:
                await self._stream(wave)
        except Exception as error:
            for asked in wave:
                asked.fail(error)
        finally:
            for asked in wave:
                asked.fail(self._closed())  # without effect for what is answered

    async def _stream(self, wave: Sequence[_Asked]) -> None:
        body, running = list_body([asked.body for asked in wave]), len(wave)
        async with self._transport.stream("/generate", body, timeout_s=self._timeout_s) as answer:
            if answer.status != 200:
                content = await answer.read()  # an engine that dies at this moment refuses nothing
                with _refusing():
                    read_answer(answer.status, content, self._transport.name)
            for asked in wave:
                # An abort that overtook the call was lost at the server, which would generate for nobody.
                if asked.answer.cancelled():
                    self._abandon(asked.body["rid"])
            async for piece in answer.events():
                with _refusing():
                    raise_error_event(piece, self._transport.name)
                running -= self._take(wave[piece["index"]], piece)
                if not running:
                    return
        raise RuntimeError(f"{self._transport.name} ended the answer to {len(wave)} requests before it was whole")

    def _take(self, asked: _Asked, piece: Mapping[str, Any]) -> bool:
        """Notes a piece; True when it was the last of its request."""
        asked.pieces.append(piece)
        reason = piece["meta_info"].get("finish_reason")
        if reason is not None and not asked.answer.done():  # else nobody waits for it any more
            try:
                raise_refusal(reason, self._transport.name)
            except (ValueError, RuntimeError) as error:
                asked.fail(error)
            else:
                asked.answer.set_result(asked.pieces)
        return reason is not None


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns a refusal into that of a whole call."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise WaveRefused(str(error)) from error


def _cut(waiting: Sequence[_Asked]) -> list[list[_Asked]]:
    """Requests of each call, in order."""
    calls: list[list[_Asked]] = []
    tokens = 0
    for asked in waiting:
        length = len(asked.body["input_ids"])
        if not calls or len(calls[-1]) == MOST_TOGETHER or tokens + length > MOST_TOKENS:
            calls.append([])
            tokens = 0
        calls[-1].append(asked)
        tokens += length
    return calls
