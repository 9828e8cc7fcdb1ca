"""Forward and backward pass of a training step: tokens/s, TFLOP/s and memory beside transformers with liger-kernel.

    python benchmarks/train_step.py                                      a tiny model on a CPU, to see that it runs
    python benchmarks/train_step.py --shapes 4b 0.6b moe 4b-32k          on a GPU

Random weights in bfloat16 (float32 on a CPU). A row is ``--row-tokens`` packed tokens, most of them in responses of
about 1,000 tokens (or one sequence as long as the row, ``-32k``); a pass is ``--rows`` rows. The best of three passes
counts.
Ours has float32 gradients, the distributed optimizer with its state in memory, and the GRPO loss at response positions;
transformers has its own cross-entropy at all positions, gradients in the type of the weights, and no optimizer.
TFLOP/s count 6 x parameters that a token meets, so recomputation and attention are work that is not counted. "extra"
is the peak beyond what lay in memory before: activations and whatever else a pass needs.

Every shape and side runs in a process of its own, so that one that fails or takes longer than ``--limit`` seconds costs
nobody else anything; each line is printed when it is there. ``--trace`` adds where the device's time goes.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
    os.environ.setdefault(name, value)

PROMPT = 20
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "full recompute": FULL,
    "half the layers": {**FULL, "recompute_method": "block"},
    "selective": {"recompute_granularity": "selective"},
    "no recompute": {},
}
MARK = "result: "


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and its rows.

    Attributes:
        config: of transformers, without its class.
        moe: whether it is a Qwen3-MoE.
        document: tokens of a sequence; None is the whole row.
        row: tokens of a row; None is what ``--row-tokens`` says.
    """

    config: dict[str, Any]
    moe: bool = False
    document: int | None = 1024
    row: int | None = None


def dense(hidden: int, ffn: int, layers: int, heads: int, vocab: int = 151936, dim: int = 128) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": min(8, heads), "head_dim": dim,
        "tie_word_embeddings": True, "max_position_embeddings": 40960,
    }  # fmt: skip


EXPERTS = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
SHAPES = {
    "tiny": Shape(dense(64, 128, 2, 4, vocab=512, dim=16), document=128, row=512),
    "0.6b": Shape(dense(1024, 3072, 28, 16)),
    "4b": Shape(dense(2560, 9728, 36, 32)),
    "4b-32k": Shape(dense(2560, 9728, 36, 32), document=None, row=32768),
    "moe": Shape({**dense(2048, 6144, 8, 32), **EXPERTS, "num_key_value_heads": 4}, moe=True),
}


def hf_config(shape: Shape) -> Any:
    from transformers import Qwen3Config, Qwen3MoeConfig

    return (Qwen3MoeConfig if shape.moe else Qwen3Config)(**shape.config)


class Clock:
    """Times passes on this device and remembers their memory."""

    def __init__(self) -> None:
        import torch

        self._torch, self.cuda = torch, torch.cuda.is_available()

    def sync(self) -> None:
        if self.cuda:
            self._torch.cuda.synchronize()

    def best(self, run: Callable[[], None], rounds: int = 3) -> tuple[float, float, float]:
        """Seconds of the best of ``rounds`` after one more, and GiB at the peak and before."""
        run()
        self.sync()
        gib = 1 << 30
        before = self._torch.cuda.memory_allocated() / gib if self.cuda else 0.0
        if self.cuda:
            self._torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            self.sync()
            times.append(time.perf_counter() - start)
        peak = self._torch.cuda.max_memory_allocated() / gib if self.cuda else 0.0
        return min(times), peak, before

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            self._torch.cuda.empty_cache()


def report(side: str, setting: str, tokens: int, active: int, run: Callable[[], None], clock: Clock) -> None:
    import torch

    try:
        seconds, peak, before = clock.best(run)
    except torch.OutOfMemoryError as error:
        print(MARK + json.dumps({"side": side, "setting": setting, "failed": str(error)[:120]}), flush=True)
        return
    found = {
        "side": side, "setting": setting, "tokens_s": tokens / seconds,
        "tflops": 6 * active * tokens / seconds / 1e12, "peak": peak, "extra": peak - before,
    }  # fmt: skip
    print(MARK + json.dumps(found), flush=True)


# ------------------------------------------------------------------ ours


