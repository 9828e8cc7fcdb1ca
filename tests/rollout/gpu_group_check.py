"""Checks and measures weight pushes over NCCL from a trainer on GPU 0 to an SGLang engine on the next ones.

    python tests/rollout/gpu_group_check.py [MODEL_FOLDER] [--tp 1] [--out FOLDER] [--bucket-mib 512 2048]

Without a folder it makes a Qwen3 of the shape of the 4 B model (4.02 B random parameters, bfloat16). Prints one line a
step and at the end a table: seconds of a push by bucket size, beside a plain copy of the same bytes from GPU to GPU in
the same run. Then the engine is stopped, and killed, in the middle of a push. Exits with 1 if a step fails.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relax_rollout.weight_sync.pair_group import set_nccl_environment

set_nccl_environment()

import psutil  # noqa: E402  # after what NCCL reads
import torch  # noqa: E402
from gpu_engine_check import Check, buckets  # type: ignore[import-not-found] # noqa: E402
from relax_data.weights import Bucket  # noqa: E402
from relax_rollout.engines.sglang.client import SGLangEngine  # noqa: E402
from relax_rollout.engines.sglang.server import SGLangServer  # noqa: E402
from relax_rollout.engines.sglang.settings import SGLangSettings  # noqa: E402
from relax_rollout.weight_sync.base import TransportSetup, WeightPushFailed  # noqa: E402
from relax_rollout.weight_sync.group import GroupTransport  # noqa: E402
from relax_rollout.weight_sync.ranks import OneRank  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))

from char_tokenizer import char_tokenizer  # noqa: E402

PUSHES = 7
GIB = 2**30


def make_model(folder: Path) -> Path:
    """Random weights in the shape of Qwen3-4B, and a tokenizer of single characters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    char_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda:0"):
        model: Any = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return folder


class FreeMemory:
    """Least free memory of a GPU while it watches: what the engine's process takes is seen from here."""

    def __init__(self, gpu: int) -> None:
        self._gpu, self._end = gpu, threading.Event()
        self.before = self.least = torch.cuda.mem_get_info(gpu)[0]
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._end.wait(0.001):
            self.least = min(self.least, torch.cuda.mem_get_info(self._gpu)[0])

    def __enter__(self) -> "FreeMemory":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()


def peer_copy_s(total: int, gpu: int) -> float:
    """Median seconds in which so many bytes are copied from GPU 0 to another."""
    size = min(total, GIB)
    source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    times = []
    for _ in range(PUSHES):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(gpu)
        begin, left = time.perf_counter(), total
        while left > 0:
            part = min(left, size)
            target[:part].copy_(source[:part], non_blocking=True)
            left -= part
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


