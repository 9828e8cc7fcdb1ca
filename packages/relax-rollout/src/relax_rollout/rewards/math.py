"""``--rm-type math``: answers compared by math-verify, in worker processes.

math-verify limits its own time with ``signal.alarm``, which works only in a main thread and cannot interrupt a long
computation in C (``10**10**10``). So each comparison runs in the main thread of a worker process, which is killed and
replaced when it does not answer in time: the reward is 0 then, and ``reward_info["math_limit_hit"]`` is 1.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import Any, ClassVar

from relax_data.types import Sample

from relax_rollout.concurrency import in_thread
from relax_rollout.errors import shown
from relax_rollout.rewards.base import Reward, RewardError
from relax_rollout.rewards.math_labels import label_text

TIME_LIMIT_S = 10.0
"""Seconds for one comparison, both expressions parsed."""
START_LIMIT_S = 180.0
"""Seconds for a worker to import sympy, on a loaded machine."""
MAX_WORKERS = 16
LIMIT_HIT = "math_limit_hit"


class WorkerDied(RuntimeError):
    """A worker process ended by itself; ``at_work`` when it had started well and was comparing an answer."""

    def __init__(self, message: str, *, at_work: bool) -> None:
        super().__init__(message)
        self.at_work = at_work


class MathWorker:
    """One process that compares answers, spoken to in lines of JSON. Used by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_rollout.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Ctrl-C ends the run through us; a worker would only print a traceback.
            start_new_session=True,
        )
        self._pending = b""
        self._ready = False

    def ask(self, response: str, label: str, time_limit_s: float) -> dict[str, Any]:
        """The worker's answer: ``{"reward": float}``, ``{"bad_label": why}`` or ``{"error": traceback}``.

        Raises:
            TimeoutError: no answer within ``time_limit_s``; the worker is dead then.
            WorkerDied: it ended (the kernel stopped it, or it could not start).
        """
        if not self._ready:
            first = self._read_line(START_LIMIT_S)
            if "error" in first:
                self.kill()
                raise WorkerDied(f"the math-verify worker could not start:\n{first['error']}", at_work=False)
            self._ready = True
        stdin = self._process.stdin
        assert stdin is not None, "opened with a pipe"
        request = {"response": response, "label": label, "cpu_limit_s": time_limit_s}
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise self._died() from None
        return self._read_line(time_limit_s)

    def kill(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read_line(self, limit_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None, "opened with a pipe"
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            # poll() rather than select(): a process with many connections has descriptors above 1024.
            poller = select.poll()
            poller.register(stdout, select.POLLIN)
            if left <= 0 or not poller.poll(left * 1000):
                self.kill()
                raise TimeoutError(f"no answer from math-verify within {limit_s:g} s")
            chunk = os.read(stdout.fileno(), 65536)
            if not chunk:
                raise self._died()
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)  # type: ignore[no-any-return]

    def _died(self) -> WorkerDied:
        self.kill()
        return WorkerDied(f"its worker process ended with code {self._process.returncode}", at_work=self._ready)


class MathReward(Reward):
    """1.0 when math-verify finds the answer in the response equal to the label, else 0.0."""

    NEEDS_LABEL: ClassVar[bool] = True

    def __init__(self, *, max_workers: int, time_limit_s: float = TIME_LIMIT_S) -> None:
        # Comparisons keep a core busy, so more workers than cores only make each one slower.
        workers = max(1, min(max_workers, (os.cpu_count() or 2) // 2, MAX_WORKERS))
        super().__init__("--rm-type math", max_concurrency=workers, reward_key="reward")
        self._time_limit_s = time_limit_s
        self._idle: list[MathWorker] = []
        self._all: set[MathWorker] = set()

    async def score(self, samples: list[Sample]) -> list[dict[str, Any]]:
        """Compares each response with its label in a worker process."""
        return [await in_thread(self._compare, s) for s in samples]

    async def close(self) -> None:
        """Ends all worker processes."""
        self._idle.clear()
        while self._all:
            self._all.pop().kill()

    def _compare(self, sample: Sample) -> dict[str, Any]:
        label = label_text(sample.prompt.label)
        if label is None:
            raise RewardError(
                f"{sample.name}: {self.name} compares with a text or a number, but the label is "
                f"{shown(sample.prompt.label)}; give the key of one with --label-key, or compare with a function of "
                "your own (--custom-rm-path)"
            )
        try:
            answer = self._ask(sample.response, label)
        except TimeoutError:
            return {"reward": 0.0, LIMIT_HIT: 1}
        if "bad_label" in answer:
            raise RewardError(f"{sample.name}: {self.name}: {answer['bad_label']}")
        if "error" in answer:
            raise RewardError(f"{sample.name}: {self.name} failed on label {sample.prompt.label!r}:\n{answer['error']}")
        return {"reward": answer["reward"], LIMIT_HIT: 0}

    def _ask(self, response: str, label: str) -> dict[str, Any]:
        try:
            return self._ask_once(response, label)
        except WorkerDied:
            pass
        try:
            return self._ask_once(response, label)
        except WorkerDied as e:
            if not e.at_work:
                raise
            raise TimeoutError(str(e)) from e  # twice on the same answer: it is the answer that kills it

    def _ask_once(self, response: str, label: str) -> dict[str, Any]:
        try:
            worker = self._idle.pop()  # list and set operations are atomic: threads may come here at once
        except IndexError:
            worker = MathWorker()
            self._all.add(worker)
        try:
            answer = worker.ask(response, label, self._time_limit_s)
        except BaseException:
            self._all.discard(worker)
            worker.kill()
            raise
        self._idle.append(worker)
        return answer
