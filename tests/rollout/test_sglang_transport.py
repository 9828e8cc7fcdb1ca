"""What a lost connection means, and which requests are sent again."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from relax_rollout.engines.base import EngineDied
from relax_rollout.engines.sglang.transport import Transport

RESET = AttributeError("'NoneType' object has no attribute 'getpeername'")
"""What the layers below httpx raise when the other side goes while the socket is being set up."""


def generate(errors: list[Exception], *, retry: bool = False) -> list[str]:
    """Posts one ``/generate`` to a living server whose first answers are these errors; the paths it was asked."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/generate" and errors:
            raise errors.pop(0)
        return httpx.Response(200, json={"weight_version": "0"})

    async def call() -> None:
        transport = Transport("http://127.0.0.1:1", name="engine0")
        transport._http = httpx.AsyncClient(base_url=transport.url, transport=httpx.MockTransport(answer))
        transport._loop = asyncio.get_running_loop()
        try:
            await transport.call("POST", "/generate", body={}, retry=retry)
        finally:
            await transport.close()

    asyncio.run(call())
    return asked


def test_a_request_that_was_never_sent_is_sent_again() -> None:
    """Hundreds of requests start together: the server's queue of connections may be full for a moment."""
    assert generate([httpx.ConnectTimeout("the queue is full")]).count("/generate") == 2


def test_a_request_that_may_have_arrived_is_not() -> None:
    with pytest.raises(ConnectionError, match=r"engine0 lives but the connection for /generate was lost"):
        generate([httpx.ReadError("reset")])


def test_an_error_that_the_http_library_does_not_know_is_a_lost_connection() -> None:
    assert generate([RESET], retry=True).count("/generate") == 2
    with pytest.raises(ConnectionError, match=r"engine0 lives but .* was lost: AttributeError"):
        generate([RESET])


async def test_an_engine_that_dies_while_it_is_connected_to_is_dead() -> None:
    alive = itertools.chain([True], itertools.repeat(False))

    def reset(request: httpx.Request) -> httpx.Response:
        raise RESET

    transport = faulty(reset, alive=lambda: next(alive))
    for attempt in (transport.call("GET", "/model_info"), read_stream(transport)):
        with pytest.raises(EngineDied, match=r"engine0 \(.*\) is gone"):
            await attempt
    await transport.close()


@pytest.mark.parametrize("fault", [RESET, httpx.ReadError("reset")], ids=["unknown", "known"])
async def test_a_stream_that_breaks_off_is_judged_too(fault: Exception) -> None:
    async def lines() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise fault

    transport = faulty(lambda request: httpx.Response(200, content=lines()), alive=lambda: False)
    with pytest.raises(EngineDied):
        await read_stream(transport)
    await transport.close()


async def test_an_error_of_who_reads_a_stream_stays_what_it_is() -> None:
    transport = faulty(lambda request: httpx.Response(200, content=b"data: 1\n\n"), alive=lambda: False)

    def fail(line: str) -> str:
        raise KeyError("tokens")

    with pytest.raises(KeyError, match="tokens"):
        await read_stream(transport, fail)
    await transport.close()


async def test_a_real_server_that_closes_every_connection_at_once() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    transport = Transport(f"http://127.0.0.1:{port}", name="engine0", alive=lambda: False)
    try:
        for attempt in (transport.call("GET", "/model_info"), read_stream(transport)):
            with pytest.raises(EngineDied):
                await attempt
    finally:
        await transport.close()
        server.close()


def faulty(answer: Callable[[httpx.Request], httpx.Response], *, alive: Callable[[], bool]) -> Transport:
    """A transport of the running event loop whose requests are answered by a function."""
    transport = Transport("http://127.0.0.1:1", name="engine0", alive=alive)
    transport._http = httpx.AsyncClient(base_url=transport.url, transport=httpx.MockTransport(answer))
    transport._loop = asyncio.get_running_loop()
    return transport


async def read_stream(transport: Transport, reader: Callable[[str], str] = str) -> list[str]:
    async with transport.stream("/generate", {}, timeout_s=5) as answer:
        return [reader(line) async for line in answer.lines()]
