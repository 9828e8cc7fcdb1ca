"""Weight pushes to a real SGLang server: invariants 5 (two buckets, one version) and 6 (log-probabilities agree)."""

import asyncio
import json
import multiprocessing
import pickle
import weakref
from base64 import b64decode
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engine_gate import KEY, underway
from push_ranks import gather_and_agree
from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, IpcHandle, PauseMode, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.messages import generate_body
from relax_rollout.engines.sglang.transport import bearer
from relax_rollout.engines.sglang.weight_status import WeightsIncomplete
from relax_rollout.engines.sglang.weights import update_body
from relax_rollout.weight_sync import push
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_rollout.weight_sync.ipc import share
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.transports import make_transport
from relax_rollout.weight_sync.value import SendValues
from tiny_models import disturb

PROMPT = [10, 11, 12, 13, 14]
BUCKET_BYTES = 100_000


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def buckets_of(model: Any, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The model's own tensors in buckets; the tied output layer is not sent, as in a checkpoint."""
    sent = [(n, t) for n, t in model.state_dict().items() if n != "lm_head.weight"]
    return Bucket.split(sent, limit)


async def push_weights(
    engine: SGLangEngine,
    buckets: Iterable[Bucket],
    version: int,
    *,
    mode: PauseMode = "abort",
    keeps_cache: bool = False,
) -> PushReport:
    """From one process and by value, with a client of its own, in a thread without an event loop as the trainer has."""
    pusher = SGLangEngine(engine.url, key=KEY, name="engine0", keeps_cache=keeps_cache)
    send: Any = SendValues()
    return await asyncio.to_thread(push.push_weights, [pusher], buckets, version, send=send, ranks=OneRank(), mode=mode)


async def disagreement(engine: SGLangEngine, model: Any, version: int) -> float:
    """Largest difference of log-probabilities between the server and transformers, after a check of the version."""
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
    result = await engine.generate(GenerateRequest(rid="check", input_ids=PROMPT, sampling=sampling))
    assert set(result.versions) == {version}
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([PROMPT + result.tokens])).logits[0], -1)
    first = len(PROMPT) - 1
    return max(abs(float(expected[first + i, t]) - result.log_probs[i]) for i, t in enumerate(result.tokens))


# ---------------------------------------------------------------------- without a server


async def payload(bucket: Bucket, handles: list[IpcHandle] | None = None) -> list[dict[str, Any]]:
    """What each rank of the engine unpickles."""
    body = json.loads(b"".join([chunk async for chunk in update_body(bucket, handles)]))
    assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", False)
    return [pickle.loads(b64decode(text)) for text in body["serialized_named_tensors"]]


