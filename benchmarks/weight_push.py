"""Weight pushes to one SGLang server: seconds and their parts, way by way on a CPU, by bucket size on a GPU.

    python benchmarks/weight_push.py [--shape 60m] [--bucket-mib 32] [--pushes 5] [--folder FOLDER]        # on a CPU
    python benchmarks/weight_push.py --device cuda [--shape 4b] [--bucket-mib 512 2048] [--trainer]         # on a GPU

A server starts with a Qwen3 of that shape, and this process pushes random weights to it: by value, over gloo and over
files on a CPU; over CUDA IPC on one GPU that both use, as colocate runs do. A line for each way and bucket size gives
the median push and its parts: ``begin`` until the first bucket is sent, ``make`` all buckets, ``send`` until all are
loaded (the making of all but the first is beside it), ``end``. They are set against a plain copy of the same bytes on
the same device, in the same run. The line "in turn" is without overlap: a bucket is made when the one before is loaded.
Then it times what a call costs that brings next to nothing, and one that brings a whole bucket alone. With
``--trainer`` the buckets are those of the trainer's own model.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from random_qwen3 import SHAPES, config_folder
from relax_data.weights import Bucket
from relax_rollout.engines.base import updating
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.weight_sync.base import WeightTransport
from relax_rollout.weight_sync.ipc import IpcTransport, share
from relax_rollout.weight_sync.transports import make_transport

WAYS = {"cpu": ("value", "group", "disk"), "cuda": ("ipc",)}
PARTS = ("begin", "make", "send", "end")
CALLS = 10

Make = Callable[[int], Iterator[Bucket]]
"""Buckets of at most so many bytes."""


def plain_model(folder: Path, device: str, dtype: str) -> Make:
    """Buckets of the tensors of a random model of transformers; on a CPU it is written as a checkpoint too."""
    from transformers import AutoConfig, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(AutoConfig.from_pretrained(folder))
    torch.set_default_dtype(torch.float32)
    if device == "cpu":
        model.save_pretrained(folder)
    sent = [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
    return lambda limit: Bucket.split(sent, limit)


def trainer_model(folder: Path) -> Make:
    """Buckets that the trainer's model exports, on one rank."""
    from relax_train import settings as s
    from relax_train.backend.parallel import setup_parallel
    from relax_train.models.build import build_model
    from relax_train.models.export import weight_buckets

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29876")
    settings = s.TrainSettings(model=s.ModelSettings(hf_checkpoint=str(folder), bf16=True))
    model = build_model(settings, setup_parallel(settings.parallel))
    with torch.no_grad():
        for parameter in model.gpt[0].parameters():
            parameter.fill_(0.01)
    return lambda limit: weight_buckets(model, limit)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def plain_copy_s(total: int, device: str) -> float:
    """Median seconds of copying so many bytes on the device, 512 MiB at a time."""
    size = min(total, 512 << 20)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(CALLS):
        synchronize(device)
        begin, left = time.perf_counter(), total
        while left > 0:
            target[:left].copy_(source[:left])
            left -= size
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(name: str, transport: WeightTransport, buckets: Callable[[], Iterable[Bucket]], args: Any) -> None:
    """Prints the line of one way and bucket size."""
    times: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for version in range(1, args.pushes + 2):
        synchronize(args.device)
        begin = time.perf_counter()
        report = transport.push(buckets(), version)
        times.append(time.perf_counter() - begin)
        for part in PARTS:
            parts[part].append(report.seconds.get(part, float("nan")))
    transport.close()
    whole, copy = statistics.median(times[1:]), plain_copy_s(report.bytes, args.device)
    cells = " ".join(f"{statistics.median(parts[part][1:]):6.3f}" for part in PARTS)
    print(
        f"{name:14s} {report.bytes / 1e9:6.2f} {report.buckets:7d} {times[0]:7.3f} {whole:7.3f} {min(times[1:]):7.3f} "
        f"{cells} {copy:8.4f} {whole / copy:7.1f}",
        flush=True,
    )


async def median_ms(calls: int, act: Callable[[], Awaitable[Any]]) -> float:
    """Median milliseconds of a call, after a first one."""
    times = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        await act()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[1:])


