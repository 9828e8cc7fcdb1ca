"""A run of `relax train` of which an engine is killed -9 while it generates. Prints one line.

    python tests/cli/gpu_engine_kill_check.py [--model-dir FOLDER] [--limit 120] [--rollouts 5] [--out FOLDER]
    python tests/cli/gpu_engine_kill_check.py --fully-async [--max-staleness 1]         # on two GPUs
    python tests/cli/gpu_engine_kill_check.py --fully-async --engines 2                 # on four: 2 train, 2 generate

With colocate on one GPU, or fully async, one GPU for each side, or as many as `--engines` says. The engine has to come
back by a restart and a push of the current weights, and to generate again within the limit; the trainer has to be the
same processes afterwards; every prompt has to be trained once, with colocate in order; SGLang's log-probs have to be
those of the trainer, before and after. Log-probs of older weights differ anyway, so with a `--max-staleness` above its
default of 0 they are only shown. Where there are other engines, each of them has to go on, so that steps end while the
one is gone; it says how fast they are before and meanwhile.
Without a GPU the same is done on CPU with a tiny model, several engines on as many nodes of a Ray cluster on this
machine. Exits with 1 if anything of that is not so.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cli.gpu_layouts_check import GPU, MEAN_LIMIT, REWARD, make_model
from cli.ray_nodes import Cluster
from relax_cli.run.debug_data import load_groups

T = TypeVar("T")
DEADLINE_S = 900.0
"""Seconds after which a wait is given up; far more than a step or a start takes."""


def words(arguments: argparse.Namespace, folder: Path) -> list[str]:
    return [
        *("--hf-checkpoint", str(arguments.model_dir), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--apply-chat-template", "--custom-rm-path", f"{folder}/digits_reward.py:reward"),
        *("--rollout-batch-size", str(arguments.batch), "--n-samples-per-prompt", str(arguments.samples)),
        *("--rollout-max-response-len", str(arguments.tokens), "--rollout-max-context-len", "2048"),
        *("--num-epoch", "1", "--lr", "1e-5", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", "4096", "--tb-experiment-name", "run"),
        *(["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.5"] if GPU else []),
        *("--sglang-load-snapshot-publish-interval", "1"),  # so that /v1/loads tells of each forward pass
        *(async_words(arguments) if arguments.fully_async else colocate_words(folder)),
    ]


def colocate_words(folder: Path) -> list[str]:
    saved = ["--save-debug-rollout-data", str(folder / "rollout_{rollout_id}.jsonl")]
    return ["--colocate", *saved, *(["--actor-num-gpus-per-node", "1"] if GPU else [])]


def async_words(arguments: argparse.Namespace) -> list[str]:
    engines = str(arguments.engines)
    if GPU:
        where = ["--actor-num-gpus-per-node", engines, "--rollout-num-gpus", engines]
    else:  # an engine a node
        where = ["--actor-num-gpus-per-node", "0", "--actor-num-nodes", engines]
    stale = ["--max-staleness", str(arguments.max_staleness), *(["--use-tis"] if arguments.max_staleness else [])]
    return ["--fully-async", *stale, *where]


@contextlib.contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster | None]:
    """A Ray cluster for a run without GPUs that needs more than one node; None where one is enough."""
    if nodes == 1 or GPU:
        yield None
        return
    cluster = Cluster(cpus=6)
    try:
        for _ in range(nodes):
            cluster.start_node()
        yield cluster
    finally:
        cluster.close()


class Run:
    """A running `relax train`."""

    def __init__(self, words: list[str], folder: Path, cluster: Cluster | None) -> None:
        self.folder, self.log = folder, folder / "run.log"
        command = [sys.executable, "-m", "relax_cli.main", "train", *words]
        command += ["--ray-address", cluster.address] if cluster else []
        environment = os.environ | (cluster.environment if cluster else {})
        with self.log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)
        self._tops = [self.process.pid, *(node.process.pid for node in (cluster.nodes if cluster else ()))]

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Waits until the condition is true, and gives what it returned."""
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            if self.process.poll() is not None:
                raise SystemExit(f"FAIL the run ended while {what} was waited for:\n{self.log.read_text()[-3000:]}")
            if time.monotonic() > end:
                raise SystemExit(f"FAIL no {what} after {DEADLINE_S:.0f} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return found

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if "time/step" in row]

    def servers(self) -> set[psutil.Process]:
        """The processes of the SGLang servers themselves."""
        return self._processes(lambda p: p.cmdline()[1:3] == ["-m", "relax_rollout.engines.sglang.process.launch"])

    def ranks(self) -> set[psutil.Process]:
        """The processes of the trainer; one that was started anew is another one, also with the same process id."""
        return self._processes(lambda p: p.name().startswith("ray::TrainActor"))  # Ray appends the method that runs

    def _processes(self, wanted: Callable[[psutil.Process], bool]) -> set[psutil.Process]:
        """Of all that the run has started, on every node."""
        found = set()
        for top in self._tops:
            for process in psutil.Process(top).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if wanted(process):
                        found.add(process)
        return found

    def generating(self, besides: Collection[psutil.Process] = ()) -> psutil.Process | None:
        """A server at which requests run."""
        for server in self.servers().difference(besides):
            # A server that starts or ends has no whole command line, no key, and no answer.
            with contextlib.suppress(psutil.Error, httpx.HTTPError, OSError, KeyError, IndexError, ValueError):
                command = server.cmdline()
                host, port = (command[command.index(name) + 1] for name in ("--host", "--port"))
                key = (self.folder / "runs" / "run" / "engine_key").read_text().strip()
                headers = {"authorization": f"Bearer {key}"}
                url = f"http://{host}:{port}/v1/loads"
                loads = httpx.get(url, headers=headers, trust_env=False, timeout=5).json()["loads"]
                if loads[0]["num_running_reqs"] > 0:
                    return server
        return None