async def test_a_bucket_gives_the_tensors_back_by_value() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"a": torch.randn(3, 2), "b": torch.randn(4, 6)[:, ::2], "c": torch.tensor(2.5)}
        bucket = Bucket.of([(name, tensor.to(dtype)) for name, tensor in tensors.items()])
        (sent,) = await payload(bucket)
        for (name, tensor), meta in zip(bucket.items(), sent["metadata"], strict=True):
            assert meta.name == name
            assert meta.numel == meta.end_idx - meta.start_idx == tensor.nbytes
            got = sent["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            assert torch.equal(got, tensor)


async def test_handles_become_tensors_in_the_engine_and_name_the_gpu_by_its_uuid() -> None:
    handles = [IpcHandle(f"gpu-{i}", _rebuilt, (0, 1, 2, 3, 4, 5, i, 7)) for i in range(2)]
    first, second = await payload(Bucket.of([("a", torch.zeros(2))]), handles)
    assert first["flattened_tensor"] == (0, 1, 2, 3, 4, 5, "gpu-0", 7)
    assert second["flattened_tensor"] == (0, 1, 2, 3, 4, 5, "gpu-1", 7)
    assert [meta.name for meta in second["metadata"]] == ["a"]


def _rebuilt(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def test_memory_of_the_cpu_is_not_shared_by_handle() -> None:
    with pytest.raises(ValueError, match="only memory of a GPU can be shared by CUDA IPC, but the bucket lies on cpu"):
        share(torch.zeros(2))


def test_ranks_gather_in_tensor_parallel_order_and_share_errors() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=gather_and_agree, args=(port, queue))
    try:
        process.start()
        results = sorted(queue.get(timeout=120) for _ in range(3))
    finally:
        process.join(timeout=60)
        process.kill()
        process.join()
    assert results == [
        (0, False, True, None, "rank 2 is unwell", [False, False, True]),
        (1, True, True, ["from 1", "from 0"], "rank 2 is unwell", [False, False, True]),
        (2, False, False, None, "rank 2 is unwell", [True, True, False]),
    ]


# ---------------------------------------------------------------------- with the server


@pytest.fixture
async def engine(sglang_server: Any) -> AsyncIterator[SGLangEngine]:
    """The engine; afterwards it serves its start weights as version 0 again."""
    engine = SGLangEngine(sglang_server.url, key=KEY, name="engine0", log_path=sglang_server.log_path)
    yield engine
    sglang_server.gate.open()
    await engine.resume_memory()
    await push_weights(engine, buckets_of(load(sglang_server.model_path)), 0)
    await engine.close()


@pytest.mark.sglang
@pytest.mark.slow
async def test_log_probabilities_agree_after_one_and_after_five_pushes(engine: SGLangEngine, tiny_model: Path) -> None:
    model = load(tiny_model)
    for version in range(1, 6):
        disturb(model, version)
        report = await push_weights(engine, buckets_of(model), version)
        assert report.buckets > 1
        assert await disagreement(engine, model, version) < 1e-4
        assert await engine.weight_version() == version


@pytest.mark.sglang
@pytest.mark.slow
async def test_one_bucket_of_the_trainer_is_alive(engine: SGLangEngine, tiny_model: Path) -> None:
    model = load(tiny_model)
    alive: dict[int, int] = {}
    peak = 0

    def tracked() -> Iterator[Bucket]:
        nonlocal peak
        for number, bucket in enumerate(buckets_of(model)):
            storage = bucket.flat.untyped_storage()
            alive[number] = storage.nbytes()
            weakref.finalize(storage, alive.pop, number)
            peak = max(peak, sum(alive.values()))
            del storage
            yield bucket
            del bucket

    report = await push_weights(engine, tracked(), 1)
    largest = max(bucket.nbytes for bucket in buckets_of(model))
    assert report.bytes > 2.5 * largest, "the model must be larger than what the limit allows to be alive"
    # The other bucket is its copy in the request: tests/rollout/test_weight_push.py weighs it.
    assert peak == largest
    assert not alive


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_failed_push_is_never_served_and_a_whole_one_heals_it(
    engine: SGLangEngine, sglang_server: Any, tiny_model: Path
) -> None:
    model = load(tiny_model)
    disturb(model, 1)

    def failing() -> Iterator[Bucket]:
        yield from list(buckets_of(model))[:1]
        raise OSError("the second bucket is lost")

    elsewhere = SGLangEngine(sglang_server.url, key=KEY, name="engine0")
    with pytest.raises(WeightPushFailed, match=r"version 7 did not reach every engine.*second bucket is lost"):
        await push_weights(engine, failing(), 7)
    for client in (engine, elsewhere):
        with pytest.raises(WeightsIncomplete, match="push of version 7 failed midway"):
            await client.generate(GenerateRequest(rid="a", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=2)))
        with pytest.raises(WeightsIncomplete, match="version 7"):
            await client.weight_version()
        with pytest.raises(WeightsIncomplete, match="version 7"):
            await client.resume()
    await push_weights(engine, buckets_of(model), 8)
    assert await disagreement(elsewhere, model, 8) < 1e-4
    await elsewhere.close()


