"""Requests that travel in one call: what ends them all, one of them, or none."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from relax_rollout.engines.sglang.inflight import InflightRequests
from relax_rollout.engines.sglang.transport import Transport
from relax_rollout.engines.sglang.waves import WaveRefused, Waves

SAMPLING = {"max_new_tokens": 4}


def client(answer: Callable[[httpx.Request], Any]) -> tuple[Transport, Waves]:
    transport = Transport("http://127.0.0.1:1", name="engine0")
    transport._http = httpx.AsyncClient(base_url=transport.url, transport=httpx.MockTransport(answer))
    transport._loop = asyncio.get_running_loop()
    inflight = InflightRequests(transport, silence_deadline_s=30.0)
    return transport, Waves(transport, timeout_s=30.0, abandon=inflight.abandon)


def body(rid: str) -> dict[str, Any]:
    return {"rid": rid, "input_ids": [5, 6], "extra_key": "0", "sampling_params": SAMPLING, "return_logprob": True}


def finished(index: int, text: str) -> bytes:
    piece = {"index": index, "text": text, "meta_info": {"finish_reason": {"type": "stop"}}}
    return b"data: " + json.dumps(piece, ensure_ascii=False).encode() + b"\n\n"


async def asked(waves: Waves, *rids: str) -> list[Any]:
    return await asyncio.gather(*(waves.ask(body(rid)) for rid in rids), return_exceptions=True)


async def test_a_line_ends_with_a_line_feed_alone() -> None:
    """SGLang writes the separators of lines that Unicode knows as they are, in pieces that end anywhere."""
    texts = ["a\u2028b", "c\u0085d\u2029", "e\u000b\u000c\u001cf"]
    stream = b"".join(finished(i, text) for i, text in enumerate(texts)) + b"data: [DONE]"

    async def pieces() -> AsyncIterator[bytes]:
        for i in range(0, len(stream), 7):
            yield stream[i : i + 7]

    transport, waves = client(lambda request: httpx.Response(200, content=pieces()))
    answers = await asked(waves, "s0", "s1", "s2")
    assert [answer[0]["text"] for answer in answers] == texts
    await transport.close()


@pytest.mark.parametrize("status", [400, 503])
async def test_a_call_that_is_refused_as_a_whole_is_sent_again_one_by_one(status: int) -> None:
    transport, waves = client(lambda request: httpx.Response(status, json={"error": {"message": "no"}}))
    assert [type(answer) for answer in await asked(waves, "s0", "s1")] == [WaveRefused] * 2
    await transport.close()


async def test_whoever_waits_for_a_client_that_is_closed_hears_of_it() -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        begun.set()
        await never.wait()
        raise AssertionError("not reached")

    transport, waves = client(answer)
    running = asyncio.create_task(asked(waves, "s0", "s1"))
    await begun.wait()
    waiting = asyncio.create_task(asked(waves, "s2"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waves.close()
    for answers in await asyncio.wait_for(asyncio.gather(running, waiting), 10):
        assert [str(a) for a in answers] == ["the client of engine0 was closed before the answer came"] * len(answers)
    await transport.close()


@pytest.mark.parametrize("lost", [False, True])
async def test_an_abort_that_overtakes_its_call_is_sent_again(lost: bool) -> None:
    """And the other request does not wait for it."""
    aborted, arrived, go = [], asyncio.Event(), asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/abort_request":
            aborted.append(json.loads(request.content)["rid"])
            if lost:
                await asyncio.Event().wait()
            return httpx.Response(200)
        arrived.set()
        await go.wait()
        return httpx.Response(200, content=finished(0, "a") + finished(1, "b"))

    transport, waves = client(answer)
    first, second = (asyncio.create_task(waves.ask(body(rid))) for rid in ("s0", "s1"))
    await arrived.wait()
    second.cancel()
    go.set()
    assert (await first)[0]["text"] == "a"
    await asyncio.sleep(0.01)
    assert aborted == ["s1"]
    await transport.close()