def sizes(flags: argparse.Namespace, shape: Shape) -> tuple[int, int]:
    """Tokens of a row and of a document."""
    row = shape.row or flags.row_tokens
    return row, min(shape.document or row, row)


def ours(flags: argparse.Namespace, shape: Shape) -> None:
    import torch
    from relax_train.backend.mcore import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        hf_config(shape).save_pretrained(folder)
        for setting in flags.settings or SETTINGS:
            clock = Clock()
            try:
                step, tokens, active, update = our_step(flags, shape, folder, SETTINGS[setting])
                report("relax", setting, tokens, active, step, clock)
                if flags.trace:
                    trace(step)
                seconds, peak, _before = clock.best(update, rounds=1)
                print(f"     optimizer step {seconds:.3f} s, at its peak {peak:.1f} GiB", flush=True)
                del step, update
            except torch.OutOfMemoryError as error:
                print(MARK + json.dumps({"side": "relax", "setting": setting, "failed": str(error)[:120]}), flush=True)
            parallel_state.destroy_model_parallel()
            clock.free()


def our_step(
    flags: argparse.Namespace, shape: Shape, folder: str, recompute: dict[str, Any]
) -> tuple[Callable[[], None], int, int, Callable[[], Any]]:
    import numpy as np
    import torch
    from relax_data.types import TrainBatch
    from relax_train import settings as s
    from relax_train.backend.optimizer import build_optimizer
    from relax_train.backend.parallel import setup_parallel
    from relax_train.models.build import build_model
    from relax_train.step import ForwardBackward

    row, document = sizes(flags, shape)
    n, response = flags.rows * row // document, document - PROMPT
    if recompute.get("recompute_method") == "block":
        recompute = {**recompute, "recompute_num_layers": shape.config["num_hidden_layers"] // 2}
    settings = s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=folder),
        parallel=s.ParallelSettings(**recompute),
        optimizer=s.OptimizerSettings(lr=1e-6),
        batch=s.BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=row),
    )
    model = build_model(settings, setup_parallel(settings.parallel))
    with torch.no_grad():
        for parameter in model.gpt[0].parameters():
            _ = parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    optimizer = build_optimizer(settings, model)
    runs = ForwardBackward(model, settings)
    rng = np.random.default_rng(0)

    def column(value: float) -> list[np.ndarray]:
        return [np.full(response, value, np.float32) for _ in range(n)]

    batch = TrainBatch(
        rollout_id=0,
        tokens=[rng.integers(5, shape.config["vocab_size"], document) for _ in range(n)],
        response_lengths=np.full(n, response, np.int64),
        loss_masks=column(1),
        rollout_log_probs=column(-11.9),
        rewards=np.zeros(n, np.float32),
        group_ids=np.arange(n) // 8,
        oldest_versions=np.zeros(n, np.int64),
        names=[str(i) for i in range(n)],
    )
    columns = {
        "weights": column(1 / (n * response)),
        "mask": column(1),
        "advantages": column(0.5),
        "rollout_log_probs": column(-11.9),
    }

    def step() -> None:
        optimizer.zero_grad()
        runs.gradient(batch, columns)

    return step, n * document, model.shape.active_parameters, optimizer.step


# ------------------------------------------------------------------ transformers


