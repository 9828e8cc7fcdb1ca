"""Many HTTP requests to one server at once, each at the same cost.

httpx keeps all connections in one pool, and looks at every one of them whenever a request begins or ends. With 512
requests at once, as a rollout has them, that alone takes seconds of CPU time (`benchmarks/http_requests.py`).
"""

import functools
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

MOST_IDLE = 512
"""Connections that are kept for later requests."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """Reads the machine's certificates, which takes tens of milliseconds: once a process."""
    return ssl.create_default_context()


class SingleConnections(httpx.AsyncBaseTransport):
    """A transport of httpx with a pool of its own for each connection; what was used last is used next.

    Requests are never held back: each finds an idle connection or gets a new one.

    Args:
        keepalive_expiry_s: a connection that was idle for longer is made anew.
    """

    def __init__(self, keepalive_expiry_s: float) -> None:
        self._limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=keepalive_expiry_s)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._busy: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Sends a request; errors are those of httpx."""
        connection = self._idle.pop() if self._idle else self._new()
        self._busy.add(connection)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._busy.discard(connection)
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream), "an async transport answers with such a body"
        response.stream = _Body(response.stream, lambda: self._give_back(connection))
        return response

    async def aclose(self) -> None:
        """Closes all connections."""
        connections, self._idle, self._busy = [*self._idle, *self._busy], [], set()
        for connection in connections:
            await connection.aclose()

    def _new(self) -> httpx.AsyncHTTPTransport:
        return httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False, limits=self._limits)

    async def _give_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        if connection not in self._busy:
            return  # given back before, or all were closed
        self._busy.discard(connection)
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            await connection.aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer, which gives its connection back when it is closed."""

    def __init__(self, body: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._body, self._give_back = body, give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            await self._give_back()
