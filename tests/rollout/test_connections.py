"""Connections of the engines' client: as many as requests, used again, and given back whatever happens."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from relax_rollout import connections
from relax_rollout.connections import SingleConnections


class Server:
    """Counts connections and requests that are open; answers a request when the test says so."""

    def __init__(self) -> None:
        self.made = self.open = 0
        self.arrived = asyncio.Semaphore(0)
        self.answers = asyncio.Semaphore(0)
        self.breaks_off = False
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        self.open += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.arrived.release()
                await self.answers.acquire()
                if self.breaks_off:
                    return
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, httpx.AsyncClient(base_url=url, transport=SingleConnections(60.0), timeout=60) as client:
            yield client


async def _ask(server: Server, client: httpx.AsyncClient, n: int) -> list[str]:
    """Sends ``n`` requests that are all open before the first is answered."""
    tasks = [asyncio.ensure_future(client.get("/")) for _ in range(n)]
    for _ in range(n):
        await server.arrived.acquire()
    for _ in range(n):
        server.answers.release()
    return [response.text for response in await asyncio.gather(*tasks)]


async def test_requests_are_open_together_and_their_connections_are_used_again() -> None:
    server = Server()
    async with server.client() as client:
        assert await _ask(server, client, 40) == ["done"] * 40
        assert server.made == 40
        assert await _ask(server, client, 40) == ["done"] * 40
        assert await _ask(server, client, 7) == ["done"] * 7
        assert server.made == 40


async def test_no_more_are_kept_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_IDLE", 3)
    server = Server()
    async with server.client() as client:
        await _ask(server, client, 8)
        await _ask(server, client, 8)
        assert server.made == 8 + 5


async def test_a_request_that_breaks_off_or_is_cancelled_leaves_no_connection() -> None:
    server = Server()
    async with server.client() as client:
        server.breaks_off = True
        with pytest.raises(httpx.RemoteProtocolError):
            await _ask(server, client, 1)
        server.breaks_off = False
        task = asyncio.ensure_future(client.get("/"))
        await server.arrived.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.answers.release()  # for the connection whose request nobody waits for any more
        while server.open:
            await asyncio.sleep(0.01)
        assert await _ask(server, client, 2) == ["done"] * 2
        assert server.made == 4


async def test_a_body_that_is_not_read_to_its_end_gives_the_connection_back() -> None:
    server = Server()
    async with server.client() as client:
        server.answers.release()
        async with client.stream("GET", "/") as response:
            assert response.status_code == 200
        await server.arrived.acquire()
        assert await _ask(server, client, 1) == ["done"]