def peer(flags: argparse.Namespace, shape: Shape) -> None:
    import torch
    from relax_train.models.architectures import model_shape
    from transformers import AutoModelForCausalLM

    clock, config = Clock(), hf_config(shape)
    name = "transformers"
    if clock.cuda:
        with contextlib.suppress(ImportError):
            from liger_kernel import transformers as liger

            apply = liger.apply_liger_kernel_to_qwen3_moe if shape.moe else liger.apply_liger_kernel_to_qwen3
            apply()
            name = "transformers + liger"
    dtype = torch.bfloat16 if clock.cuda else torch.float32
    with torch.device("cuda" if clock.cuda else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.train()
    active = model_shape(config.to_dict()).active_parameters
    row, document = sizes(flags, shape)
    ids = torch.randint(5, config.vocab_size, (flags.rows, row // document, document), device=model.device)

    def step() -> None:
        for batch in ids:
            model(batch, labels=batch).loss.backward()
        model.zero_grad(set_to_none=False)

    for checkpointing in (True, False):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        setting = "full recompute" if checkpointing else "no recompute"
        report(name, setting, ids.numel(), active, step, clock)
        if flags.trace:
            trace(step)
        model.zero_grad(set_to_none=True)
        clock.free()


# ------------------------------------------------------------------ where the time goes


KINDS = (
    ("products", ("nvjet", "gemm", "cutlass", "xmma", "cublas", "grouped_mm", "splitk")),
    ("attention", ("flash", "fmha", "cudnn", "attention")),
)


def trace(step: Callable[[], None]) -> None:
    """Prints the shares of the device's time in one pass, and its longest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return
    with contextlib.suppress(torch.OutOfMemoryError):
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            wall = time.perf_counter() - start
        kernels = [(e.key, e.self_device_time_total / 1e3, e.count) for e in recorded.key_averages()]
        busy, shares = sum(ms for _, ms, _ in kernels), Counter[str]()
        for name, ms, _ in kernels:
            kind = next((k for k, words in KINDS if any(w in name.lower() for w in words)), "other")
            shares[kind] += ms / busy if busy else 0
        told = ", ".join(f"{kind} {share:.1%}" for kind, share in shares.most_common())
        print(f"     device {busy:.0f} ms busy of {wall * 1e3:.0f}: {told}", flush=True)
        for name, ms, count in sorted(kernels, key=lambda k: -k[1])[:16]:
            print(f"     {ms:8.1f} ms {count:6d} x  {name[:110]}", flush=True)


# ------------------------------------------------------------------ the table


def lines_of(command: list[str], limit: float) -> Iterator[str]:
    """The lines that a process prints, until it ends or its time is over."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), True)
        import threading

        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            yield from process.stdout
        finally:
            timer.cancel()
        if process.wait():
            yield f"     {' '.join(command[2:])} ended with {process.returncode} (-9: longer than {limit:.0f} s)\n"


def run_all(flags: argparse.Namespace) -> None:
    print(f"{'shape':8s} {'':20s} {'':16s} {'tokens/s':>9s} {'TFLOP/s':>8s} {'peak GiB':>9s} {'extra':>7s}")
    for shape in flags.shapes:
        found: dict[tuple[str, str], float] = {}
        for side in flags.sides:
            options = [
                "--case",
                shape,
                "--sides",
                side,
                "--rows",
                str(flags.rows),
                "--row-tokens",
                str(flags.row_tokens),
            ]
            options += ["--trace"] if flags.trace else []
            options += ["--settings", *flags.settings] if flags.settings else []
            start, tail = time.perf_counter(), list[str]()
            for line in lines_of([sys.executable, __file__, *options], flags.limit):
                if not line.startswith(MARK):
                    if line.startswith("     "):
                        print(line, end="", flush=True)
                    tail = [*tail[-25:], line]
                    continue
                result = json.loads(line.removeprefix(MARK))
                head = f"{shape:8s} {result['side']:20s} {result['setting']:16s}"
                if "failed" in result:
                    print(f"{head} {result['failed']}", flush=True)
                    continue
                found[result["side"], result["setting"]] = result["tokens_s"]
                print(
                    f"{head} {result['tokens_s']:9,.0f} {result['tflops']:8.1f} {result['peak']:9.1f} "
                    f"{result['extra']:7.1f}",
                    flush=True,
                )
            if not any(name.startswith("relax") == (side == "ours") for name, _ in found):
                print("".join(tail), flush=True)
            print(f"     {shape} {side}: {time.perf_counter() - start:.0f} s in all", flush=True)
        ratios(shape, found)


def ratios(shape: str, found: dict[tuple[str, str], float]) -> None:
    mine = {setting: value for (side, setting), value in found.items() if side == "relax"}
    theirs = {setting: value for (side, setting), value in found.items() if side != "relax"}
    same = "full recompute"
    if same in mine and same in theirs:
        best = max(mine, key=lambda setting: mine[setting])
        print(
            f"{shape}: {mine[same] / theirs[same]:.2f} x with the same recomputation; our best ({best}) "
            f"{mine[best] / theirs[same]:.2f} x that and {mine[best] / max(theirs.values()):.2f} x their best",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--sides", nargs="+", choices=["ours", "peer"], default=["ours", "peer"])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-tokens", type=int, default=16384)
    parser.add_argument("--limit", type=float, default=300, help="seconds of one shape and side")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--case", choices=SHAPES, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case is None:
        run_all(flags)
        return
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    if flags.sides == ["ours"]:
        ours(flags, SHAPES[flags.case])
    else:
        peer(flags, SHAPES[flags.case])


if __name__ == "__main__":
    main()
