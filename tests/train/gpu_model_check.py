"""Checks of the trainer's model on CUDA; run by hand, needs nothing but the packages and no network.

    PYTHONPATH=packages/relax-train/src:packages/relax-data/src python tests/train/gpu_model_check.py
    PYTHONPATH=... torchrun --nproc-per-node 2 tests/train/gpu_model_check.py --only parity

Each check prints its numbers; the exit status says whether all held. ``--only`` names parts: kernels parity
attention model.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PARITY: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [
        *(
            (kind, {})
            for kind in ("qwen3", "qwen2", "qwen3_moe", "llama", "llama+llama3", "llama+linear", "qwen3+yarn")
        ),
        ("qwen3", FULL),
        ("qwen3", {"optimizer_cpu_offload": True}),
    ],
    2: [
        ("qwen3", SP),
        ("qwen2", {"tensor_model_parallel_size": 2}),
        ("qwen3", {**SP, **FULL}),
        ("qwen3", {"pipeline_model_parallel_size": 2}),
        ("qwen3", {"context_parallel_size": 2}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}),
        ("qwen3", {}),
        ("llama+llama3", SP),
        ("llama", {"pipeline_model_parallel_size": 2}),
        ("llama+llama3", {"context_parallel_size": 2}),
    ],
}
failures: list[str] = []


def say(*words: Any) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(*words, flush=True)


def check(name: str, held: bool, detail: str) -> None:
    say(f"{'ok  ' if held else 'FAIL'} {name}: {detail}")
    if not held:
        failures.append(name)


def kernels() -> None:
    """The fused kernels against torch, and small models with them against the same models without."""
    script = Path(__file__).with_name("kernel_checks.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    held = "all kernels agree" in done.stdout
    check("kernels", held, "agree with torch" if held else done.stderr[-2000:])


def load_conftest() -> Any:
    """The harness and the oracle of the CPU tests; their fixtures are not needed, so neither is pytest."""
    if importlib.util.find_spec("pytest") is None:
        stub = types.ModuleType("pytest")
        stub.fixture = lambda *a, **k: a[0] if a and callable(a[0]) else (lambda f: f)  # type: ignore[attr-defined]
        stub.TempPathFactory = object  # type: ignore[attr-defined]
        sys.modules["pytest"] = stub
    spec = importlib.util.spec_from_file_location("train_oracle", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_oracle"] = module
    spec.loader.exec_module(module)
    return module


def forget_layout() -> None:
    from relax_train.backend.mcore import parallel_state

    parallel_state.destroy_model_parallel()


def timed(action: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = action(*args, **kwargs)
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def parity(base: Path) -> None:
    """Three AdamW steps in float32 against transformers on the CPU."""
    from relax_train.models.hf_mapping import SafetensorsFolder

    oracle_of, made = load_conftest(), {}
    for kind, parallel in PARITY[int(os.environ.get("WORLD_SIZE", "1"))]:
        if kind not in made:
            folder = base / f"{kind}-{os.environ.get('RANK', '0')}"
            folder.mkdir(parents=True)
            made[kind] = oracle_of._make_reference(kind, folder)
        oracle = made[kind]
        run = oracle_of.Harness(oracle.folder, parallel)
        before = run.weights(20_000)
        steps = [run.step(rows) for rows in oracle.rows]
        after = run.weights()
        start, end = SafetensorsFolder(str(oracle.folder)), SafetensorsFolder(str(oracle.after))
        exact = all(torch.equal(t, start.read(n)) for n, t in before.items()) and len(before) == len(start.names())
        loss = max(abs(a - b) for (a, _), b in zip(steps, oracle.losses, strict=True))
        norm = max(abs(a - b) / b for (_, a), b in zip(steps, oracle.grad_norms, strict=True))
        weight = max((t - end.read(n)).abs().max().item() for n, t in after.items())
        held = exact and loss < 2e-5 and norm < 2e-4 and weight < 5e-5
        detail = f"exported exactly {exact}, loss {loss:.1e}, grad norm {norm:.1e}, weights {weight:.1e}"
        check(
            f"parity {kind} {parallel or 'one parallel' if dist.get_world_size() == 1 else parallel or 'dp2'}",
            held,
            detail,
        )
        forget_layout()


def attention() -> None:
    """The variable-length kernel against padded documents, forward and backward, bfloat16."""
    from relax_train.backend.mcore import PackedSeqParams
    from relax_train.models.attention import _padded, _Plan, _varlen_kernel

    kernel = _varlen_kernel()
    check("varlen kernel", kernel is not None, "torch.nn.attention.varlen")
    if kernel is None:
        return
    lengths = [2048, 96, 4000, 512, 1536]
    borders = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    cu = torch.tensor(borders, dtype=torch.int32, device="cuda")
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths))
    for heads, key_heads, dim in ((32, 8, 128), (14, 2, 64), (4, 2, 16)):
        for cp_size in (1, 2):
            for cp_rank in range(cp_size):
                plan = _Plan(packed, cp_size, cp_rank, torch.device("cuda"))
                torch.manual_seed(1)
                shape = (borders[-1], dim)
                q0 = torch.randn(shape[0] // cp_size, heads, dim, device="cuda", dtype=torch.bfloat16)
                k0, v0 = (torch.randn(shape[0], key_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                grad = torch.randn_like(q0)
                results = []
                for fast in (True, False):
                    q, k, v = (x.clone().requires_grad_() for x in (q0, k0, v0))
                    if fast:
                        keys, values = (k, v) if cp_size == 1 else (k[plan.key_index], v[plan.key_index])
                        cu_q, cu_k, longest_q, longest_k = plan.varlen
                        out = kernel(q, keys, values, cu_q, cu_k, longest_q, longest_k, scale=None)
                    else:
                        keys, values = (k, v) if cp_size == 1 else (k[plan.key_order], v[plan.key_order])
                        out = _padded(q, keys, values, plan, None)
                    out.backward(grad)
                    results.append((out, q.grad, k.grad, v.grad))
                worst = max(((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*results, strict=True))
                name = f"varlen {heads}/{key_heads} heads x {dim}, cp {cp_rank} of {cp_size}"
                check(name, worst < 2e-2, f"relative difference of output and gradients at most {worst:.1e}")


def big_folder(base: Path, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    model.save_pretrained(base / "big")
    del model
    torch.cuda.empty_cache()
    say(f"     model of {count / 1e6:.0f} M parameters, bfloat16")
    return base / "big"


class Big:
    """The large model with everything around it, and one step on random packed rows."""

    def __init__(self, folder: Path, parallel: dict[str, Any]) -> None:
        from relax_train import settings as s
        from relax_train.backend.optimizer import build_optimizer
        from relax_train.backend.parallel import setup_parallel
        from relax_train.models.build import build_model
        from relax_train.models.hf_mapping import load_hf_weights

        self.settings = s.TrainSettings(
            model=s.ModelSettings(hf_checkpoint=str(folder)),
            parallel=s.ParallelSettings(**parallel),
            optimizer=s.OptimizerSettings(lr=1e-5),
        )
        self.parallel = setup_parallel(self.settings.parallel)
        self.model = build_model(self.settings, self.parallel)
        self.load_seconds, _ = timed(load_hf_weights, self.model)
        self.optimizer = build_optimizer(self.settings, self.model)

    def step(self, seed: int, documents: int = 8, length: int = 1024, micro_batches: int = 2) -> float:
        from relax_train.backend.device_context import DeviceContext
        from relax_train.backend.mcore import PackedSeqParams, get_forward_backward_func

        generator = torch.Generator(device="cuda").manual_seed(seed)
        total = documents * length
        cu = torch.arange(0, total + 1, length, dtype=torch.int32, device="cuda")

        def forward_step(iterator: Any, chunk: Any) -> Any:
            next(iterator)
            tokens = torch.randint(0, 151936, (1, total), device="cuda", generator=generator)
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=length, max_seqlen_kv=length
            )
            out = chunk(tokens, torch.zeros_like(tokens), None, labels=tokens.roll(-1, 1), packed_seq_params=packed)
            return out, lambda loss: (loss.float().sum(), torch.tensor(total, device="cuda").int(), {})

        with DeviceContext():
            self.optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(range(micro_batches)),
                model=self.model.chunks[0],
                num_microbatches=micro_batches,
                seq_length=total,
                micro_batch_size=1,
                forward_only=False,
            )
        return self.optimizer.step().grad_norm

    def weights(self) -> dict[str, torch.Tensor]:
        from relax_train.models.export import weight_buckets

        return {n: t.cpu() for bucket in weight_buckets(self.model, 512 << 20) for n, t in bucket.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def export(run: Big, bucket: int) -> None:
    from relax_train.models.export import weight_buckets

    largest = max(p.numel() * p.element_size() for p in run.model.gpt[0].parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()

    def walk() -> int:
        return sum(1 for _ in weight_buckets(run.model, bucket))

    seconds, count = timed(walk)
    peak = torch.cuda.max_memory_allocated() - start
    limit = 2 * max(bucket, largest) + (64 << 20)
    detail = f"{count} buckets in {seconds * 1e3:.0f} ms, peak {peak / 2**20:.0f} MiB, limit {limit / 2**20:.0f}"
    check(f"export in buckets of {bucket >> 20} MiB", peak <= limit, detail)


def sleep_and_wake(run: Big) -> None:
    from relax_train.backend.offload import Offload

    before, offload = run.weights(), Offload(run.model, run.optimizer)
    torch.cuda.empty_cache()
    full = torch.cuda.memory_reserved()
    for time_number in (1, 2):
        free_before = torch.cuda.mem_get_info()[0]
        down, _ = timed(offload.sleep)
        left, freed = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] - free_before
        up, _ = timed(offload.wake)
        detail = (
            f"sleep {down:.2f} s, wake {up:.2f} s; {full / 2**30:.2f} GiB reserved before, {left / 2**20:.0f} MiB "
            f"allocated asleep, {freed / 2**30:.2f} GiB given back to the system"
        )
        check(f"sleep and wake, time {time_number}", left < 200 << 20 and freed > 0.9 * (full - (1 << 30)), detail)
    offload.close()
    check("weights after sleep", same(before, run.weights()), "equal bit for bit")


def big_model(base: Path, layers: int) -> None:
    """Bfloat16 at a real size: times, memory, sleep and wake, export, checkpoint, host-side moments."""
    from relax_train.checkpoint.hf_export import save_hf
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    folder = big_folder(base, layers)
    run = Big(folder, {})
    say(f"     weights loaded in {run.load_seconds:.1f} s")
    run.step(0)
    torch.cuda.reset_peak_memory_stats()
    seconds, norm = timed(run.step, 1)
    tokens = 2 * 8 * 1024
    parameters = sum(p.numel() for p in run.model.gpt[0].parameters())
    rate = 6 * parameters * tokens / seconds / 1e12
    say(
        f"     step of {tokens} tokens: {seconds * 1e3:.0f} ms, {tokens / seconds:,.0f} tokens/s, about {rate:.0f} "
        f"TFLOP/s, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, grad norm {norm:.3f}"
    )
    export(run, 512 << 20)
    export(run, 64 << 20)
    sleep_and_wake(run)
    seconds, path = timed(save_checkpoint, base / "checkpoints", 0, run.model, run.optimizer)
    size = sum(f.stat().st_size for f in path.iterdir())
    say(f"     checkpoint of {size / 2**30:.1f} GiB written in {seconds:.1f} s")
    straight = [run.step(2), run.step(3)]
    expected = run.weights()
    seconds, _ = timed(load_checkpoint, base / "checkpoints", run.model, run.optimizer)
    resumed = [run.step(2), run.step(3)]
    held = same(expected, run.weights()) and straight == resumed
    close = max(abs(a - b) / b for a, b in zip(resumed, straight, strict=True))
    check("resume", close < 1e-3, f"loaded in {seconds:.1f} s; bit for bit {held}, grad norms within {close:.1e}")
    seconds, _ = timed(save_hf, run.model, base / "exported")
    say(f"     Hugging Face folder written in {seconds:.1f} s")
    del run
    forget_layout()
    torch.cuda.empty_cache()
    variants: dict[str, dict[str, Any]] = {
        "moments on the host": {"optimizer_cpu_offload": True},
        "full recompute": FULL,
    }
    for name, parallel in variants.items():
        other = Big(folder, parallel)
        other.step(0)
        torch.cuda.reset_peak_memory_stats()
        seconds, other_norm = timed(other.step, 1)
        peak = torch.cuda.max_memory_allocated() / 2**30
        close = abs(other_norm - norm) / norm
        check(name, close < 1e-3, f"step {seconds * 1e3:.0f} ms, peak {peak:.1f} GiB, grad norm within {close:.1e}")
        del other
        forget_layout()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["kernels", "parity", "attention", "model"])
    parser.add_argument("--layers", type=int, default=28, help="layers of the large model (28: 0.6 B parameters)")
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        print("this check needs CUDA")
        return 2
    from relax_train.backend.device import local_device

    local_device(int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        if "kernels" in flags.only and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            kernels()
        if "parity" in flags.only:
            parity(base)
        if "attention" in flags.only:
            attention()
        if "model" in flags.only and int(os.environ.get("WORLD_SIZE", "1")) == 1:
            big_model(base, flags.layers)
    if dist.is_initialized():
        dist.destroy_process_group()
    say("FAILED: " + ", ".join(failures) if failures else "all checks held")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
