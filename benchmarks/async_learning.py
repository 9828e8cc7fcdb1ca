"""Measures what stale samples cost in learning, and what the fully-async mode gives in time.

    uv run python benchmarks/async_learning.py                      # on two CPU cores, about an hour
    uv run python benchmarks/async_learning.py --ways colocate async:2 --seeds 1 2 --out results      # some of it
    python benchmarks/async_learning.py --parallel 4 --out results -- --sglang-attention-backend triton   # on two GPUs

The arithmetic example runs once for each way and seed: `colocate`; `async:N`, which is `--fully-async` with
`--max-staleness N` and `--use-tis`; `async:N:no-tis`. All have the options of `examples/arithmetic/async.toml`, so the
same prompts and as many steps. `--ways` also takes `train.toml`: that file as it is, which takes two optimizer steps on
twice as many samples. Then each way runs once more, alone and without evaluations, for the seconds of a step
(`--no-speed` leaves this out).

Printed is the held-out reward after equally many samples, as a mean over the seeds with its standard error; how far its
last value is from colocate's; after how many samples and seconds a way reaches colocate's last reward minus the goal,
without the time of evaluations; and how far log-probs of engine and trainer differ where all samples are of the newest
weights.

With `--out FOLDER` what has run there is not run again, and all of it is compared: ways and seeds may run one by one.
Runs for learning may run at once (`--parallel N`), also on the same GPUs, because their seconds do not count.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import math
import re
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from partial_rollout import EXAMPLE, GPU, run_folder, run_parser, train

REWARD = "eval/heldout/reward"
WAYS = ("colocate", "async:0", "async:1", "async:2", "async:4", "async:2:no-tis")
SPEED = "speed"
"""Stands for the seed in the name of a run for the seconds of its steps."""
SIZES = {"async.toml": (16, 8), "train.toml": (32, 8)}
"""Prompts a step and responses a prompt, in the files."""
REWARD_GOAL = 0.02
"""Most that the last held-out reward of a way with TIS may be below colocate's."""
SPEED_GOAL = 1.4
"""Times as fast as colocate to that reward, with `--max-staleness 2`."""
HELD_OUT = 200
"""Prompts of an evaluation."""
WARM_UP = 5
"""Steps that fill the pipeline, of a run for the seconds of a step."""


def way_of(text: str) -> str:
    """A way of the command line."""
    if not re.fullmatch(r"colocate|train\.toml|async:\d+(:no-tis)?", text):
        raise argparse.ArgumentTypeError(f"{text!r}: colocate, train.toml, async:N or async:N:no-tis is expected")
    return text


def file_of(way: str) -> str:
    """The file of the example with the options of a way."""
    return way if way == "train.toml" else "async.toml"


def samples_a_step(way: str) -> int:
    return math.prod(SIZES[file_of(way)])


def steps_of(way: str, steps: int) -> int:
    """Steps that train as many samples as so many of `async.toml`."""
    return max(1, steps * SIZES["async.toml"][0] // SIZES[file_of(way)][0])


def words(way: str, seed: str, arguments: argparse.Namespace) -> list[str]:
    """Options of `relax train` for one run."""
    is_async = way.startswith("async")
    options = ["--config", str(EXAMPLE / file_of(way)), "--fully-async" if is_async else "--colocate"]
    if is_async:
        _, staleness, *no_tis = way.split(":")
        options += ["--max-staleness", staleness, "--no-use-tis" if no_tis else "--use-tis"]
    if GPU:
        generating = arguments.gpus // 2 if is_async else 0
        options += ["--actor-num-gpus-per-node", str(arguments.gpus - generating)]
        options += ["--rollout-num-gpus", str(generating)] if is_async else []
        # The model needs next to nothing. What is asked for has to be there beside other runs on the same GPU.
        options += ["--sglang-mem-fraction-static", str(arguments.sglang_mem_fraction_static)]
        options += ["--sglang-max-total-tokens", "65536"]
    options += ["--num-rollout", str(steps_in(way, seed, arguments))]
    if seed == SPEED:
        options += ["--eval-interval", str(10**6), "--skip-eval-before-train"]
    else:
        options += ["--rollout-seed", seed, "--eval-interval", str(steps_of(way, arguments.eval_interval))]
        options += ["--n-samples-per-eval-prompt", str(arguments.eval_samples)]
    return [*options, *arguments.options]


def steps_in(way: str, seed: str, arguments: argparse.Namespace) -> int:
    """All steps of a run."""
    return WARM_UP + int(arguments.speed_steps) if seed == SPEED else steps_of(way, arguments.steps)


def run_name(way: str, seed: str) -> str:
    return f"{way.replace(':', '-')}-{seed}"


def read(way: str, seed: str, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]] | None:
    """The metrics of each step of a run, rising; None if it has not come to its end."""
    path = folder / "runs" / run_name(way, seed) / "metrics.jsonl"
    steps: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, path.read_text().splitlines()) if path.exists() else ():
        steps.setdefault(row["step"], {}).update(row)
    rows = [steps[number] for number in sorted(steps)]
    done = sum("time/step" in row for row in rows)
    return rows if done == steps_in(way, seed, arguments) and REWARD in rows[-1] else None


