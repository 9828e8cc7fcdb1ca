"""Measures what partial rollout gains where response lengths have a long tail.

    uv run python benchmarks/partial_rollout.py                           # the long-tailed arithmetic example, on CPU
    python benchmarks/partial_rollout.py --shape 4b --mean-tokens 2048 --cap-tokens 8192 --no-eval   # on one GPU
    python benchmarks/partial_rollout.py --model-dir FOLDER ...           # the same with a model of yours

`relax train --colocate` runs three times on the same prompts, seed and forced lengths: every rollout waits for all its
responses (plain); it starts more prompts than it takes, and what is interrupted starts again (restart); the same, and
what is interrupted keeps its tokens (partial). Printed is, after the first rollouts, how many tokens of responses that
were trained a second of wall time gives, and why; at the end the ratio of partial to the better of the others, and how
far apart the held-out rewards are after equally many samples.

With `--out FOLDER` the settings may be run one by one (`--settings plain`, then `--settings restart partial`): those
that are there are compared. A model of yours or a random one is measured for speed alone (`--no-eval`).
"""

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic"
GPU = torch.cuda.is_available()
SETTINGS = ("plain", "partial", "restart")
DIFFERENT = ("partial-rollout", "over-sampling-batch-size", "max-staleness", "eval-")
"""Options of the example that the benchmark sets itself."""
ANSWER_TOKENS = 8
"""Cap of a response without a tail."""
GOAL = 1.3
"""Times the tokens per second of the better of the two settings without partial rollout."""
REWARD_GOAL = 0.03
"""Most difference between the held-out rewards."""
HOOKS = '''"""What the benchmark asks of its runs."""

import sys

sys.path.insert(0, {folder!r})

from longtail import long_tailed

generate = long_tailed(mean={mean}, spread={spread})


def reward(sample):
    """Share of even tokens: a random model gets another value for each response."""
    return sum(token % 2 == 0 for token in sample.tokens) / len(sample.tokens)
'''


def warm_up(setting: str, arguments: argparse.Namespace) -> int:
    """Rollouts of a setting that are not counted: until as many prompts come in as go out."""
    if setting == "plain" and arguments.no_eval:
        return 1  # each rollout is like the one before; with an evaluation all have to train equally many samples
    warm: int = arguments.warm_up
    return warm


def rollouts(setting: str, arguments: argparse.Namespace) -> int:
    """All rollouts of a setting."""
    return warm_up(setting, arguments) + int(arguments.rollouts)


