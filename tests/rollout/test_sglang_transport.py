"""Which requests are sent again."""

import asyncio

import httpx
import pytest
from relax_rollout.engines.sglang.transport import Transport


def generate(errors: list[httpx.TransportError]) -> list[str]:
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
            await transport.call("POST", "/generate", body={}, retry=False)
        finally:
            await transport.close()

    asyncio.run(call())
    return asked


def test_a_request_that_was_never_sent_is_sent_again() -> None:
    """Hundreds of requests start together: the server's queue of connections may be full for a moment."""
    assert generate([httpx.ConnectTimeout("the queue is full")]).count("/generate") == 2


def test_a_request_that_may_have_arrived_is_not() -> None:
    with pytest.raises(ConnectionError, match="engine0 lives but the connection for /generate was lost"):
        generate([httpx.ReadError("reset")])
