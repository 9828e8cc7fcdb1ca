"""The client against a real SGLang server: exact tokens and log-probabilities, abort, pause, memory, profile."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_gate import KEY, Gate, underway
from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.transport import Transport

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = [10, 11, 12, 13, 14]
LONG = SamplingParams(max_new_tokens=1500, ignore_eos=True)


@pytest.fixture
async def engine(sglang_server: Any) -> AsyncIterator[SGLangEngine]:
    """The engine; afterwards it runs nothing and is not paused, whatever the test did."""
    engine = SGLangEngine(
        sglang_server.url, key=KEY, name="engine0", log_path=sglang_server.log_path, generate_timeout_s=400
    )
    yield engine
    sglang_server.gate.open()
    await engine.pause("abort")
    await engine.resume()
    await engine.close()


@pytest.fixture
def gate(sglang_server: Any) -> Iterator[Gate]:
    """Closed for the test: what it sends stays in flight until it opens the gate or ends the request."""
    sglang_server.gate.close()
    yield sglang_server.gate
    sglang_server.gate.open()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def request(rid: str, n: int = 12, *, prompt: list[int] = PROMPT, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=prompt, sampling=SamplingParams(max_new_tokens=n, **sampling))


def error_of(model: Any, result: GenerateResult, temperature: float = 1.0, prompt: list[int] = PROMPT) -> float:
    """Largest difference to the log-probabilities that transformers computes for the same tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + result.tokens])).logits[0] / temperature
    expected = torch.log_softmax(logits, -1)
    first = len(prompt) - 1
    return max(abs(float(expected[first + i, t]) - result.log_probs[i]) for i, t in enumerate(result.tokens))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probabilities_are_those_of_the_tempered_model(
    engine: SGLangEngine, model: Any, temperature: float
) -> None:
    result = await engine.generate(request("a", 20, temperature=temperature, ignore_eos=True))
    assert result.finish_reason == "length"
    assert len(result.tokens) == len(result.log_probs) == len(result.versions) == 20
    assert error_of(model, result, temperature) < 1e-4


async def test_greedy_tokens_are_those_of_transformers(engine: SGLangEngine, model: Any) -> None:
    result = await engine.generate(request("a", 10, temperature=0.0, ignore_eos=True))
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(10):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert result.tokens == tokens[len(PROMPT) :]


async def test_a_stop_token_ends_the_response_and_is_part_of_it(engine: SGLangEngine) -> None:
    free = await engine.generate(request("a", 10, temperature=0.0, ignore_eos=True))
    stop = free.tokens[3]
    result = await engine.generate(request("b", 10, temperature=0.0, stop_token_ids=(stop,)))
    assert result.finish_reason == "stop"
    assert result.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def test_streamed_and_whole_answers_agree(engine: SGLangEngine, sglang_server: Any, model: Any) -> None:
    stream = SGLangEngine(sglang_server.url, key=KEY, name="engine0", track_versions_in_flight=True)
    whole = await engine.generate(request("a", 15, temperature=0.0, ignore_eos=True))
    streamed = await stream.generate(request("a", 15, temperature=0.0, ignore_eos=True))
    await stream.close()
    assert streamed.tokens == whole.tokens
    assert streamed.versions == whole.versions
    assert error_of(model, streamed) < 1e-4


async def test_an_abort_returns_what_there_is_and_spares_ids_that_begin_alike(
    engine: SGLangEngine, gate: Gate, model: Any
) -> None:
    one = asyncio.create_task(engine.generate(GenerateRequest(rid="s1", input_ids=PROMPT, sampling=LONG)))
    ten = asyncio.create_task(engine.generate(GenerateRequest(rid="s10", input_ids=PROMPT, sampling=LONG)))
    await underway(engine.url, 2)
    await engine.abort("s1")
    result = await asyncio.wait_for(one, 60)
    assert result.finish_reason == "abort"
    assert not ten.done()
    await underway(engine.url, 1)
    await engine.abort()
    other = await asyncio.wait_for(ten, 60)
    assert other.finish_reason == "abort"
    assert 0 < len(other.tokens) < 1500
    assert error_of(model, other) < 1e-4


