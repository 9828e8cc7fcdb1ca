"""Seconds of the switch between engine and trainer on one GPU, against a plain pinned copy of all that sleeps.

    python benchmarks/colocate_switch.py [--shape 4b|0.6b] [--tokens 16384] [--stay 0 1] [--rounds 3]

A model of random weights with its optimizer trains on random rows; after each step its weights are walked through as a
push does, and then it sleeps and wakes. ``begin`` is what the host needs to ask for the copies out, at the end of the
step. What is visible of the switch is what a run waits for: ``sleep`` behind the push, ``wake`` until the weights may
be used, and what a step takes longer because its optimizer still comes back. All that is set against the copy of
weights and optimizer out and in, whole, with nothing beside it, in the same process. It also checks that they are the
same, bit for bit, and that a profiler that defers its trace loses no kernel.

The states leave for pinned memory of the host: 56 GB for ``4b``, of which 48 move, since master weights leave as a
half (``leaves`` in the table). ``--stay 0.3`` is about what stays of ``4b`` on an H200 with the default
``--sglang-mem-fraction-static``. On a CPU, only ``--shape tiny`` makes sense: it shows
that the script runs.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from random_qwen3 import config_folder

SWITCHED = ("tiny", "0.6b", "4b")


class Run:
    """Model, optimizer and one step on random rows."""

    def __init__(self, folder: Path, tokens: int) -> None:
        from relax_train import settings as s
        from relax_train.backend.host_memory import HostMemory
        from relax_train.backend.offload import Offload
        from relax_train.backend.optimizer import build_optimizer
        from relax_train.backend.parallel import setup_parallel
        from relax_train.models.build import build_model

        cuda = torch.cuda.is_available()
        full = s.ParallelSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        settings = s.TrainSettings(
            model=s.ModelSettings(hf_checkpoint=str(folder), bf16=True),
            parallel=full,
            optimizer=s.OptimizerSettings(lr=1e-5),
        )
        self.parallel = setup_parallel(settings.parallel)
        self.device = self.parallel.device
        self.model = build_model(settings, self.parallel)
        with torch.no_grad():
            for parameter in self.model.gpt[0].parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
                else:
                    parameter.fill_(1.0)
        self.optimizer = build_optimizer(settings, self.model)
        start = time.perf_counter()
        host = HostMemory(pinned=cuda)
        self.offload = Offload(self.model, self.optimizer, host)
        self.offload.prepare()
        self.begun = time.perf_counter() - start
        self.host, self.started = host, start
        self.tokens, self.vocab = tokens, self.model.shape.vocab

    def step(self, seed: int) -> None:
        """Forward and backward over one packed row of documents of 1,024 tokens, and the optimizer."""
        from relax_train.backend.device_context import DeviceContext
        from relax_train.backend.mcore import PackedSeqParams, get_forward_backward_func
        from relax_train.step import update_weights

        self.offload.changed()
        generator = torch.Generator(device=self.device).manual_seed(seed)
        length = min(1024, self.tokens)
        cu = torch.arange(0, self.tokens + 1, length, dtype=torch.int32, device=self.device)
        rows = torch.randint(0, self.vocab, (1, self.tokens), device=self.device, generator=generator)

        def forward_step(iterator: Any, chunk: Any) -> Any:
            next(iterator)
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=length, max_seqlen_kv=length
            )
            positions = torch.zeros_like(rows)
            out = chunk(rows, positions, None, labels=rows.roll(-1, 1), packed_seq_params=packed)
            ones = torch.ones((), dtype=torch.int, device=self.device)
            return out, lambda loss: (loss.float().mean(), ones, {})

        with DeviceContext():
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(range(1)),
                model=self.model.chunks[0],
                num_microbatches=1,
                seq_length=self.tokens,
                micro_batch_size=1,
                forward_only=False,
            )
        self.offload.wait()
        assert update_weights(self.optimizer) is not None, "the gradient is finite"
        self.compute_done()

    def compute_done(self) -> None:
        """Waits for what the GPU computes, not for copies."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def push(self) -> None:
        """Reads all weights, as a push of them does."""
        from relax_train.models.export import weight_buckets

        for bucket in weight_buckets(self.model, 512 << 20):
            del bucket
        self.compute_done()

    def sums(self) -> list[int]:
        """Sums of the bits of all that is kept, each word times its place, modulo 2**64."""
        self.offload.wait()
        found = []
        for storage, _ in self.offload._kept():
            whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
            cut = len(whole) // 4 * 4
            total, begin = torch.zeros((), dtype=torch.int64, device=self.device), 1
            for piece in whole[:cut].view(torch.int32).split(1 << 24):
                total += (piece * torch.arange(begin, begin + len(piece), device=self.device)).sum()
                begin += len(piece)
            found.append(int(total))
        return found