def task_words(setting: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Options of the task: model, prompts, lengths, training."""
    if arguments.model_dir is None:
        lines = (EXAMPLE / "longtail.toml").read_text().replace("${config_dir}", str(EXAMPLE)).splitlines(keepends=True)
        (folder / "task.toml").write_text("".join(line for line in lines if not line.startswith(DIFFERENT)))
        words = ["--config", str(folder / "task.toml"), "--seed", str(arguments.seed)]
    else:
        words = [
            *("--hf-checkpoint", str(arguments.model_dir), "--prompt-data", str(EXAMPLE / "data" / "train.jsonl")),
            *("--apply-chat-template", "--custom-rm-path", "bench_hooks:reward", "--lr", "1e-6", "--use-tis"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", str(arguments.cap_tokens + 1024)),
            *("--rollout-max-context-len", str(arguments.cap_tokens + 512)),
            *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ]
    if GPU:
        words += ["--actor-num-gpus-per-node", "1", "--sglang-mem-fraction-static", str(arguments.mem_fraction)]
    most = arguments.samples * max(arguments.batch, arguments.depth, arguments.restart_depth)
    words += ["--sglang-max-running-requests", str(most)]
    if not GPU:
        words += ["--sglang-max-total-tokens", str(min(most * arguments.cap_tokens, 65536))]
    if not arguments.no_eval:
        words += [
            "--eval-prompt-data",
            "heldout",
            str(EXAMPLE / "data" / "heldout.jsonl"),
            "--eval-max-response-len",
            "8",
        ]
        words += ["--eval-interval", str(rollouts(setting, arguments)), "--skip-eval-before-train"]
        words += ["--n-samples-per-eval-prompt", str(arguments.eval_samples)]
    return [
        *words,
        *("--custom-generate-function-path", "bench_hooks:generate"),
        *("--rollout-max-response-len", str(arguments.cap_tokens), "--rollout-seed", str(arguments.seed)),
        *("--rollout-batch-size", str(arguments.batch), "--n-samples-per-prompt", str(arguments.samples)),
        *("--global-batch-size", str(arguments.batch * arguments.samples)),
        *("--num-rollout", str(rollouts(setting, arguments))),
        *arguments.options,
    ]


def setting_words(setting: str, arguments: argparse.Namespace) -> list[str]:
    """Options that make the difference."""
    if setting == "plain":
        return ["--no-partial-rollout", "--over-sampling-batch-size", str(arguments.batch)]
    if setting == "restart":
        depth, keep = arguments.restart_depth, "--no-partial-rollout"
    else:
        depth, keep = arguments.depth, "--partial-rollout"
    return [keep, "--over-sampling-batch-size", str(depth), "--max-staleness", str(arguments.max_staleness)]


def train(words: Sequence[str], name: str, folder: Path) -> None:
    """One run of `relax train`; leaves its metrics in ``runs/NAME`` of ``folder``. A failure ends this program."""
    command = [sys.executable, "-m", "relax_cli.main", "train", *words, "--tb-experiment-name", name]
    began = time.monotonic()
    log = folder / f"{name}.log"
    with log.open("w") as out:
        done = subprocess.run(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{name}: exit {done.returncode}\n{log.read_text()[-3000:]}")
    print(f"{name}: {time.monotonic() - began:.0f} s with the start", flush=True)


def run(setting: str, arguments: argparse.Namespace, folder: Path) -> None:
    """The run of a setting."""
    words = ["--colocate", *task_words(setting, arguments, folder), *setting_words(setting, arguments)]
    train(words, setting, folder)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one setting gave, over the rollouts that are counted.

    Attributes:
        rate: tokens of trained responses per second of wall time.
        samples_rate: trained responses per second of wall time.
        step_s: wall time of a step: rollout, training, push.
        phases: seconds of its parts, by name.
        length: tokens of a trained response, mean.
        generated: tokens that the engines sampled, as a multiple of those that were trained.
        reprefilled: tokens whose keys and values were computed again, as a share of the trained ones.
        interruptions: of a trained response, mean.
        staleness: mean and most.
        waited_s: seconds a step for groups at their deadline.
        heldout: reward on held-out prompts after the last rollout; NaN without.
    """

    rate: float
    samples_rate: float
    step_s: float
    phases: dict[str, float]
    length: float
    generated: float
    reprefilled: float
    interruptions: float
    staleness: tuple[float, float]
    waited_s: float
    heldout: float


def figures(rows: Sequence[dict[str, Any]], skipped: int) -> Figures:
    """Reads them from the lines of ``metrics.jsonl``; the first ``skipped`` rollouts are left out."""
    steps = [row for row in rows if "time/step" in row][skipped:]
    assert steps, f"more than {skipped} rollouts are needed"

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name) or 0.0 for row in steps)

    seconds = sum(row["time/step"] for row in steps)
    samples = sum(row["rollout/samples"] for row in steps)
    tokens = sum(row["rollout/response_length"] * row["rollout/samples"] for row in steps)
    heldout = [row["eval/heldout/reward"] for row in rows if "eval/heldout/reward" in row]
    names = sorted({k for row in steps for k in row if k.startswith("time/")} - {"time/step", "time/eval"})
    return Figures(
        rate=tokens / seconds,
        samples_rate=samples / seconds,
        step_s=seconds / len(steps),
        phases={name.removeprefix("time/"): mean(name) for name in names},
        length=tokens / samples,
        generated=sum(row["rollout/tokens"] for row in steps) / tokens,
        reprefilled=sum(row["rollout/reprefilled_tokens"] for row in steps) / tokens,
        interruptions=mean("rollout/interruptions_per_sample"),
        staleness=(mean("staleness/mean"), max(row["staleness/max"] for row in steps)),
        waited_s=mean("rollout/waited_for_deadline_s"),
        heldout=heldout[-1] if heldout else math.nan,
    )


def load(setting: str, arguments: argparse.Namespace, folder: Path) -> Figures | None:
    """The figures of a setting that has run in this folder."""
    path = folder / "runs" / setting / "metrics.jsonl"
    if not path.exists():
        return None
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["rollout/samples"] = row.get("rollout/groups", 0) * arguments.samples
    return figures(rows, warm_up(setting, arguments))


