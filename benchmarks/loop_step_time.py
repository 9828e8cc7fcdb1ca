"""Measures where the time of a training step goes, and the share that is none of generate, log-probs and train.

    uv run python benchmarks/loop_step_time.py                    # the arithmetic example, 12 steps
    uv run python benchmarks/loop_step_time.py --steps 5 -- ...   # the options of another run after `--`

It runs `relax train` and reads its `metrics.jsonl`. The first two steps are left out: they warm up. The limit: at most
15 % of a step is neither generation nor log-probs nor training.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USEFUL = ("generate", "log_probs", "ref_log_probs", "train")
LIMIT = 0.15
WARM_UP = 2


def run(steps: int, options: list[str], folder: Path) -> list[dict[str, float]]:
    """The metrics of every step of one run."""
    options = options or ["--config", str(ROOT / "examples/arithmetic/train.toml")]
    command = [str(Path(sys.executable).with_name("relax")), "train", *options]
    command += ["--num-rollout", str(steps + WARM_UP), "--tb-experiment-name", "bench"]
    subprocess.run(command, cwd=folder, check=True)
    lines = (folder / "runs" / "bench" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def report(steps: list[dict[str, float]]) -> float:
    """Prints the table and returns the share of everything else."""
    total = sum(s["time/step"] for s in steps)
    phases = sorted({k for s in steps for k in s if k.startswith("time/")} - {"time/step"})
    print(f"{len(steps)} steps, {total / len(steps):.3f} s each")
    useful = 0.0
    for phase in phases:
        seconds = sum(s.get(phase) or 0.0 for s in steps)
        counts = phase.removeprefix("time/") in USEFUL
        useful += seconds if counts else 0.0
        mark = "" if counts else "  (overhead)"
        print(f"  {phase.removeprefix('time/'):<16}{seconds / len(steps):8.3f} s  {seconds / total:6.1%}{mark}")
    overhead = 1 - useful / total
    print(f"neither generate nor log-probs nor train: {overhead:.1%} of a step")
    print(f"limit: {LIMIT:.0%}, used: {overhead / LIMIT:.2f} of it")
    return overhead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("options", nargs="*", help="options of `relax train`, after `--`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = run(arguments.steps, arguments.options, Path(folder))
    return 0 if report(steps[WARM_UP:]) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