async def test_an_abort_that_comes_with_the_request_is_not_lost(engine: SGLangEngine, gate: Gate) -> None:
    task = asyncio.create_task(engine.generate(GenerateRequest(rid="early", input_ids=PROMPT, sampling=LONG)))
    await asyncio.sleep(0)
    await engine.abort("early")
    result = await asyncio.wait_for(task, 60)
    assert result.finish_reason == "abort"
    assert len(result.tokens) < 1500


async def test_a_continued_sequence_goes_on_where_it_was(engine: SGLangEngine, model: Any) -> None:
    first = await engine.generate(request("a", 6, ignore_eos=True))
    longer = PROMPT + first.tokens
    second = await engine.generate(request("b", 6, prompt=longer, ignore_eos=True))
    assert error_of(model, second, prompt=longer) < 1e-4


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pause_holds_requests_and_resume_finishes_them(
    engine: SGLangEngine, gate: Gate, model: Any, mode: Any
) -> None:
    task = asyncio.create_task(engine.generate(request("a", 300, ignore_eos=True)))
    await underway(engine.url, 1)
    await engine.pause(mode)
    await engine.server_info()  # its scheduler answers in order: when this is there, it has paused
    gate.open()
    late = asyncio.create_task(engine.generate(request("b", 3, ignore_eos=True)))
    for _ in range(3):
        await engine.server_info()
    assert not task.done()
    assert not late.done()
    await engine.resume()
    result = await asyncio.wait_for(task, 120)
    assert len(result.tokens) == 300
    assert error_of(model, result) < 1e-4
    assert len((await asyncio.wait_for(late, 60)).tokens) == 3


async def test_pause_that_aborts_leaves_the_engine_idle(engine: SGLangEngine, gate: Gate) -> None:
    tasks = [
        asyncio.create_task(engine.generate(GenerateRequest(rid=f"r{i}", input_ids=PROMPT, sampling=LONG)))
        for i in range(4)
    ]
    await underway(engine.url, 4)
    await engine.pause("abort")
    results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert {r.finish_reason for r in results} == {"abort"}
    await engine.flush_cache()
    await engine.resume()


async def test_flush_says_what_it_waits_for(engine: SGLangEngine, sglang_server: Any, gate: Gate) -> None:
    hurried = SGLangEngine(sglang_server.url, key=KEY, name="engine0", control_timeout_s=2.0)
    task = asyncio.create_task(engine.generate(GenerateRequest(rid="a", input_ids=PROMPT, sampling=LONG)))
    await underway(engine.url, 1)
    with pytest.raises(
        TimeoutError, match=r"engine0: requests were still running after 2 s|did not answer /flush_cache"
    ):
        await hurried.flush_cache()
    assert not task.done()
    task.cancel()
    await hurried.close()


async def test_a_response_that_takes_too_long_is_ended(engine: SGLangEngine, sglang_server: Any, gate: Gate) -> None:
    hurried = SGLangEngine(sglang_server.url, key=KEY, name="engine0", generate_timeout_s=2.0)
    with pytest.raises(TimeoutError, match=r"request slow was not finished after 2 s|did not answer /generate"):
        await hurried.generate(GenerateRequest(rid="slow", input_ids=PROMPT, sampling=LONG))
    # It ends at the server too: nothing runs there any more, although 1500 tokens take minutes with the gate closed.
    await engine.flush_cache()
    await hurried.close()


