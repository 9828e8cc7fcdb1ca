"""Measures what it gives to train and to generate at the same time, each on GPUs of its own.

    uv run python benchmarks/fully_async.py                                    # the arithmetic model, on two CPU cores
    python benchmarks/fully_async.py --shape 4b --mean-tokens 2048 --batch 16 --samples 8       # on two GPUs
    python benchmarks/fully_async.py ... --ways colocate partial:1 async:2 async:4 --spread 1 --cap-tokens 8192

`relax train` runs once for each way on the same prompts, seed and forced lengths, and on as many GPUs: `colocate` uses
all of them first for one, then for the other; `partial:N` does so with partial rollout and `--max-staleness N`;
`async:N` is `--fully-async` with `--max-staleness N`, half of the GPUs for each side (`--rollout-num-gpus`), and
`async:N:keep` the same with `--no-recompute-kv-cache-after-weight-updates`. `async:N@G` and `async:N:keep@G` have G of
the GPUs generate, so that one table compares several splits. As many groups are open as the staleness allows, N + 1
times those of a step. Printed is, over the steps of a full pipeline (not the first ones, in which it fills, and not the
last N, in which no prompt is started any more), how many tokens of trained responses a second of wall time gives, what
each side did, how long the push itself takes, the ratio to colocate, and of `async` that of a step to the trainer's own
work and the push, its lower bound.

Beside it stands what the model of `relax simulate` makes of each way with the figures of the colocate run, and how far
the measured step is from it; the goal is 15 %. Lengths that are all alike (`--spread 0`) do not tell how the rate of an
engine rises with its requests: give `--engine-half` for them, else the one that `relax simulate` assumes is taken.

With `--out FOLDER` the ways may be run one by one; those that are there are compared.
"""

import argparse
import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from partial_rollout import EXAMPLE, GPU, prepare, task_parser, train
from relax_cli.simulate.figures import Figures
from relax_cli.simulate.model import Lengths, Plan, simulate
from relax_cli.simulate.settings import SimulateSettings
from relax_rollout.staleness import StalenessBound

MODES = ("colocate", "partial", "async")
WAY = re.compile(r"colocate|partial:\d+|async:\d+(:keep)?(@[1-9]\d*)?")
TRAINER = ("fetch", "log_probs", "ref_log_probs", "train", "train_wait")
"""Phases of a step in which the trainer works."""
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PUSH = ("pause", "weight_update", "sleep_wake", "resume")
MODEL_GOAL = 0.15
"""Most that a measured step may be from the model's, as a share of it."""


def way_of(text: str) -> str:
    """A way of the command line."""
    if not WAY.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: colocate, partial:N, async:N, async:N:keep, async:N@G or async:N:keep@G is expected, N being "
            "--max-staleness and G the GPUs that generate"
        )
    return text


def split(way: str) -> tuple[str, int]:
    """Mode and staleness of ``async:2@4``."""
    mode, *rest = way.partition("@")[0].split(":")
    return mode, int(rest[0]) if rest else 0


def generating_gpus(way: str, arguments: argparse.Namespace) -> int:
    """GPUs that do nothing but generate; 0 without GPUs, and where all of them do both."""
    if not GPU or split(way)[0] != "async":
        return 0
    return int(way.partition("@")[2] or arguments.rollout_num_gpus)


def run_name(way: str) -> str:
    return way.replace(":", "-")


def way_of_run(name: str) -> str:
    """The way of which :func:`run_name` is the name."""
    return name.replace("-", ":")


def open_groups(way: str, arguments: argparse.Namespace) -> int:
    """Groups that may be open at once: as many as the staleness allows."""
    return int(arguments.batch) * (split(way)[1] + 1)