class GroupCheck:
    def __init__(self, server: SGLangServer, check: Check) -> None:
        self.server, self.check, self.version = server, check, 0
        self.rows: list[str] = []

    def transport(self, deadline_s: float = 120.0) -> GroupTransport:
        address = self.server.address
        setup = TransportSetup(
            engines=(address,), rank=0, world_size=1, gpus_per_engine=1, connect=SGLangEngine.at, device="cuda"
        )
        return GroupTransport(setup, OneRank(), [0], deadline_s=deadline_s)

    async def measure(self, mib: int) -> None:
        model, transport, totals, sends = self.check.model, self.transport(), [], []
        torch.cuda.reset_peak_memory_stats(0)
        before = torch.cuda.memory_allocated(0)
        with FreeMemory(1) as engine_memory:
            for _ in range(PUSHES):
                self.check.disturb()
                self.check.before = None  # a copy of the model that is not needed here
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats(0)
                before = torch.cuda.memory_allocated(0)
                self.version += 1
                begin = time.perf_counter()
                report = await asyncio.to_thread(transport.push, buckets(model, mib << 20), self.version)
                totals.append(time.perf_counter() - begin)
                sends.append(report.seconds["send"])
        extra = torch.cuda.max_memory_allocated(0) - before
        left = torch.cuda.memory_allocated(0) - before
        engine_extra = engine_memory.before - engine_memory.least
        copy = peer_copy_s(report.bytes, 1)
        total, send = statistics.median(totals[1:]), statistics.median(sends[1:])
        largest = max(bucket.nbytes for bucket in buckets(model, mib << 20))
        good = not report.failed and extra <= 2 * largest + (64 << 20) and left == 0
        text = ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in report.seconds.items())
        self.check.say(
            f"pushes in buckets of {mib} MiB", good, f"{report.buckets} buckets; last: {text}; {left} bytes left"
        )
        await self.check.parity(f"parity after pushes in buckets of {mib} MiB", self.version)
        self.rows.append(
            f"{mib:6d} {report.bytes / 1e9:6.2f} {report.buckets:7d} {totals[0]:7.3f} {sends[0]:8.3f} {total:8.3f} "
            f"{send:7.3f} {min(sends[1:]):7.3f} {report.bytes / send / 1e9:7.0f} {copy:8.3f} {send / copy:6.2f} "
            f"{largest / GIB:8.2f} {extra / GIB:8.2f} {engine_extra / GIB:8.2f}"
        )
        await asyncio.to_thread(transport.close)

    def print_table(self) -> None:
        print(
            "bucket     GB buckets first s  of send  later s    send    best    GB/s   copy s  ratio  largest  trainer"
            "   engine\n"
            "   MiB                                   (median)                        (plain) to copy   GiB    +GiB"
            "     +GiB"
        )
        print("\n".join(self.rows), flush=True)

    async def failing(self, name: str, says: str, transport: GroupTransport, act: Callable[[], None], at: int) -> None:
        """Disturbs the engine before bucket ``at`` is made; the push has to say so and give its memory back."""
        before = torch.cuda.memory_allocated(0)

        def acting() -> Iterator[Bucket]:
            for number, bucket in enumerate(buckets(self.check.model, 512 << 20), 1):
                if number == at:
                    act()
                yield bucket
                del bucket

        self.version += 1
        begin, told = time.perf_counter(), "nothing"
        try:
            await asyncio.to_thread(transport.push, acting(), self.version)
        except WeightPushFailed as error:
            told = str(error)
        seconds, left = time.perf_counter() - begin, torch.cuda.memory_allocated(0) - before
        self.check.say(name, says in told and left == 0, f"{seconds:.1f} s; {left} bytes left; {told[:300]}")

    async def failures(self) -> None:
        main = psutil.Process(self.server.pid)
        tree = [main, *main.children(recursive=True)]

        def each(what: str) -> Callable[[], None]:
            def act() -> None:
                for process in reversed(tree):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        getattr(process, what)()

            return act

        transport = self.transport(deadline_s=5.0)
        self.version += 1
        await asyncio.to_thread(transport.push, buckets(self.check.model), self.version)
        await self.failing("an engine that is silent from bucket 2", "within 5 s", transport, each("suspend"), 3)
        each("resume")()
        fresh = self.transport(deadline_s=60.0)
        self.version += 1
        try:
            report = await asyncio.to_thread(fresh.push, buckets(self.check.model), self.version)
            print(f"     afterwards: {dict(report.failed) or 'a push in a new group reached it'}", flush=True)
        except WeightPushFailed as error:
            print(f"     afterwards the engine has to be started again: {error}", flush=True)
        await self.failing("an engine that is killed in bucket 2", "engine0", fresh, each("kill"), 3)
        probe = torch.ones(1 << 20, device="cuda:0").sum()
        self.check.say("the trainer's GPU works on", float(probe) == 1 << 20, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "relax-gpu-check")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[512, 2048])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.model or make_model(options.out / "model-4b")
    torch.cuda.empty_cache()
    server = SGLangServer(
        SGLangSettings(rollout_num_gpus_per_engine=options.tp, sglang_mem_fraction_static=0.5),
        model_path=folder,
        name="engine0",
        log_path=options.out / "engine0.log",
        device="cuda",
        tp_size=options.tp,
        gpu_ids=list(range(1, 1 + options.tp)),
        dtype="bfloat16",
    )
    begin = time.perf_counter()
    server.start(progress=print, deadline_s=400)
    print(f"healthy after {time.perf_counter() - begin:.0f} s", flush=True)
    try:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to("cuda:0").eval()
        for gpu in range(torch.cuda.device_count()):
            torch.ones(1, device=f"cuda:{gpu}")  # this process's own share of each GPU, before anything is measured
        engine = SGLangEngine(server.url, name="engine0", key=server.key, log_path=server.log_path, alive=server.alive)
        check = Check(server, engine, model, options.tp)
        groups = GroupCheck(server, check)

        async def run() -> None:
            for mib in options.bucket_mib:
                await groups.measure(mib)
            await engine.close()
            await groups.failures()

        asyncio.run(run())
        groups.print_table()
    finally:
        server.stop()
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
