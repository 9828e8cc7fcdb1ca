"""Measures the cost of the training profiler: outside its window, and inside it beside torch.profiler alone.

    python benchmarks/profiling_overhead.py [--steps 30] [--width 32]

Runs on the GPU when there is one. The step is many small operators, the worst case for a profiler. Kinds of step are
interleaved and their lower quartiles compared, so that a busy machine disturbs all alike. Writing the traces is timed
apart: it happens after the window.
"""

import argparse
import functools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from relax_profiling.recorders.training import TrainingObserver, build_observer
from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings


def make_step(width: int, device: str) -> Callable[[], None]:
    """A training step of a small transformer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(2, 8, width, device=device)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def timed(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def lower_quartile(samples: list[float]) -> float:
    return statistics.quantiles(samples, n=4)[0]


def observer_of(folder: str, start: int, end: int) -> TrainingObserver:
    observer = build_observer(
        TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=start, profile_step_end=end),
        MemoryProfileSettings(),
        trace_dir=folder,
    )
    observer.before_model()
    return observer


def observed(observer: TrainingObserver, offset: int, step: Callable[[], None]) -> None:
    with observer.phase("train_overall", offset):
        with observer.phase("train_log_probs", offset):
            pass
        with observer.phase("train_actor", offset):
            step()


def phases_cost(observer: TrainingObserver, rounds: int = 2000) -> float:
    """Seconds that the three phases of a step take by themselves, outside the window."""
    samples = []
    for offset in range(rounds):
        samples.append(timed(functools.partial(observed, observer, offset, lambda: None)))
    return statistics.median(samples)


def torch_alone(step: Callable[[], None], steps: int) -> list[float]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    samples = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=steps + 1, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        step()
        for _ in range(steps):
            profiler.step()
            samples.append(timed(step))
    return samples


def ours(step: Callable[[], None], steps: int) -> tuple[list[float], float]:
    """Seconds of each step inside the window, and of writing the trace."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        observer = observer_of(folder, 1, steps + 1)
        observed(observer, 0, step)
        for offset in range(1, steps + 1):
            samples.append(timed(functools.partial(observed, observer, offset, step)))
        began = time.perf_counter()
        observer.close()
        writing = time.perf_counter() - began
        assert len(list(Path(folder).rglob("*.json.gz"))) == 1
    return samples, writing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = make_step(arguments.width, device)
    for _ in range(3):
        step()
    plain: list[float] = []
    alone: list[float] = []
    with_us: list[float] = []
    writing: list[float] = []
    for _ in range(arguments.rounds):
        plain += [timed(step) for _ in range(arguments.steps)]
        alone += torch_alone(step, arguments.steps)
        samples, seconds = ours(step, arguments.steps)
        with_us += samples
        writing.append(seconds)
    with tempfile.TemporaryDirectory() as folder:
        far = observer_of(folder, 10**9, 10**9)
        outside = phases_cost(far)
        far.close()
    base, torch_step, our_step = map(lower_quartile, (plain, alone, with_us))
    result: dict[str, Any] = {
        "device": device,
        "step_ms": round(1e3 * base, 3),
        "outside_window_us": round(1e6 * outside, 2),
        "outside_window_share": round(outside / base, 5),
        "torch_profiler_step_ms": round(1e3 * torch_step, 3),
        "our_step_ms": round(1e3 * our_step, 3),
        # The cost is what the profiler adds to the plain step.
        "cost_ratio": round((our_step - base) / (torch_step - base), 3) if torch_step > base else None,
        "step_ratio": round(our_step / torch_step, 3),
        "writing_s": round(statistics.median(writing), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
