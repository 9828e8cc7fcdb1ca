"""Checks of relax-profiling on a machine with a GPU; no part of the CPU test suite.

    python tests/profiling/gpu_check.py [--out DIR] [--sglang-url URL ...]

A real CUDA training loop is profiled for all three targets, a snapshot is taken, memory runs out twice and both dumps
are read, the cost of the profiler is measured on the GPU, and, with ``--sglang-url``, running servers are profiled.
Prints one JSON line of figures at the end; fails at the first thing that is not as documented.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from relax_profiling.recorders.sglang import RolloutProfiler
from relax_profiling.recorders.training import TrainingObserver, build_observer
from relax_profiling.report.build import build_report
from relax_profiling.report.html import to_html
from relax_profiling.report.model import MemoryReport, Report
from relax_profiling.report.text import to_text
from relax_profiling.settings import MemoryProfileSettings, SGLangProfileSettings, TrainProfileSettings

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "profiling_overhead.py"


def train(observer: TrainingObserver, steps: int, width: int = 4096) -> None:
    """A bf16 loop of matrix products that a GPU does in some milliseconds a step."""
    observer.before_model()
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(6))).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(4096, width, device="cuda", dtype=torch.bfloat16)
    for offset in range(steps):
        with observer.phase("train_overall", offset):
            with observer.phase("train_log_probs", offset), torch.no_grad():
                model(data)
            with observer.phase("train_actor", offset):
                model(data).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


def run_out_of_memory() -> str:
    """Holds nearly all memory and asks for more, twice; returns what torch says."""
    said = ""
    for _ in range(2):
        held = []
        free, _total = torch.cuda.mem_get_info()
        try:
            for _ in range(10_000):
                held.append(torch.empty(max(free // 16, 1 << 20), dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError as e:
            said = str(e)
        held.clear()
        torch.cuda.empty_cache()
    return said


def check_training(out: Path) -> dict[str, Any]:
    observer = build_observer(
        TrainProfileSettings(
            use_pytorch_profiler=True,
            profile_step_start=2,
            profile_step_end=4,
            profile_target=("train_overall", "train_actor", "train_log_probs"),
            profile_with_flops=True,
            profile_with_memory=True,
        ),
        MemoryProfileSettings(record_memory_history=True, memory_snapshot_num_steps=3),
        trace_dir=out,
    )
    try:
        train(observer, 6)
        said = run_out_of_memory()
    finally:
        observer.close()
    assert "out of memory" in said, "the error itself came through"
    tree = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    print("\n".join(tree))
    assert sum(name.startswith("train_trace/train_") for name in tree) == 3, tree
    assert sum(name.endswith("_rank0_dp0_tp0_pp0_snapshot.pickle") for name in tree) == 1, tree
    assert sum(name.endswith("_oom_snapshot.pickle") for name in tree) == 2, "one for each error"
    return check_report(build_report([out]))


def check_report(report: Report) -> dict[str, Any]:
    print(to_text(report))
    assert report.problems == [], report.problems
    overall, actor, log_probs = (
        next(t for t in report.traces if t.target == target)
        for target in ("train_overall", "train_actor", "train_log_probs")
    )
    assert [len(t.steps) for t in (overall, actor, log_probs)] == [3, 3, 3]
    assert overall.breakdown.on_device
    assert overall.breakdown.share("compute") > 0.5, "these matrices keep a GPU busy"
    assert overall.mfu is not None, f"no peak is known for {overall.device}"
    assert 0.05 < overall.mfu < 1.0, overall.mfu
    # 6 layers forward twice, their weight gradients, and the input gradients of all but the first.
    expected = 3 * 2 * 4096**3 * (6 + 6 + 6 + 5)
    assert abs(overall.flops / expected - 1) < 0.01, (overall.flops, expected)
    inside = actor.launches + log_probs.launches
    assert abs(inside - overall.launches) <= 0.05 * overall.launches, (inside, overall.launches)
    errors: list[MemoryReport] = [m for m in report.memory if m.kind == "out of memory"]
    assert len(errors) == 2
    oom = errors[0].devices[0].oom[-1]
    assert oom.asked > 0
    assert any("run_out_of_memory" in h.place for h in errors[0].devices[0].held[:3])
    assert any(f.rule.startswith("out of memory") for f in report.findings)
    return {
        "gpu": overall.device,
        "step_ms": round((overall.step_mean or 0) / 1000, 3),
        "compute": round(overall.breakdown.share("compute"), 3),
        "idle": round(overall.breakdown.share("idle"), 3),
        "mfu": round(overall.mfu, 3),
        "oom_asked_gib": round(oom.asked / 2**30, 2),
        "oom_free_gib": round(oom.device_free / 2**30, 2),
    }


def check_engines(urls: list[str], out: Path) -> dict[str, Any]:
    profiler = RolloutProfiler(SGLangProfileSettings(sglang_profile=True), urls, out / "sglang_trace")
    with profiler.rollout(0) as rollout:
        for url in urls:
            request = json.dumps({"text": "1 + 1 =", "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}})
            subprocess.run(
                [
                    "curl",
                    "-sSf",
                    "--noproxy",
                    "*",
                    "-H",
                    "Content-Type: application/json",
                    "-d",
                    request,
                    url + "/generate",
                ],
                check=True,
                timeout=120,
                capture_output=True,
            )
    for traces in rollout.traces:
        assert traces.files, traces.problems
    report = build_report([out / "sglang_trace"])
    print(to_text(report))
    assert all(t.role == "engine" and t.stages for t in report.traces)
    return {"engines": len(urls), "decode_steps": [s.steps for t in report.traces for s in t.stages]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the traces and the page here")
    parser.add_argument("--sglang-url", nargs="*", default=[])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-profiling-"))) / f"run-{int(time.time())}"
    figures = check_training(out)
    began = time.perf_counter()
    page = to_html(build_report([out]))
    figures["report_s"] = round(time.perf_counter() - began, 2)
    (out / "report.html").write_text(page)
    if arguments.sglang_url:
        figures |= check_engines(arguments.sglang_url, out)
    cost = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=600, check=True)
    figures["overhead"] = json.loads(cost.stdout.strip().splitlines()[-1])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