@pytest.mark.sglang
@pytest.mark.slow
async def test_no_weights_at_all_are_no_new_version(engine: SGLangEngine) -> None:
    with pytest.raises(WeightPushFailed, match="no weights were given"):
        await push_weights(engine, iter(()), 3)


@pytest.mark.sglang
@pytest.mark.slow
async def test_one_copy_for_each_tensor_parallel_rank(engine: SGLangEngine) -> None:
    handle = IpcHandle("gpu-0", _rebuilt, ())
    with pytest.raises(ValueError, match="engine0 has 1 tensor-parallel ranks but got 2"):
        await engine.load(Bucket.of([("a", torch.zeros(2))]), [handle, handle])


@pytest.mark.sglang
@pytest.mark.slow
async def test_the_transport_of_a_run_on_cpu(engine: SGLangEngine, sglang_server: Any, tiny_model: Path) -> None:
    model = load(tiny_model)
    disturb(model, 6)
    address = sglang_server.address
    transport = make_transport([address], rank=0, world_size=1, device="cpu", gpus_per_engine=1)
    # It is called by the trainer, which has no event loop.
    report = await asyncio.to_thread(transport.push, buckets_of(model), 6)
    transport.close()
    assert report.bytes == sum(bucket.nbytes for bucket in buckets_of(model))
    assert await disagreement(engine, model, 6) < 1e-4


@pytest.mark.sglang
@pytest.mark.slow
async def test_released_weights_need_a_push(engine: SGLangEngine, sglang_server: Any, tiny_model: Path) -> None:
    model = load(tiny_model)
    elsewhere = SGLangEngine(sglang_server.url, key=KEY, name="engine0")
    await engine.release_memory()
    await engine.release_memory(("weights",))
    for client in (engine, elsewhere):
        with pytest.raises(WeightsIncomplete, match="released"):
            await client.generate(GenerateRequest(rid="a", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=2)))
    await engine.resume_memory(("weights",))
    disturb(model, 3)
    await push_weights(engine, buckets_of(model), 4)
    await engine.resume_memory(("kv_cache",))
    assert await disagreement(engine, model, 4) < 1e-4
    await elsewhere.close()


@pytest.mark.sglang
@pytest.mark.slow
async def test_a_push_without_a_flush_does_not_mix_old_cache_with_new_weights(
    engine: SGLangEngine, tiny_model: Path
) -> None:
    model, prompt = load(tiny_model), [10 + i % 50 for i in range(200)]
    request = GenerateRequest(
        rid="p", input_ids=prompt, sampling=SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
    )

    async def off(tokens: list[int], log_probs: list[float]) -> float:
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :], -1)
        return max(abs(float(expected[i, t]) - log_probs[i]) for i, t in enumerate(tokens))

    await engine.generate(request)
    result = await engine.generate(request)
    assert result.cached_tokens == len(prompt) - 1, "the same prompt is in the cache"
    disturb(model, 4)
    # Only with "abort" the push empties the cache.
    await push_weights(engine, buckets_of(model), 1, mode="in_place")
    # The old key finds the old cache: the test would see a mixture.
    body = generate_body(request, "old-key", 0, stream=False)
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=300, headers=bearer(KEY)) as http:
        old = (await http.post("/generate", json=body)).json()["meta_info"]
    assert old["cached_tokens"] == len(prompt) - 1
    entries = old["output_token_logprobs"]
    assert await off([int(e[1]) for e in entries], [float(e[0]) for e in entries]) > 1e-3
    result = await engine.generate(request)
    assert (result.cached_tokens, set(result.versions)) == (0, {1})
    assert await off(result.tokens, result.log_probs) < 1e-4
    result = await engine.generate(request)
    assert result.cached_tokens == len(prompt) - 1, "responses of one version share their prompt"
    assert await off(result.tokens, result.log_probs) < 1e-4