def seconds(act: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    act(*args)
    return time.perf_counter() - start


def plain_copies(run: Run) -> tuple[float, float]:
    """Seconds of copying weights and optimizer out and in, 256 MiB at a time, best of three."""
    total = sum(storage.nbytes() for storage, _ in run.offload._kept())
    size = min(256 << 20, total)
    pinned = run.device.type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    device = torch.empty(size, dtype=torch.uint8, device=run.device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(-(-total // size)):
            target.copy_(source, non_blocking=True)
        run.compute_done()

    out = min(seconds(copy, host, device) for _ in range(3))
    return out, min(seconds(copy, device, host) for _ in range(3))


def switch(run: Run, stay: float, rounds: int, awake: float) -> dict[str, float]:
    """Medians of what is visible of a switch, with this share of the bytes staying on the GPU."""
    total = sum(storage.nbytes() for storage, _ in run.offload._kept())
    run.offload.room = int(total * stay)
    parts: dict[str, list[float]] = {"begin": [], "push": [], "sleep": [], "wake": [], "longer": []}
    for number in range(rounds + 1):
        run.step(number)
        begun = seconds(run.offload.begin_sleep)
        pushed = seconds(run.push)
        slept = seconds(run.offload.sleep)

        def wake() -> None:
            run.offload.wake()
            run.compute_done()

        woke = seconds(wake)
        longer = seconds(run.step, number) - awake
        if number:  # the first one makes what the others use
            for name, value in zip(parts, (begun, pushed, slept, woke, longer), strict=True):
                parts[name].append(value)
    result = {name: sorted(values)[len(values) // 2] for name, values in parts.items()}
    before = run.sums()
    run.offload.changed()
    run.offload.begin_sleep()
    run.offload.sleep()
    run.offload.wake()
    assert run.sums() == before, "weights and optimizer came back as they left"
    result["leaves"] = run.offload.leaving / 2**30
    result["visible"] = result["sleep"] + result["wake"] + max(0.0, result["longer"])
    return result


def deferred_traces(run: Run, base: Path) -> None:
    """Prints what the end of a profiled step takes with and without deferring, and the kernels of both traces."""
    from relax_profiling import analyze
    from relax_profiling.recorders.training import build_observer
    from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings

    chosen = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=1)
    counts = {}
    for how in ("at once", "deferred"):
        folder = base / how.replace(" ", "_")
        observer = build_observer(chosen, MemoryProfileSettings(), trace_dir=folder)
        if how == "deferred":
            observer.defer_traces()
        ends = []
        for offset in range(4):
            start = time.perf_counter()
            with observer.phase("train_overall", offset):
                run.step(offset)
                stop = time.perf_counter()
            ends.append((stop - start, time.perf_counter() - stop))
        written = seconds(observer.write_traces)
        observer.close()
        (trace,) = analyze(folder).traces
        counts[how] = trace.launches or sum(entry.calls for entry in trace.operators)
        print(
            f"trace {how}: profiled step {ends[1][0]:.2f} s and {ends[1][1]:.2f} s after it, next step "
            f"{ends[2][0]:.2f} s, written later in {written:.2f} s; {counts[how]} launches"
        )
    assert abs(counts["deferred"] / counts["at once"] - 1) < 0.01, "a deferred trace holds the same"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SWITCHED, default="4b")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--stay", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="shares that stay on the GPU")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29877")
    with tempfile.TemporaryDirectory() as base:
        run = Run(config_folder(Path(base) / "model", args.shape, dtype="bfloat16", positions=40_960), args.tokens)
        print(f"host memory: asked for in {run.begun:.3f} s", flush=True)
        for number in range(3):
            run.step(number)
        awake = min(seconds(run.step, number) for number in range(3))
        while not run.host.ready:
            time.sleep(0.05)
        total = sum(storage.nbytes() for storage, _ in run.offload._kept())
        print(f"{total / 2**30:.1f} GiB of host memory there after {time.perf_counter() - run.started:.1f} s at most")
        out, back = plain_copies(run)
        print(f"a step without a switch {awake:.2f} s; plain copies: out {out:.2f} s, in {back:.2f} s", flush=True)
        print("| stays | leaves | begin | push | sleep | wake | step longer | visible | of plain copies |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for stay in args.stay:
            r = switch(run, stay, args.rounds, awake)
            cells = [f"{stay:.0%}", f"{r['leaves']:.1f} GiB"]
            cells += [f"{r[name]:.2f} s" for name in ("begin", "push", "sleep", "wake", "longer", "visible")]
            print("| " + " | ".join(cells) + f" | {r['visible'] / (out + back):.2f} |", flush=True)
        deferred_traces(run, Path(base))
        print(f"host memory given back in {seconds(run.offload.close):.2f} s")
        from relax_train.backend.parallel import teardown_parallel

        teardown_parallel()
    return 0


if __name__ == "__main__":
    sys.exit(main())
