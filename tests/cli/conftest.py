"""Runs of the real command, for the tests from end to end."""

import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

DEADLINE_S = 600.0
"""Seconds after which a wait for a run is a failure; far more than a loaded machine needs."""


@dataclasses.dataclass
class Task:
    """A model and its prompts."""

    model: Path
    train: Path
    heldout: Path

    def flags(self, **changes: Any) -> list[str]:
        """Command-line words of a small run; a value of None leaves the option out."""
        options: dict[str, Any] = {
            "hf_checkpoint": self.model,
            "prompt_data": self.train,
            "label_key": "label",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "num_rollout": 2,
            "rollout_max_response_len": 6,
            "rollout_max_context_len": 256,
            "rm_type": "exact-match",
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 512,
            "lr": 1e-3,
            "tb_experiment_name": "run",
        }
        options.update(changes)
        words: list[str] = []
        for name, value in options.items():
            if value is None or value is False:
                continue
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words += [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
        return words


@pytest.fixture(scope="session")
def task(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Task:
    """48 training prompts and 6 held-out ones."""
    folder = tmp_path_factory.mktemp("task")
    draw = random.Random(0)
    for name, count in (("train", 48), ("heldout", 6)):
        with (folder / f"{name}.jsonl").open("w") as out:
            for _ in range(count):
                a, b = draw.randrange(10), draw.randrange(10)
                out.write(json.dumps({"input": f"{a}+{b}=", "label": str(a + b)}) + "\n")
    return Task(tiny_model, folder / "train.jsonl", folder / "heldout.jsonl")


@dataclasses.dataclass
class Run:
    """A running `relax train`, and every process below it that was ever seen."""

    process: subprocess.Popen[str]
    folder: Path
    output_path: Path
    seen: set[psutil.Process] = dataclasses.field(default_factory=set)

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def look(self) -> None:
        """Remembers the processes there are now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def wait_for(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Waits until the condition holds; a run that ends before it, or a passed deadline, fails the test."""
        end = time.monotonic() + deadline_s
        while not condition():
            self.look()
            assert self.process.poll() is None, f"ended while the test waited for {what}:\n{self.output}"
            assert time.monotonic() < end, f"no {what} after {deadline_s:.0f} s:\n{self.output}"
            time.sleep(0.2)
        self.look()

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the end and returns the exit code."""
        end = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < end, f"still running after {deadline_s:.0f} s:\n{self.output}"
            time.sleep(0.2)
        return self.process.returncode

    def survivors(self, deadline_s: float = DEADLINE_S) -> list[str]:
        """Processes of the run that are still there after the deadline; empty as soon as there are none."""
        end = time.monotonic() + deadline_s
        while True:
            alive = [p for p in self.seen if p.is_running() and _status(p) not in ("gone", psutil.STATUS_ZOMBIE)]
            if not alive or time.monotonic() > end:
                return [f"{p.pid} {_status(p)} {_command(p)}" for p in alive]
            time.sleep(0.5)

    def find(self, wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
        """The one living process of the run that ``wanted`` is true of."""
        self.look()
        found = [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE and wanted(p)]
        assert len(found) == 1, found
        return found[0]

    def kill(self) -> None:
        """``kill -9`` of the driver; what clears up after it ends last, and then nothing is left."""
        sessions = Path(tempfile.gettempdir(), "ray")
        (own,) = sessions.glob(f"session_2*_{self.process.pid}")
        cleaner = self.find(lambda p: any(word.endswith("/kill_cleanup.py") for word in p.cmdline()))
        self.process.kill()
        self.process.wait()
        end = time.monotonic() + DEADLINE_S
        while _status(cleaner) not in ("gone", psutil.STATUS_ZOMBIE):
            assert time.monotonic() < end, "what clears up after a killed driver does not end"
            time.sleep(0.1)
        assert self.survivors(deadline_s=0) == [], "processes outlive a killed driver"
        assert not own.exists()
        logs = self.folder / "runs" / "run" / "logs" / "ray"
        assert (logs / "raylet.out").is_file(), "Ray's logs are kept"
        assert not (self.folder / "runs" / "run" / "engine_key").exists()

    def find_server(self) -> psutil.Process:
        """SGLang's server; unlike its supervisor's, its words begin with its module."""
        return self.find(lambda p: p.cmdline()[1:3] == ["-m", "relax_rollout.engines.sglang.process.launch"])

    def find_actor(self, name: str) -> psutil.Process:
        """The process of a Ray actor of this class."""
        return self.find(lambda p: p.cmdline()[:1] == [f"ray::{name}"] or p.name().startswith(f"ray::{name}"))

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "run" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [m for m in self.metrics() if "time/step" in m]


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return "gone"


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return "?"


@pytest.fixture
def relax(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `relax ...` in ``tmp_path``; whatever is left of it is ended after the test."""
    runs: list[Run] = []

    def start(*words: str, env: dict[str, str] | None = None, folder: Path | None = None) -> Run:
        where = folder or tmp_path
        output = where / f"output{len(runs)}.txt"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | (env or {})
        with output.open("w") as out:
            process = subprocess.Popen(
                [str(Path(sys.executable).with_name("relax")), *words],
                cwd=where,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                process_group=0,  # as a shell or a batch system starts it
            )
        run = Run(process, where, output)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.look()
            run.process.kill()
            run.process.wait()
        for left in run.seen:
            if left.is_running():
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()