@pytest.mark.sglang
@pytest.mark.slow
async def test_update_from_disk(engine: SGLangEngine, tiny_model: Path, tmp_path: Path) -> None:
    model = load(tiny_model)
    disturb(model, 2)
    model.save_pretrained(tmp_path / "new")
    await engine.update_weights_from_disk(tmp_path / "new", 5)
    assert await disagreement(engine, model, 5) < 1e-4
    with pytest.raises(RuntimeError, match="update_weights_from_disk failed"):
        await engine.update_weights_from_disk(tmp_path / "missing", 6)
    with pytest.raises(WeightsIncomplete, match="version 6"):
        await engine.weight_version()


@pytest.mark.sglang
@pytest.mark.slow
async def test_versions_of_tokens_when_weights_change_in_flight(
    engine: SGLangEngine, sglang_server: Any, tiny_model: Path
) -> None:
    model = load(tiny_model)
    disturb(model, 1)
    tracking = SGLangEngine(sglang_server.url, key=KEY, name="engine0", track_versions_in_flight=True)
    sampling = SamplingParams(max_new_tokens=600, ignore_eos=True)
    sglang_server.gate.close()
    tracked = asyncio.create_task(tracking.generate(GenerateRequest(rid="t", input_ids=PROMPT, sampling=sampling)))
    untracked = asyncio.create_task(engine.generate(GenerateRequest(rid="u", input_ids=PROMPT, sampling=sampling)))
    await underway(engine.url, 2)
    await push_weights(engine, buckets_of(model), 1, mode="in_place")
    sglang_server.gate.open()
    result = await asyncio.wait_for(tracked, 120)
    assert len(result.tokens) == 600
    assert set(result.versions) == {0, 1}
    assert result.versions == sorted(result.versions)
    with pytest.raises(RuntimeError, match="weights changed from version 0 to 1 while request u"):
        await asyncio.wait_for(untracked, 120)
    await tracking.close()


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("keeps_cache", [True, False])
async def test_an_interrupted_response_goes_on_from_what_it_has_computed(
    engine: SGLangEngine, sglang_server: Any, tiny_model: Path, keeps_cache: bool
) -> None:
    model, prompt = load(tiny_model), [10 + i % 50 for i in range(200)]
    sampling = SamplingParams(max_new_tokens=100, temperature=0.0, ignore_eos=True)
    sglang_server.gate.close()
    running = asyncio.create_task(engine.generate(GenerateRequest(rid="k", input_ids=prompt, sampling=sampling)))
    await underway(engine.url, 1)
    disturb(model, 4)
    await push_weights(engine, buckets_of(model), 1, keeps_cache=keeps_cache)
    sglang_server.gate.open()
    first = await running
    assert first.finish_reason == "abort"
    assert 0 < len(first.tokens) < 100
    ids = [*prompt, *first.tokens]
    short = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)

    async def off(version: int | None) -> tuple[int, float]:
        """Tokens that the engine had already, and how far its log-probs are from those of the new weights."""
        request = GenerateRequest(rid=f"k{version}", input_ids=ids, sampling=short, cache_version=version)
        result = await engine.generate(request)
        assert set(result.versions) == {1}
        with torch.no_grad():
            logits = model(torch.tensor([ids + result.tokens])).logits[0, len(ids) - 1 :]
        expected = torch.log_softmax(logits, -1)
        return result.cached_tokens, max(
            abs(float(expected[i, t]) - p) for i, (t, p) in enumerate(zip(result.tokens, result.log_probs, strict=True))
        )

    cached, apart = await off(0)
    if keeps_cache:
        assert cached == len(ids) - 1, "the last token was sampled and not yet put in"
        assert apart > 1e-3, "a mixture of old and new weights"
    else:
        assert (cached, apart < 1e-4) == (0, True)
    cached, apart = await off(None)
    assert (cached, apart < 1e-4) == (0, True), "others find nothing of it"
