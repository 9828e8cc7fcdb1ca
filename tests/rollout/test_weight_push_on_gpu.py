"""A push over CUDA IPC to another process: it reads what the trainer has, and never takes more than two buckets."""

import asyncio
import json
import multiprocessing
import pickle
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_rollout.weight_sync.transports import make_transport
from sglang_double import SGLangDouble

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BUCKETS = 6
SHAPES = ((3, 5), (1024, 8 << 10), (7,))
"""An odd number of elements first: the tensors after it lie at no multiple of anything but two bytes."""


def buckets() -> Iterator[Bucket]:
    size = sum(torch.Size(shape).numel() for shape in SHAPES)
    for i in range(BUCKETS):
        names = tuple(f"layer{i}.{k}" for k in range(len(SHAPES)))
        bucket = Bucket(names, SHAPES, "bfloat16", torch.empty(size, dtype=torch.bfloat16, device="cuda"))
        for k, (_, view) in enumerate(bucket.items()):
            view.fill_(10 * i + k)
        del view
        yield bucket
        del bucket  # the next but one lies in its memory: who reads it only then would see that one's values


def engine(refuses: int | None, queue: Any, stop: Any) -> None:
    """The process of an engine; puts its address, then what it read of each bucket."""
    from torch.multiprocessing import reductions

    rebuild: Any = reductions.rebuild_cuda_tensor
    gpus = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}

    def by_uuid(*arguments: Any) -> Any:
        return rebuild(*arguments[:6], gpus[arguments[6]], *arguments[7:])

    # As SGLang does in its own processes.
    reductions.rebuild_cuda_tensor = by_uuid
    read: list[Any] = []

    def load(number: int, body: bytes) -> None:
        (text,) = json.loads(body)["serialized_named_tensors"]
        payload = pickle.loads(b64decode(text))
        for meta in payload["metadata"]:
            tensor = payload["flattened_tensor"][meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
            read.append((meta.name, tuple(tensor.shape), str(tensor.dtype), *(float(t) for t in tensor.aminmax())))

    async def serve() -> None:
        async with SGLangDouble(on_update=load, refuses=refuses).serving() as server:
            queue.put(server.url)
            await asyncio.to_thread(stop.wait)
        queue.put(read)

    asyncio.run(serve())


def push(refuses: int | None = None) -> tuple[PushReport | None, list[Any], int]:
    """One push; its report (None when it failed), what the engine read, and the most bytes that it took here."""
    context = multiprocessing.get_context("spawn")
    queue, stop = context.Queue(), context.Event()
    process = context.Process(target=engine, args=(refuses, queue, stop))
    process.start()
    try:
        address = EngineAddress("engine0", queue.get(timeout=120))
        transport = make_transport([address], rank=0, world_size=1, device="cuda", gpus_per_engine=1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        report = None
        if refuses is None:
            report = transport.push(buckets(), 1)
        else:
            with pytest.raises(WeightPushFailed, match="no room for these weights"):
                transport.push(buckets(), 1)
        assert torch.cuda.memory_allocated() == before
        return report, queue_after(stop, queue), torch.cuda.max_memory_allocated() - before
    finally:
        stop.set()
        process.join(timeout=60)


def queue_after(stop: Any, queue: Any) -> list[Any]:
    stop.set()
    return queue.get(timeout=60)


def test_the_engine_reads_every_tensor_from_the_trainers_memory() -> None:
    report, read, peak = push()
    assert report is not None
    assert read == [
        (f"layer{i}.{k}", SHAPES[k], "torch.bfloat16", float(10 * i + k), float(10 * i + k))
        for i in range(BUCKETS)
        for k in range(len(SHAPES))
    ]
    size = report.bytes // BUCKETS
    # One is made while the engine reads the one before.
    assert 2 * size <= peak <= 2 * size + (1 << 20)


def test_a_failed_push_gives_all_memory_back() -> None:
    _, read, _ = push(refuses=3)
    assert len(read) in (4 * len(SHAPES), 5 * len(SHAPES)), "the next one may have been under way"
