"""Processes of a trainer that push weights, as functions that a fresh process finds by this module's name.

They are started anew, not forked: the process of the tests has threads by then (Ray's, gloo's, a server's readers), and
a copy of it may crash in whatever they held at that moment.
"""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.weight_sync.base import TransportSetup
from relax_rollout.weight_sync.group import GroupTransport
from relax_rollout.weight_sync.ranks import OneRank, TorchRanks
from relax_rollout.weight_sync.transports import make_transport
from tqdm import tqdm  # type: ignore[import-untyped]

BUCKET_BYTES = 30_000


def load(folder: Path, seed: int | None = None) -> Any:
    """The model, with other weights for each seed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def buckets_of(model: Any) -> Iterator[Bucket]:
    """The model's tensors in buckets, of which some are larger than the limit and alone.

    Each bucket begins with a tensor of 5 numbers that the engine does not know: what follows lies at an odd place.
    """
    tensors: list[tuple[str, torch.Tensor]] = []
    number = 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if tensors and sum(t.nbytes for _, t in tensors) + tensor.nbytes > BUCKET_BYTES:
            yield Bucket.of(tensors)
            tensors = []
        if not tensors and tensor.nbytes <= BUCKET_BYTES:
            number += 1
            tensors.append((f"odd{number}.weight", torch.full((1, 5), float(number))))
        tensors.append((name, tensor))
    yield Bucket.of(tensors)


def feed_and_stop(folder: Path, addresses: tuple[EngineAddress, ...], at_bucket_two: Any) -> None:
    """The only rank; it stops for good in bucket 2 of the push of version 9, and says so."""
    # A progress bar of transformers makes a lock of several processes, which stays when this one is killed.
    tqdm.set_lock(threading.RLock())
    model = load(folder, 8)
    setup = TransportSetup(engines=addresses, rank=0, world_size=1, gpus_per_engine=1, connect=SGLangEngine.at)

    def buckets() -> Iterator[Bucket]:
        for number, bucket in enumerate(buckets_of(model), 1):
            if number == 3:
                at_bucket_two.send(None)
                signal.pause()
            yield bucket

    GroupTransport(setup, OneRank(), [0, 0]).push(buckets(), 9)


def one_of_two(rank: int, port: int, folder: Path, addresses: tuple[EngineAddress, ...], queue: Any) -> None:
    """One of two ranks with two engines, and in the third push a third one that is not there."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    transport = make_transport(addresses, rank=rank, world_size=2, device="cpu", gpus_per_engine=1, name="group")
    assert isinstance(transport, GroupTransport)
    failed = []
    for version in (11, 12):
        report = transport.push(buckets_of(load(folder, version)), version)
        failed.append(dict(report.failed))
        if version == 11:
            dist.barrier()
            if rank == 0:
                queue.put("pushed")
    gone = (*addresses, EngineAddress("engine2", "http://127.0.0.1:1"))
    with_gone = make_transport(gone, rank=rank, world_size=2, device="cpu", gpus_per_engine=1, name="group")
    report = with_gone.push(buckets_of(load(folder, 13)), 13)
    failed.append(dict(report.failed))
    feeds = transport.feeds
    transport.close()
    with_gone.close()
    queue.put((rank, feeds, failed))
    dist.destroy_process_group()


def gather_and_agree(port: int, queue: Any) -> None:
    """Three ranks, of which the last has a fault to tell; forked here, so that one process imports torch for them."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_gather_and_agree, args=(rank, port, queue), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _gather_and_agree(rank: int, port: int, queue: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    # Tensor-parallel order 1, 0: not the order of the global ranks.
    ranks = TorchRanks([[1, 0]])
    gathered = ranks.gather(f"from {rank}")
    error = ranks.agree("rank 2 is unwell" if rank == 2 else None)
    # The engine has ranks 0 and 1: only what these say counts, and for each of them.
    ready = [ranks.all_of_engine(rank != late) for late in (0, 1, 2)]
    queue.put((rank, ranks.posts, ranks.shares_gpu, gathered, error, ready))
    dist.destroy_process_group()