async def test_bad_requests_name_the_reason(engine: SGLangEngine) -> None:
    with pytest.raises(ValueError, match=r"engine0 refused a request .*longer than the model's context length"):
        await engine.generate(request("a", 5, prompt=[10] * 3000))
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        await engine.generate(request("a", 0))
    task = asyncio.create_task(engine.generate(request("twice", 5)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="request id twice is in use"):
        await engine.generate(request("twice", 5))
    await task


async def test_versions_and_server_info(engine: SGLangEngine) -> None:
    version = await engine.weight_version()
    result = await engine.generate(request("a", 5, ignore_eos=True))
    assert result.versions == [version] * 5
    info = await engine.server_info()
    assert info["version"] == "0.5.17"


async def test_profile_writes_a_trace(engine: SGLangEngine, tmp_path: Path) -> None:
    await engine.start_profile(output_dir=str(tmp_path), activities=["CPU"], profile_id="p")
    await engine.generate(request("a", 4, ignore_eos=True))
    await engine.stop_profile()
    assert [f.name for f in tmp_path.rglob("*.trace.json.gz")] == ["p-TP-0.trace.json.gz"]


async def test_many_requests_at_once(engine: SGLangEngine, model: Any) -> None:
    results = await asyncio.gather(*(engine.generate(request(f"r{i}", 8, ignore_eos=True)) for i in range(40)))
    assert all(math.isfinite(p) for r in results for p in r.log_probs)
    assert max(error_of(model, r) for r in results) < 1e-4


async def test_requests_that_start_together_are_one_call_and_end_each_for_itself(
    engine: SGLangEngine, gate: Gate, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    stream = Transport.stream

    def counted(self: Transport, path: str, body: Any, *, timeout_s: float) -> Any:
        calls.append(len(body["rid"]))
        return stream(self, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(Transport, "stream", counted)
    short = [asyncio.create_task(engine.generate(request(f"s{i}", 2 + i % 2, ignore_eos=True))) for i in range(6)]
    long = [
        asyncio.create_task(engine.generate(GenerateRequest(rid=name, input_ids=PROMPT, sampling=LONG)))
        for name in ("kept", "aborted", "cancelled")
    ]
    results = await asyncio.wait_for(asyncio.gather(*short), 120)
    assert calls == [9]
    assert not any(task.done() for task in long)
    assert [len(r.tokens) for r in results] == [2, 3] * 3
    await engine.abort("aborted")
    long[2].cancel()
    aborted = await asyncio.wait_for(long[1], 60)
    assert aborted.finish_reason == "abort"
    assert max(error_of(model, r) for r in [*results, aborted]) < 1e-4
    assert not long[0].done()
    await engine.abort("kept")
    assert (await asyncio.wait_for(long[0], 60)).finish_reason == "abort"
    await engine.flush_cache()  # the cancelled one, which would take minutes, ended at the server too


async def test_long_responses_that_start_together_come_in_pieces(engine: SGLangEngine, model: Any) -> None:
    asked = [request(f"piece-{i}", n, ignore_eos=True) for i, n in enumerate((513, 600, 12))]
    answers = engine._waves.ask
    pieces: dict[str, int] = {}

    async def ask(body: dict[str, Any]) -> Any:
        got = await answers(body)
        pieces[body["rid"].partition("piece-")[2][:1]] = len(got)
        return got

    engine._waves.ask = ask  # type: ignore[method-assign]
    results = await asyncio.gather(*(engine.generate(r) for r in asked))
    # After the first token, 257 and 513 of them, and at the end; a short one is not worth that.
    assert pieces == {"0": 3, "1": 4, "2": 1}
    for wanted, result in zip((513, 600, 12), results, strict=True):
        assert len(result.tokens) == len(result.versions) == wanted
        assert error_of(model, result) < 1e-4


async def test_a_refused_request_spares_those_that_start_with_it(engine: SGLangEngine, model: Any) -> None:
    prompts = [PROMPT, [10] * 3000, PROMPT, []]
    tasks = [engine.generate(request(f"r{i}", 4, prompt=p, ignore_eos=True)) for i, p in enumerate(prompts)]
    good, long, other, empty = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(long, ValueError)
    assert "longer than the model's context length" in str(long)
    assert isinstance(empty, ValueError)
    for result in (good, other):
        assert isinstance(result, GenerateResult)
        assert len(result.tokens) == 4
        assert error_of(model, result) < 1e-4