def check(arguments: argparse.Namespace, folder: Path, cluster: Cluster | None) -> list[str]:
    """Figures, the faults among them beginning with FAIL."""
    run = Run(words(arguments, folder), folder, cluster)
    try:
        first = 2 if arguments.engines == 1 else 5  # several steps tell how fast several engines are
        run.until(lambda: len(run.steps()) >= first, f"{first} steps")
        victim = run.until(run.generating, "running request")
        servers, ranks, before = run.servers(), run.ranks(), len(run.steps())
        assert ranks, "they have trained"
        victim.kill()
        killed = time.monotonic()
        run.until(lambda: run.generating(besides=servers), "running request at the new server")
        back_s, joined = time.monotonic() - killed, len(run.steps())
        unharmed = run.ranks() == ranks
        run.process.wait(timeout=DEADLINE_S)
    finally:
        run.process.terminate()
        run.process.wait(timeout=60)
    if run.process.returncode:
        return [f"FAIL exit {run.process.returncode}: {run.log.read_text()[-3000:]}"]
    steps, log = run.steps(), run.log.read_text()
    numbers = [row["step"] for row in steps]
    in_order = numbers == list(range(arguments.rollouts))
    last = steps[-1]
    all_serve = (last["engines/restarts"], last["engines/serving"]) == (1, arguments.engines)
    return [
        *("ok  " if back_s <= arguments.limit else "FAIL",),
        f"generates again {back_s:.1f} s after the kill in rollout {before} (limit {arguments.limit:.0f} s);",
        "the trainer is the same process;" if unharmed else "FAIL the trainer is another process;",
        prompts_of(arguments, folder, steps),
        f"in {len(steps)} steps;" if in_order else f"FAIL steps {numbers};",
        "1 restart;" if all_serve else "FAIL restarts, or engines that serve at the end;",
        *([others_of(log, arguments.engines, steps[1:before], steps[before:joined])] if arguments.engines > 1 else []),
        *log_probs_of(arguments, steps, before),
        f"steps took {seconds_of(steps[1:before]):.1f} s before,",
        f"{seconds_of(steps[joined + 1 :] or steps[-1:]):.1f} s after it had joined (means)",
    ]