def words(way: str, arguments: argparse.Namespace) -> list[str]:
    """Options of `relax train` for one way."""
    mode, staleness = split(way)
    generating = generating_gpus(way, arguments)
    training = arguments.gpus - generating if GPU else 0
    groups = open_groups(way, arguments)
    options = ["--fully-async" if mode == "async" else "--colocate", "--actor-num-gpus-per-node", str(training)]
    if mode == "async":
        options += ["--rollout-num-gpus", str(generating)] if GPU else []
        options += ["--no-recompute-kv-cache-after-weight-updates"] if ":keep" in way else []
    if mode != "colocate":
        options += ["--partial-rollout", "--max-staleness", str(staleness), "--over-sampling-batch-size", str(groups)]
    if GPU:
        options += ["--sglang-mem-fraction-static", "0.85" if mode == "async" else str(arguments.mem_fraction)]
    most = min(arguments.samples * groups, arguments.max_running_requests)
    model = arguments.model_dir or EXAMPLE / "model"
    return [
        *("--hf-checkpoint", str(model), "--prompt-data", str(EXAMPLE / "data" / "train.jsonl")),
        *("--apply-chat-template", "--custom-rm-path", "bench_hooks:reward", "--lr", "1e-6", "--use-tis"),
        *("--custom-generate-function-path", "bench_hooks:generate"),
        *(
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            str(max(arguments.cap_tokens + 512, 16384 if GPU else 4096)),
        ),
        *("--rollout-max-context-len", str(arguments.cap_tokens + 512)),
        *("--rollout-max-response-len", str(arguments.cap_tokens), "--rollout-seed", "1234"),
        *("--rollout-batch-size", str(arguments.batch), "--n-samples-per-prompt", str(arguments.samples)),
        *("--global-batch-size", str(arguments.batch * arguments.samples)),
        *(
            "--num-rollout",
            str(warm_up(way) + arguments.rollouts + split(way)[1]),
            "--sglang-max-running-requests",
            str(most),
        ),
        *(RECOMPUTE if GPU else ()),
        *(() if GPU else ("--sglang-max-total-tokens", str(min(most * (arguments.cap_tokens + 64), 65536)))),
        *options,
        *arguments.options,
    ]


def warm_up(way: str) -> int:
    """Steps until the groups that were all started at once are trained, and those after them have spread out."""
    return 2 * split(way)[1] + 1


def order(way: str, arguments: argparse.Namespace) -> tuple[int, int, int, str]:
    """By which ways are sorted: mode, staleness, split, and the rest."""
    mode, staleness = split(way)
    return MODES.index(mode), staleness, generating_gpus(way, arguments), way


def figures(way: str, arguments: argparse.Namespace, folder: Path) -> dict[str, float] | None:
    """Means over the steps that are counted, from ``metrics.jsonl``; None for a way that has none."""
    path = folder / "runs" / run_name(way) / "metrics.jsonl"
    if not path.exists():  # it ended before its first step
        return None
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row][warm_up(way) :][: arguments.rollouts]
    if not steps:
        return None

    def mean(*names: str) -> float:
        return statistics.fmean(sum(row.get(name) or 0.0 for name in names) for row in steps)

    step = mean("time/step")
    trained = mean("rollout/response_length") * arguments.batch * arguments.samples
    found = {
        "steps": float(len(steps)),
        "trained tokens/s": trained / step,
        "step, s": step,
        "  longest, s": max(row["time/step"] for row in steps),
        "trainer works, s": mean(*(f"time/{phase}" for phase in TRAINER)),
        "engines": mean("engines/serving"),
        "push, switch, s": mean(*(f"time/{phase}" for phase in PUSH)),
        "push alone, s": mean("time/weight_update"),
        "generation alone, s": mean("time/generate"),
        "trainer waits, s": mean("time/wait_for_rollout"),
        "trainer idle, %": 100 * mean("async/trainer_idle_share"),
        "engines idle, %": 100 * mean("async/engine_idle_share"),
        "engines paused, %": 100 * mean("async/engine_paused_share"),
        "requests running": mean("async/running_requests_mean"),
        "prefilled again / trained": mean("rollout/reprefilled_tokens") / trained,
        "staleness mean": mean("staleness/mean"),
        "staleness max": max(row["staleness/max"] for row in steps),
    }
    if split(way)[0] == "async":
        found["step / (work + push)"] = step / (found["trainer works, s"] + found["push, switch, s"])
    return found


