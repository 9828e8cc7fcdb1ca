"""HTTP to one engine: deadlines, retries while it lives, and its last words when it does not."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import httpx

from relax_rollout.connections import SingleConnections
from relax_rollout.engines.base import EngineDied, EngineSilent
from relax_rollout.engines.sglang.log import last_words

_PROBE_TIMEOUT_S = 5.0
_VERDICT_DEADLINE_S = 15.0
_REFUSALS = 3
_ATTEMPTS = 4
CONNECT_TIMEOUT_S = 20.0


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows a server its key; none without a key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


class StreamedBody(Protocol):
    """A JSON body that is made while it is sent; it may be asked for its pieces several times."""

    def __len__(self) -> int:
        """Number of bytes."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Transport:
    """Requests to one server from any event loop."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        key: str | None = None,
        log_path: str | Path | None = None,
        alive: Callable[[], bool] | None = None,
    ) -> None:
        """Stores where the engine is; connects on first use.

        Args:
            url: ``http://host:port``.
            name: how messages call the engine.
            key: that its server asks for.
            log_path: its log, for its last words.
            alive: tells whether its process runs; without it a refused connection means that it does not.
        """
        self.url, self.name, self.log_path, self.alive = url.rstrip("/"), name, log_path, alive
        self._key = key
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def http(self) -> httpx.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop or self._http.is_closed:
            # The server drops idle connections after 5 s; dropping them earlier avoids the race with its close.
            pool = SingleConnections(3.0)
            self._http = httpx.AsyncClient(
                base_url=self.url, trust_env=False, transport=pool, headers=bearer(self._key)
            )
            self._loop = loop
        return self._http

    async def close(self) -> None:
        """Closes the connections of the running event loop."""
        if self._http is not None and self._loop is asyncio.get_running_loop():
            await self._http.aclose()
        self._http = self._loop = None

    # ------------------------------------------------------------------ requests

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        retry: bool = True,
    ) -> httpx.Response:
        """One request; any HTTP status is returned.

        Args:
            method: ``GET`` or ``POST``.
            path: ``/generate``, ...
            body: JSON value to send, or a :class:`StreamedBody`.
            params: query.
            timeout_s: longest time without an answer.
            retry: send again after a lost connection to a living server. A connection that never came about is always
                tried again: the request was not sent.

        Raises:
            EngineDied: the server's process is gone.
            EngineSilent: it did not answer in time, nor anything else that it was asked then.
            TimeoutError: it lives, but did not answer in time.
            ConnectionError: it lives, but the connection was lost again and again (or once, without ``retry``).
        """
        content, headers = _encoded(body)
        for attempt in range(_ATTEMPTS):
            try:
                return await self.http().request(
                    method,
                    path,
                    content=content,
                    params=params,
                    headers=headers,
                    timeout=self._timeout(timeout_s),
                )
            except Exception as error:
                again = retry or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                await self._judge(error, path, timeout_s, last=not again or attempt + 1 == _ATTEMPTS)
        raise AssertionError("the last attempt returns or raises")

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Any, *, timeout_s: float) -> AsyncIterator["StreamedAnswer"]:
        """One streamed POST, with the errors of :meth:`call` without ``retry``, also while it is read."""
        content, headers = _encoded(body)
        async with contextlib.AsyncExitStack() as stack:
            for attempt in range(_ATTEMPTS):
                opening = self.http().stream(
                    "POST", path, content=content, headers=headers, timeout=self._timeout(timeout_s)
                )
                try:
                    response = await stack.enter_async_context(opening)
                    break
                except Exception as error:
                    again = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                    await self._judge(error, path, timeout_s, last=not again or attempt + 1 == _ATTEMPTS)
            yield StreamedAnswer(response, lambda: self._listening(path, timeout_s))

    @contextlib.asynccontextmanager
    async def _listening(self, path: str, timeout_s: float) -> AsyncIterator[None]:
        """Judges what comes out of waiting for the server and is no answer."""
        try:
            yield
        except Exception as error:
            await self._judge(error, path, timeout_s, last=True)

    def _timeout(self, timeout_s: float) -> httpx.Timeout:
        return httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S), pool=None)

    async def _judge(self, error: Exception, path: str, timeout_s: float, *, last: bool) -> None:
        """Raises what a lost connection means; returns when the request should be sent again.

        Whatever comes out of a request and is no answer is a lost connection, not only the errors that httpx knows: a
        socket that the other side resets while it is being set up comes as an AttributeError of the layers below.
        """
        died, answers = await self._look()
        if died is not None:
            raise died from error
        if not answers and (last or isinstance(error, httpx.ReadTimeout)):
            raise EngineSilent(
                f"{self.name} ({self.url}) did not answer {path}, nor anything else for {_VERDICT_DEADLINE_S:.0f} s. "
                f"{last_words(self.log_path)}"
            ) from error
        if isinstance(error, httpx.ReadTimeout):
            raise TimeoutError(f"{self.name} lives but did not answer {path} within {timeout_s:.0f} s") from error
        if last:
            raise ConnectionError(f"{self.name} lives but the connection for {path} was lost: {error!r}") from error
        await asyncio.sleep(0.2)

    # ------------------------------------------------------------------ life and death

    def died(self) -> EngineDied:
        """The error for a server that is gone, with its last words."""
        return EngineDied(f"{self.name} ({self.url}) is gone. {last_words(self.log_path)}")

    async def probe(self) -> dict[str, Any] | None:
        """``/model_info`` of the server; None when it did not answer in a few seconds, or the connection was lost.

        Raises:
            httpx.ConnectError: nothing listens there.
        """
        try:
            response = await self.http().get("/model_info", timeout=_PROBE_TIMEOUT_S)
            return response.json() if response.status_code == 200 else None
        except httpx.ConnectError:
            raise
        except Exception:
            return None

    async def verdict(self) -> EngineDied | None:
        """After a lost connection: the error if the server is gone, None if it lives (or is only slow)."""
        return (await self._look())[0]

    async def _look(self) -> tuple[EngineDied | None, bool]:
        """The error if the server is gone; and whether it answers."""
        deadline, refused = time.monotonic() + _VERDICT_DEADLINE_S, 0
        while time.monotonic() < deadline:
            if self.alive is not None and not self.alive():
                return self.died(), False
            try:
                if await self.probe() is not None:
                    return None, True
            except httpx.ConnectError:
                refused += 1
                if refused >= _REFUSALS:
                    return self.died(), False
            await asyncio.sleep(0.3)
        return None, False


class StreamedAnswer:
    """The answer to a streamed request: its status, then its body in one piece or line by line."""

    def __init__(
        self, response: httpx.Response, listening: Callable[[], contextlib.AbstractAsyncContextManager[None]]
    ) -> None:
        """Takes an answer whose headers have come.

        Args:
            response: the open response.
            listening: surrounds each wait for the server and judges what goes wrong there.
        """
        self.status = response.status_code
        self._response, self._listening = response, listening

    async def read(self) -> bytes:
        """The whole body; errors of :meth:`Transport.call`."""
        async with self._listening():
            return await self._response.aread()
        raise AssertionError("a failed read raises")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of its server-sent events as they come; errors of :meth:`Transport.call`."""
        async for line in self.lines():
            data = line.removeprefix("data: ").strip()
            if data and data != "[DONE]":
                yield json.loads(data)

    async def lines(self) -> AsyncIterator[str]:
        """Its lines as they come; errors of :meth:`Transport.call`.

        A line ends with a line feed alone. httpx ends it at U+2028, U+0085 and others too, which SGLang writes as they
        are into the text of a response.
        """
        pieces, rest = self._response.aiter_bytes(), b""
        while True:
            piece: bytes | None = None
            async with self._listening():
                piece = await anext(pieces, None)
            *lines, rest = (rest + (piece or b"")).split(b"\n")
            for line in lines:
                yield line.decode()
            if piece is None:
                if rest:
                    yield rest.decode()
                return


def _encoded(body: Any) -> tuple[bytes | StreamedBody | None, dict[str, str]]:
    """Encodes a body; gives what to send and the headers that say so."""
    if body is None:
        return None, {}
    headers = {"content-type": "application/json"}
    if hasattr(body, "__aiter__"):
        return body, headers | {"content-length": str(len(body))}
    return json.dumps(body).encode(), headers