def make(way: str, seed: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Runs what is not there yet."""
    if read(way, seed, arguments, folder) is None:
        name = run_name(way, seed)
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # what a benchmark left that was ended
        train(words(way, seed, arguments), name, folder)


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean with its standard error, which is NaN where it is not known: of a single value."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        """Of one or more values."""
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), spread / math.sqrt(len(values)))

    def __sub__(self, other: "Mean") -> "Mean":
        return Mean(self.value - other.value, math.hypot(self.error, other.error))

    def __mul__(self, other: "Mean") -> "Mean":
        return Mean(self.value * other.value, math.hypot(self.error * other.value, other.error * self.value))

    def __truediv__(self, other: "Mean") -> "Mean":
        error = math.hypot(self.error / other.value, other.error * self.value / other.value**2)
        return Mean(self.value / other.value, error)

    def text(self, digits: int) -> str:
        """Value and, in brackets, standard error."""
        return f"{self.value:.{digits}f}" + ("" if math.isnan(self.error) else f" ({self.error:.{digits}f})")


Curve = Sequence[tuple[int, float]]
"""Samples trained so far, and the held-out reward of the weights of that moment."""


def reached(curve: Curve, reward: float) -> float | None:
    """Samples at which a curve first has a reward, on the line between two evaluations; None if it never has."""
    if curve[0][1] >= reward:
        return curve[0][0]
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= reward:
            return before + (after - before) * (reward - low) / (high - low)
    return None


@dataclasses.dataclass(frozen=True)
class Learned:
    """What one way gave.

    Attributes:
        curves: one for each seed.
        apart: of each seed: distance of log-probs, mean of the steps whose samples are all of the newest weights.
        staleness: mean and most.
        step: seconds of a step of the run without evaluations; None without that run.
        step_samples: samples of a step.
    """

    curves: list[Curve]
    apart: list[float]
    staleness: tuple[float, float]
    step: Mean | None
    step_samples: int

    def rewards(self, samples: int) -> Mean | None:
        """Of the evaluations after so many samples, if there were any."""
        found = [reward for curve in self.curves for at, reward in curve if at == samples]
        return Mean.of(found) if found else None

    @property
    def last(self) -> Mean:
        """Of the last evaluations."""
        return Mean.of([curve[-1][1] for curve in self.curves])

    def samples_to(self, reward: float) -> Mean | None:
        """Samples until the curves have a reward; None if one of them never has."""
        found = [reached(curve, reward) for curve in self.curves]
        return None if None in found else Mean.of([at for at in found if at is not None])

    def seconds_to(self, reward: float) -> Mean | None:
        """Seconds until then, without those of evaluations."""
        samples = self.samples_to(reward)
        if samples is None or self.step is None:
            return None
        return samples / Mean(self.step_samples, 0.0) * self.step


def learned(way: str, arguments: argparse.Namespace, folder: Path) -> Learned | None:
    """What a way gave, from its runs; None when none of them is there."""
    places = (folder / "runs").glob(run_name(way, "*"))
    seeds = [seed for place in places if (seed := place.name.removeprefix(run_name(way, ""))).isdecimal()]
    runs = [rows for seed in sorted(seeds, key=int) if (rows := read(way, seed, arguments, folder)) is not None]
    if not runs:
        return None
    size = samples_a_step(way)
    steps = [[row for row in rows if "time/step" in row] for rows in runs]
    fresh = [[row["train/logprob_diff_mean"] for row in rows if row["staleness/max"] == 0] for rows in steps]
    ages = [row[name] for rows in steps for row in rows for name in ("staleness/mean", "staleness/max")]
    alone = read(way, SPEED, arguments, folder)
    seconds = [row["time/step"] for row in alone or () if "time/step" in row][WARM_UP:]
    return Learned(
        curves=[[(row["step"] * size, row[REWARD]) for row in rows if REWARD in row] for rows in runs],
        apart=[statistics.fmean(values) for values in fresh if values],
        staleness=(statistics.fmean(ages[::2]), max(ages[1::2])),
        step=Mean.of(seconds) if seconds else None,
        step_samples=size,
    )


def sampling_error(reward: float, responses: int) -> float:
    """Standard error of the mean of so many responses, each of which is right or not."""
    return math.sqrt(max(0.0, reward * (1 - reward)) / responses)


def report(found: Mapping[str, Learned], responses: int) -> bool:
    """Prints the table and the goals. True when they are met, or cannot be judged.

    Args:
        found: by way.
        responses: of one evaluation.
    """
    width = max(18, *(len(name) + 2 for name in found))

    def line(name: str, cells: Iterable[str | Mean | None], digits: int = 0, missing: str = "") -> None:
        texts = (missing if c is None else c.text(digits) if isinstance(c, Mean) else c for c in cells)
        print(f"{name:32}" + "".join(f"{text:>{width}}" for text in texts))

    ways = list(found.values())
    line("", found)
    line("seeds", (str(len(way.curves)) for way in ways))
    print("held-out reward (standard error)")
    for samples in sorted({at for way in ways for curve in way.curves for at, _ in curve}):
        line(f"  after {samples} samples", (way.rewards(samples) for way in ways), 3)
    line("  that of one evaluation alone", (f"({sampling_error(way.last.value, responses):.3f})" for way in ways))
    line("staleness, mean and most", (f"{way.staleness[0]:.2f} {way.staleness[1]:.0f}" for way in ways))
    line("log-probs apart, staleness 0", (f"{statistics.fmean(w.apart):.2g}" if w.apart else None for w in ways))
    line("step, s", (way.step for way in ways), 3)
    base = found.get("colocate")
    if base is None:
        return True
    target = base.last.value - REWARD_GOAL
    line("last - last of colocate", (None if way is base else way.last - base.last for way in ways), 3)
    line(f"samples to {target:.3f}", (way.samples_to(target) for way in ways), 0, "not all reach it")
    seconds = {name: way.seconds_to(target) for name, way in found.items()}
    line(f"seconds to {target:.3f}", seconds.values(), 1)
    first = seconds["colocate"]
    faster = {name: first / took if first and took and name != "colocate" else None for name, took in seconds.items()}
    line("  times as fast as colocate", faster.values(), 2)
    return judge(found, base, faster.get("async:2"))


def judge(found: Mapping[str, Learned], base: Learned, faster: Mean | None) -> bool:
    """Prints the goals. True when they are met, or cannot be judged."""
    with_tis = [name for name in found if re.fullmatch(r"async:\d+", name)]
    below = {name: base.last.value - found[name].last.value for name in with_tis}
    met = True
    if below:
        worst = max(below, key=lambda name: below[name])
        met = below[worst] <= REWARD_GOAL
        print(f"last reward below colocate's, with TIS: {below[worst]:.3f} ({worst}; goal: at most {REWARD_GOAL})")
    if faster is not None:
        met = met and faster.value >= SPEED_GOAL
        print(f"async:2 at that reward: {faster.value:.2f} times as fast as colocate (goal: at least {SPEED_GOAL})")
    return met


def parse() -> argparse.Namespace:
    parser = run_parser(__doc__)
    parser.add_argument(
        "--ways", nargs="+", type=way_of, default=list(WAYS), help="colocate, train.toml, async:N, async:N:no-tis"
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="--rollout-seed; none: speed alone")
    parser.add_argument("--steps", type=int, default=100, help="of async.toml, so of 128 samples each")
    parser.add_argument("--eval-interval", type=int, default=10, help="steps")
    parser.add_argument("--eval-samples", type=int, default=8, help="responses to each of 200 held-out prompts")
    parser.add_argument("--speed-steps", type=int, default=40, help="that are counted for the seconds of a step")
    parser.add_argument("--no-speed", action="store_true", help="no runs for the seconds of a step")
    parser.add_argument(
        "--parallel", type=int, default=1, help="runs for learning at once; each takes about 6 GB of memory on CPU"
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="in all; async: half for each side")
    parser.add_argument("--sglang-mem-fraction-static", type=float, default=0.1, help="of a GPU, for each engine")
    arguments = parser.parse_args()
    if GPU and arguments.gpus < 2:
        parser.error("two GPUs are needed: one that trains and one that generates")
    return arguments


def main() -> int:
    arguments = parse()
    folder = run_folder(arguments)
    with concurrent.futures.ThreadPoolExecutor(arguments.parallel) as pool:
        jobs = [
            pool.submit(make, way, str(seed), arguments, folder) for seed in arguments.seeds for way in arguments.ways
        ]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for way in () if arguments.no_speed else arguments.ways:
        make(way, SPEED, arguments, folder)
    print(f"logs in {folder}")
    every = {way: learned(way, arguments, folder) for way in dict.fromkeys((*WAYS, "train.toml", *arguments.ways))}
    found = {way: figures for way, figures in every.items() if figures is not None}
    return 0 if not found or report(found, HELD_OUT * arguments.eval_samples) else 1


if __name__ == "__main__":
    sys.exit(main())