def every_way(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """The figures of all ways that have run in a folder and fit on so many GPUs, sorted."""
    ways = (way_of_run(path.name) for path in (folder / "runs").iterdir())
    fitting = (
        way for way in ways if WAY.fullmatch(way) and not (GPU and generating_gpus(way, arguments) >= arguments.gpus)
    )
    there = sorted(fitting, key=lambda each: order(each, arguments))
    every = {each: figures(each, arguments, folder) for each in there}
    return {each: column for each, column in every.items() if column is not None}


def modelled(ways: Iterable[str], arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds of a step of each way, as the model has them with the figures of the colocate run."""
    run = str(folder / "runs" / "colocate")
    figures = Figures(SimulateSettings(from_run=run, engine_half=arguments.engine_half))
    lengths = Lengths(figures.draw, n=arguments.samples, prompt=figures.number("prompt_length"), seed=1234)
    half = figures.table["engine_half"]
    print(f"the model: engine-rate {figures.number('engine_rate'):.0f}, engine-half {half.value:.4g} ({half.source})")
    found = {}
    for way in ways:
        mode, staleness = split(way)
        gpus = int(arguments.gpus) if GPU else 1  # the two cores of a CPU: one side after the other, or one for each
        generating = generating_gpus(way, arguments)
        plan = Plan(
            mode=mode,
            in_turn=mode != "async",
            train_gpus=gpus - generating,
            engines=generating or gpus,
            keeps_cache=":keep" in way,
            bound=StalenessBound(batch=arguments.batch, depth=open_groups(way, arguments), max_staleness=staleness),
        )
        found[way] = simulate(plan, figures.rates(), lengths, steps=200).seconds
    return found


def report(found: dict[str, dict[str, float]]) -> None:
    """Prints the table, one column for each way."""
    names = list(dict.fromkeys(name for column in found.values() for name in column))
    if "colocate" in found:
        names.append("x colocate")
        base = found["colocate"]["trained tokens/s"]
        for column in found.values():
            column["x colocate"] = column["trained tokens/s"] / base
    width = max([12, *(len(way) + 2 for way in found)])
    print(f"{'':28}" + "".join(f"{way:>{width}}" for way in found))
    for name in names:
        texts = (f"{c[name]:.{1 if c[name] >= 100 else 2}f}" if name in c else "" for c in found.values())
        print(f"{name:28}" + "".join(f"{text:>{width}}" for text in texts))


def parse() -> argparse.Namespace:
    parser = task_parser(__doc__)
    parser.add_argument(
        "--ways",
        nargs="+",
        type=way_of,
        default=["colocate", "partial:1", "async:2"],
        help="colocate, partial:N, async:N, async:N:keep, async:N@G, async:N:keep@G",
    )
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="in all; default: those there are")
    parser.add_argument(
        "--rollout-num-gpus", type=int, help="of them that generate with async without @G; default: half"
    )
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of their logarithm; 0: all alike")
    parser.add_argument("--cap-tokens", type=int, help="longest response; default: the mean")
    parser.add_argument("--engine-half", type=float, help="for the model, as `relax simulate` takes it")
    parser.add_argument("--max-running-requests", type=int, default=512, help="of an engine")
    parser.add_argument("--rollouts", type=int, default=20, help="that are counted")
    parser.add_argument("--mem-fraction", type=float, default=0.6, help="of a shared GPU's memory, for the engine")
    arguments = parser.parse_args()
    if GPU and arguments.gpus < 2:
        parser.error("two GPUs are needed: one that trains and one that generates")
    arguments.rollout_num_gpus = arguments.rollout_num_gpus or arguments.gpus // 2
    arguments.cap_tokens = arguments.cap_tokens or round(arguments.mean_tokens)
    for way in arguments.ways:
        generating = generating_gpus(way, arguments)
        if "@" in way and not GPU:
            parser.error(f"{way}: there are no GPUs to divide; leave out @ and what follows")
        if GPU and generating >= arguments.gpus:
            parser.error(f"{way}: {generating} GPUs that generate leave none of --gpus {arguments.gpus} to train")
    return arguments


def main() -> None:
    arguments = parse()
    folder = prepare(arguments)
    for each in arguments.ways:
        train(words(each, arguments), run_name(each), folder)
    print(f"logs in {folder}")
    found = every_way(arguments, folder)
    predicted = modelled(found, arguments, folder) if "colocate" in found else {}
    for each, seconds in predicted.items():
        found[each] |= {"model: step, s": seconds, "measured / model": found[each]["step, s"] / seconds}
    report(found)
    if predicted:
        off = {each: abs(column["measured / model"] - 1) for each, column in found.items()}
        most = max(off, key=lambda each: off[each])
        print(f"farthest from the model: {most}, by {off[most]:.0%} (goal: at most {MODEL_GOAL:.0%})")


if __name__ == "__main__":
    main()
