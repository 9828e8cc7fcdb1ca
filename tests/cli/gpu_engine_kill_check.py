"""A run of `relax train` whose only engine is killed -9 while it generates. Prints one line.

    python tests/cli/gpu_engine_kill_check.py [--model-dir FOLDER] [--limit 120] [--rollouts 5] [--out FOLDER]
    python tests/cli/gpu_engine_kill_check.py --fully-async [--max-staleness 1]         # on two GPUs

With colocate on one GPU, or fully async, one GPU for each side. The engine has to come back by a restart and a push of
the current weights, and to generate again within the limit; the trainer has to be the same process afterwards; every
prompt has to be trained once, with colocate in order; SGLang's log-probs have to be those of the trainer, before and
after. Log-probs of older weights differ anyway, so with a `--max-staleness` above its default of 0 they are only shown.
Without a GPU the same is done on CPU with a tiny model. Exits with 1 if anything of that is not so.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cli.gpu_layouts_check import GPU, MEAN_LIMIT, REWARD, make_model
from relax_cli.run.debug_data import load_groups

DEADLINE_S = 900.0
"""Seconds after which a wait is given up; far more than a step or a start takes."""


def words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *("--hf-checkpoint", str(arguments.model_dir), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--apply-chat-template", "--custom-rm-path", "digits_reward:reward"),
        *("--rollout-batch-size", str(arguments.batch), "--n-samples-per-prompt", str(arguments.samples)),
        *("--rollout-max-response-len", str(arguments.tokens), "--rollout-max-context-len", "2048"),
        *("--num-epoch", "1", "--lr", "1e-5", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "4096", "--tb-experiment-name", "run"),
        *(["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.5"] if GPU else []),
        *("--sglang-load-snapshot-publish-interval", "1"),  # so that /v1/loads tells of each forward pass
        *(async_words(arguments.max_staleness) if arguments.fully_async else colocate_words(folder)),
    ]


def colocate_words(folder: Path) -> list[str]:
    saved = ["--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.jsonl")]
    return ["--colocate", *saved, *(["--actor-num-gpus-per-node", "1"] if GPU else [])]


def async_words(staleness: int) -> list[str]:
    stale = ["--max-staleness", str(staleness), *(["--use-tis"] if staleness else [])]
    return ["--fully-async", *stale, *(["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"] if GPU else [])]


class Run:
    """A running `relax train`."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder, self.log = folder, folder / "run.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            if self.process.poll() is not None:
                raise SystemExit(f"FAIL the run ended while {what} was waited for:\n{self.log.read_text()[-3000:]}")
            if time.monotonic() > end:
                raise SystemExit(f"FAIL no {what} after {DEADLINE_S:.0f} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if "time/step" in row]

    def server(self, besides: int = 0) -> psutil.Process | None:
        """The process of the SGLang server itself."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if (
                    process.cmdline()[1:3] == ["-m", "relax_rollout.engines.sglang.process.launch"]
                    and process.pid != besides
                ):
                    return process
        return None

    def trainer(self) -> tuple[int, float]:
        """Process id and time of creation of the only rank of the trainer."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                # Ray appends the method that runs.
                if process.name().startswith("ray::TrainActor"):
                    return process.pid, process.create_time()
        return 0, 0.0

    def generates(self, besides: int = 0) -> bool:
        """Whether requests run at the server."""
        with contextlib.suppress(psutil.Error, httpx.HTTPError, OSError, KeyError, IndexError):
            if (server := self.server(besides)) is not None:
                command = server.cmdline()
                url = f"http://127.0.0.1:{command[command.index('--port') + 1]}/v1/loads"
                key = (self.folder / "runs" / "run" / "engine_key").read_text().strip()
                headers = {"authorization": f"Bearer {key}"}
                loads = httpx.get(url, headers=headers, trust_env=False, timeout=5).json()["loads"]
                return bool(loads[0]["num_running_reqs"] > 0)
        return False


def check(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Figures, the faults among them beginning with FAIL."""
    run = Run([sys.executable, "-m", "relax_cli.main", "train", *words(arguments, folder)], folder)
    try:
        run.until(lambda: len(run.steps()) >= 2, "second step")
        run.until(run.generates, "running request")
        server, trainer = run.server(), run.trainer()
        assert server is not None, "it answered a moment ago"
        assert trainer[0], "it has trained"
        before = len(run.steps())
        server.kill()
        killed = time.monotonic()
        run.until(lambda: run.generates(besides=server.pid), "running request at the new server")
        back_s = time.monotonic() - killed
        unharmed = run.trainer() == trainer
        run.process.wait(timeout=DEADLINE_S)
    finally:
        run.process.terminate()
        run.process.wait(timeout=60)
    if run.process.returncode:
        return [f"FAIL exit {run.process.returncode}: {run.log.read_text()[-3000:]}"]
    steps = run.steps()
    numbers = [row["step"] for row in steps]
    in_order = numbers == list(range(arguments.rollouts))
    usual = [row["time/step"] for row in steps[1:before]]
    return [
        *("ok  " if back_s <= arguments.limit else "FAIL",),
        f"generates again {back_s:.1f} s after the kill in rollout {before} (limit {arguments.limit:.0f} s);",
        "the trainer is the same process;" if unharmed else "FAIL the trainer is another process;",
        prompts_of(arguments, folder, steps),
        f"in {len(steps)} steps;" if in_order else f"FAIL steps {numbers};",
        f"{steps[-1]['engines/restarts']:.0f} restart;" if steps[-1]["engines/restarts"] == 1 else "FAIL restarts;",
        *log_probs_of(arguments, steps, before),
        f"steps took {max(usual):.1f} s before, {steps[-1]['time/step']:.1f} s at the end",
    ]


def prompts_of(arguments: argparse.Namespace, folder: Path, steps: Sequence[Mapping[str, Any]]) -> str:
    """In words, what became of the prompts."""
    last, wanted = steps[-1], arguments.rollouts * arguments.batch
    # The metrics are of the moment before the last step was trained.
    trained, dropped = last["prompts/trained"] + arguments.batch, last["prompts/dropped"]
    others = last["prompts/out"] + last["prompts/buffered"] - arguments.batch
    told = f"{trained:.0f} of {wanted} prompts trained, {dropped:.0f} dropped, {max(0, others):.0f} elsewhere"
    if not arguments.fully_async:
        files = (folder / f"rollout_{i}.jsonl" for i in range(arguments.rollouts))
        ids = [group.prompt.prompt_id for file in files for group in load_groups(file)]
        if ids != list(range(wanted)):
            return f"FAIL {told}: {ids}"
    return told if (trained, dropped) == (wanted, 0) else f"FAIL {told}"


def log_probs_of(arguments: argparse.Namespace, steps: Sequence[Mapping[str, Any]], before: int) -> list[str]:
    """In words, how far the engine's log-probs are from the trainer's before and after the engine was killed."""
    means = [row["train/logprob_diff_mean"] for row in steps]
    judged = not (arguments.fully_async and arguments.max_staleness)
    # The step in which it is killed has samples of both servers.
    then, later = max(means[:before]), max(means[before:])
    fault = "FAIL " if judged and not max(then, later) < MEAN_LIMIT else ""
    limit = f"limit {MEAN_LIMIT:g}" if judged else "with older tokens, not judged"
    return [
        f"{fault}log-probs of engine and trainer differ by at most {then:.2g} in the mean of a step before,",
        f"{later:.2g} after ({limit});",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="a Hugging Face folder; default: a random Qwen3 of 0.6 B")
    parser.add_argument("--out", type=Path, help="keep model, logs and metrics here")
    parser.add_argument("--fully-async", action="store_true", help="one GPU trains, the other one generates")
    parser.add_argument("--max-staleness", type=int, default=0, help="with --fully-async")
    parser.add_argument("--rollouts", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32 if GPU else 4, help="prompts a rollout")
    parser.add_argument("--samples", type=int, default=8 if GPU else 4, help="responses a prompt")
    parser.add_argument("--tokens", type=int, default=1024 if GPU else 60, help="longest response")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until it has to generate again")
    arguments = parser.parse_args()
    if GPU and arguments.fully_async and torch.cuda.device_count() < 2:
        parser.error("--fully-async needs two GPUs: one that trains and one that generates")
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-kill-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits_reward.py").write_text(REWARD)
    prompts = (json.dumps({"input": f"{i}+{i % 7}="}) + "\n" for i in range(arguments.rollouts * arguments.batch))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    if arguments.model_dir is None:
        arguments.model_dir = folder / "dense"
        make_model("dense", arguments.model_dir)
    arguments.model_dir = arguments.model_dir.absolute()
    figures = check(arguments, folder)
    print(" ".join(figures), flush=True)
    print(f"logs in {folder}")
    sys.exit(1 if any("FAIL" in figure for figure in figures) else 0)


if __name__ == "__main__":
    main()