def seconds_of(steps: Sequence[Mapping[str, Any]]) -> float:
    """Mean of the steps; NaN without any."""
    return statistics.fmean(row["time/step"] for row in steps) if steps else math.nan


def others_of(log: str, engines: int, before: Sequence[Mapping[str, Any]], gone: Sequence[Mapping[str, Any]]) -> str:
    """In words, how the other engines did while the one was gone.

    Args:
        log: what the run has printed.
        engines: of the run.
        before: steps before it was killed.
        gone: steps that ended after that and before it generated again.
    """
    lost = set(re.findall(r"(engine\d+) was lost", log))
    others = {f"engine{i}" for i in range(engines)} - lost
    if len(others) != engines - 1:
        return f"FAIL lost {sorted(lost)};"
    # The first of them began with all engines.
    gone = gone[1:] or gone
    if not all(any(row[f"async/engine_busy_share/{name}"] > 0 for row in gone) for name in others):
        return f"FAIL the others did not go on: {len(gone)} steps while it was gone;"
    return (
        f"an engine that was busy made {rate_of(before, engines):.0f} tokens/s before, each of the others "
        f"{rate_of(gone, engines):.0f} while it was gone, in {len(gone)} steps of {seconds_of(gone):.1f} s;"
    )


def rate_of(steps: Sequence[Mapping[str, Any]], engines: int) -> float:
    """Tokens that one engine generates in a second in which it has requests."""
    busy_s = sum(row["time/step"] * row["async/engine_busy_share"] * engines for row in steps)
    return sum(row["rollout/tokens"] for row in steps) / busy_s if busy_s else math.nan


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="a Hugging Face folder; default: a random Qwen3 of 0.6 B")
    parser.add_argument("--out", type=Path, help="keep model, logs and metrics here")
    parser.add_argument("--fully-async", action="store_true", help="GPUs that train, and others that generate")
    parser.add_argument("--max-staleness", type=int, default=0, help="with --fully-async")
    parser.add_argument("--engines", type=int, default=1, help="with --fully-async, a GPU each; as many GPUs train")
    parser.add_argument("--rollouts", type=int, help="default: so many that the engine is back before the end")
    parser.add_argument("--batch", type=int, default=32 if GPU else 4, help="prompts a rollout")
    parser.add_argument("--samples", type=int, default=8 if GPU else 4, help="responses a prompt")
    parser.add_argument("--tokens", type=int, default=1024 if GPU else 60, help="longest response")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until it has to generate again")
    arguments = parser.parse_args()
    if arguments.engines > 1 and not arguments.fully_async:
        parser.error("--engines needs --fully-async")
    if GPU and arguments.fully_async and torch.cuda.device_count() < 2 * arguments.engines:
        parser.error(
            f"--fully-async with --engines {arguments.engines} needs {2 * arguments.engines} GPUs: half of them train, "
            "the others generate"
        )
    # Where others go on, the run may not end before the engine is back.
    arguments.rollouts = arguments.rollouts or (5 if arguments.engines == 1 else 20 if GPU else 200)
    return arguments


def main() -> None:
    arguments = parse()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-kill-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits_reward.py").write_text(REWARD)
    prompts = (json.dumps({"input": f"{i}+{i % 7}="}) + "\n" for i in range(arguments.rollouts * arguments.batch))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    if arguments.model_dir is None:
        arguments.model_dir = folder / "dense"
        make_model("dense", arguments.model_dir)
    arguments.model_dir = arguments.model_dir.absolute()
    with cluster_of(arguments.engines) as cluster:
        figures = check(arguments, folder, cluster)
    print(" ".join(figures), flush=True)
    print(f"logs in {folder}")
    sys.exit(1 if any("FAIL" in figure for figure in figures) else 0)


if __name__ == "__main__":
    main()