async def calls(server: SGLangServer, make: Make, args: Any) -> None:
    """Prints what single calls take: those of begin and end, and of buckets one at a time and two at a time."""
    engine = SGLangEngine.at(server.address)

    async def load(bucket: Bucket) -> None:
        await engine.load(bucket, [share(bucket.flat)] if args.device == "cuda" else None)

    async def two(bucket: Bucket) -> None:
        await asyncio.gather(*(load(bucket) for _ in range(2)))

    whole = next(make(args.bucket_mib[0] << 20))
    least = min(whole.items(), key=lambda item: item[1].numel())
    small = Bucket.of([least])
    async with updating(engine, 1000):
        found = {
            "flush": await median_ms(CALLS, engine.flush_cache),
            "state": await median_ms(CALLS, engine.weights),
            f"load of {small.nbytes} bytes": await median_ms(CALLS, lambda: load(small)),
            "two at once": await median_ms(CALLS, lambda: two(small)),
            f"load of {len(whole)} tensors, {whole.nbytes / 2**20:.0f} MiB": await median_ms(
                CALLS, lambda: load(whole)
            ),
        }
        if args.device == "cuda":
            found["two of them at once"] = await median_ms(CALLS, lambda: two(whole))
    await engine.close()
    print("calls, ms: " + "; ".join(f"{name} {ms:.1f}" for name, ms in found.items()), flush=True)


def run(server: SGLangServer, make: Make, args: Any, folder: Path) -> None:
    copied = "device" if args.device == "cuda" else "host"
    print(
        f"{'way':14s} {'GB':>6s} buckets first s  push s  best s  begin   make   send    end   copy s  x copy\n"
        f"{'':14s} {'':6s} {'':7s} {'':7s} (median of {args.pushes}; parts too)          (a plain copy, {copied})",
        flush=True,
    )
    for mib in args.bucket_mib:
        for way in WAYS[args.device]:
            transport = make_transport(
                [server.address], rank=0, world_size=1, device=args.device, gpus_per_engine=1, name=way, folder=folder
            )
            measure(f"{way} {mib} MiB", transport, lambda mib=mib: make(mib << 20), args)  # type: ignore[misc]
            if isinstance(transport, IpcTransport):
                # Without overlap: a bucket is made when the one before is loaded.
                transport._send.ahead = 0  # type: ignore[misc]
                measure("  in turn", transport, lambda mib=mib: make(mib << 20), args)  # type: ignore[misc]
    asyncio.run(calls(server, make, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(WAYS), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="default: 60m on a CPU, 4b on a GPU")
    parser.add_argument("--bucket-mib", type=int, nargs="+", help="default: 32 on a CPU, 512 and 2048 on a GPU")
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--mem-fraction", type=float, default=0.5, help="of the memory, for the server")
    parser.add_argument("--trainer", action="store_true", help="take the trainer's model")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    if args.trainer and not cuda:
        parser.error("--trainer needs --device cuda")
    args.shape = args.shape or ("4b" if cuda else "60m")
    args.bucket_mib = args.bucket_mib or ([512, 2048] if cuda else [32])
    dtype = "bfloat16" if cuda else "float32"
    with tempfile.TemporaryDirectory(prefix="relax-benchmark-") as place:
        folder = config_folder(Path(place) / "model", args.shape, dtype=dtype, positions=8192)
        make = trainer_model(folder) if args.trainer else plain_model(folder, args.device, dtype)
        server = SGLangServer(
            SGLangSettings(sglang_mem_fraction_static=args.mem_fraction),
            model_path=folder,
            name="engine0",
            log_path=Path(place) / "engine0.log",
            device=args.device,
            dtype=dtype,
            enable_memory_saver=cuda,
            # The weights that it starts with are never asked for; over files it reads with the loader that it has.
            extra={"skip-tokenizer-init": True, "load-format": "dummy" if cuda else "auto"},
        )
        begin = time.perf_counter()
        server.start(deadline_s=400)
        print(f"{args.shape} on {args.device}: server ready after {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            run(server, make, args, args.folder or Path(place) / "weights")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