def report(found: dict[str, Figures]) -> bool:
    """Prints the table and the comparison. True when the goals are met, or cannot be judged."""
    print(f"{'':24}" + "".join(f"{setting:>12}" for setting in found))
    lines: list[tuple[str, str, list[float]]] = [
        ("trained tokens/s", ".1f", [f.rate for f in found.values()]),
        ("trained responses/s", ".2f", [f.samples_rate for f in found.values()]),
        ("tokens a response", ".1f", [f.length for f in found.values()]),
        ("step, s", ".2f", [f.step_s for f in found.values()]),
        *(
            (f"  {name}, s", ".2f", [f.phases.get(name, 0.0) for f in found.values()])
            for name in sorted({n for f in found.values() for n in f.phases})
        ),
        ("  waited for deadlines, s", ".2f", [f.waited_s for f in found.values()]),
        ("sampled / trained", ".2f", [f.generated for f in found.values()]),
        ("prefilled again / trained", ".2f", [f.reprefilled for f in found.values()]),
        ("interruptions", ".2f", [f.interruptions for f in found.values()]),
        ("staleness mean", ".2f", [f.staleness[0] for f in found.values()]),
        ("staleness max", ".0f", [f.staleness[1] for f in found.values()]),
        ("held-out reward", ".3f", [f.heldout for f in found.values()]),
    ]
    for name, how, values in lines:
        if not all(math.isnan(v) for v in values):
            print(f"{name:26}" + "".join(f"{value:>12{how}}" for value in values))
    others = [f for setting, f in found.items() if setting != "partial"]
    if "partial" not in found or not others:
        return True
    ratio = found["partial"].rate / max(f.rate for f in others)
    print(f"trained tokens per second, partial / the better of the others: {ratio:.2f} (goal: at least {GOAL})")
    apart = max(abs(found["partial"].heldout - f.heldout) for f in others)
    if not math.isnan(apart):
        print(f"held-out reward, partial and the others: {apart:.3f} apart (goal: at most {REWARD_GOAL})")
    return ratio >= GOAL and not apart > REWARD_GOAL


def run_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that every comparison of runs has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep models, logs and metrics here")
    parser.add_argument("options", nargs="*", help="further options of `relax train`, after `--`")
    return parser


def run_folder(arguments: argparse.Namespace) -> Path:
    """The folder of the runs."""
    folder: Path = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-benchmark-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def task_parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options of a task of forced lengths, which :func:`prepare` lays out."""
    parser = run_parser(description)
    parser.add_argument("--model-dir", type=Path, help="a Hugging Face folder; default: the model of the example")
    parser.add_argument("--shape", choices=["dense", "4b"], help="a random Qwen3: of 0.6 B (tiny on CPU), or of 4 B")
    parser.add_argument("--mean-tokens", type=float, default=64.0, help="mean of the lengths, before the cap")
    parser.add_argument("--batch", type=int, default=8, help="prompts a step")
    parser.add_argument("--samples", type=int, default=4, help="responses a prompt")
    return parser


def prepare(arguments: argparse.Namespace) -> Path:
    """The folder of the runs, with the model and the functions that they ask for."""
    folder = run_folder(arguments)
    if arguments.shape is not None:
        sys.path.insert(0, str(ROOT / "tests"))
        from cli.gpu_layouts_check import make_model

        arguments.model_dir = folder / f"model-{arguments.shape}"
        if not (arguments.model_dir / "config.json").exists():
            make_model(arguments.shape, arguments.model_dir)
    hooks = HOOKS.format(folder=str(EXAMPLE), mean=arguments.mean_tokens, spread=arguments.spread)
    (folder / "bench_hooks.py").write_text(hooks)
    return folder


def parse() -> argparse.Namespace:
    """Reads the command line and fills in what follows from it."""
    parser = task_parser(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--spread", type=float, default=2.0, help="standard deviation of their logarithm")
    parser.add_argument("--cap-tokens", type=int, default=1000, help="longest response")
    parser.add_argument("--depth", type=int, help="prompts that partial has open at once; default: twice the batch")
    parser.add_argument("--restart-depth", type=int, help="prompts that restart has open; default: twice the batch")
    parser.add_argument("--max-staleness", type=int, default=6)
    parser.add_argument("--rollouts", type=int, default=95, help="that are counted")
    parser.add_argument("--warm-up", type=int, help="rollouts before them; default: the staleness + 1")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-eval", action="store_true", help="no held-out rewards")
    parser.add_argument("--eval-samples", type=int, default=8, help="responses to a held-out prompt")
    parser.add_argument("--mem-fraction", type=float, default=0.5, help="share of the GPU's memory for the engine")
    arguments = parser.parse_args()
    if (arguments.model_dir or arguments.shape) and not arguments.no_eval:
        parser.error("a model other than that of the example is measured for speed alone: add --no-eval")
    arguments.depth = arguments.depth or 2 * arguments.batch
    arguments.restart_depth = arguments.restart_depth or 2 * arguments.batch
    arguments.warm_up = arguments.max_staleness + 1 if arguments.warm_up is None else arguments.warm_up
    return arguments


def main() -> int:
    arguments = parse()
    folder = prepare(arguments)
    for setting in arguments.settings:
        run(setting, arguments, folder)
    every = {setting: load(setting, arguments, folder) for setting in SETTINGS}
    found = {setting: f for setting, f in every.items() if f is not None}
    print(f"logs in {folder}")
    return 0 if not found or report(found) else 1


if __name__ == "__main__":
    sys.exit(main())
