"""The colocate controller: generate, train, push weights, on the same devices in turn."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_data.types import SampleGroup, TrainBatch

from relax_cli.cluster.waits import StopFlag
from relax_cli.run.debug_data import load_groups, path_for, save_groups
from relax_cli.run.progress import Progress
from relax_cli.run.tracking import Trackers
from relax_cli.workers.group import WorkerGroups


class PhaseTimer:
    """Wall time of the phases of one step, seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def total(self) -> float:
        return time.perf_counter() - self._start


@dataclasses.dataclass
class Outcome:
    """What a run has done when it ends."""

    first_rollout: int = 0
    next_rollout: int = 0
    stopped_by: int | None = None
    evals: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    last_checkpoint: str | None = None


class ColocateRun:
    """One launch of ``relax train --colocate``."""

    def __init__(
        self,
        config: Any,
        workers: WorkerGroups,
        trackers: Trackers,
        progress: Progress,
        stop: StopFlag,
        outcome: Outcome | None = None,
    ) -> None:
        """Takes what it works with.

        Args:
            outcome: filled in as the run goes on, so that the caller has it also when the run is interrupted.
        """
        self.config, self._workers, self._trackers, self._progress, self._stop = (
            config,
            workers,
            trackers,
            progress,
            stop,
        )
        self.outcome = Outcome() if outcome is None else outcome
        self._saved: int | None = None
        self._evaluated: int | None = None

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Runs all rollouts, or until a stop is requested between two of them."""
        start = self._prepare()
        self.outcome.first_rollout = self.outcome.next_rollout = start
        last = self.config.run.num_rollout
        if last is not None and start >= last:
            self._progress.note(f"nothing to do: the next rollout is {start}, and --num-rollout is {last}")
        rollout_id = start
        while last is None or rollout_id < last:
            if self._stop.requested:
                break
            if self._eval_due(rollout_id, start):
                self._evaluate(rollout_id)
            if not self._step(rollout_id):
                break
            rollout_id += 1
            self.outcome.next_rollout = rollout_id
        if self._stop.requested:
            self.outcome.stopped_by = self._stop.signal_number
        elif self._evaluates and rollout_id > start and rollout_id != self._evaluated:
            self._evaluate(rollout_id)
        self._save_at_end(rollout_id)
        return self.outcome

    def _prepare(self) -> int:
        """Resumes if asked to, and gives the engines the weights the trainer has. Returns the first rollout id."""
        train, debug = self.config.train, self.config.debug
        start = 0
        if train.checkpoint.load is not None and not debug.debug_rollout_only:
            start = self._resume(train.checkpoint.load)
        if train.checkpoint.start_rollout_id is not None:
            start = train.checkpoint.start_rollout_id
            self._saved = None  # a rollout of the loaded checkpoint's id may come again, with other weights
        if not (debug.debug_rollout_only or debug.debug_train_only):
            self._push(start, PhaseTimer())
        return start

    def _resume(self, directory: str) -> int:
        found = self._workers.trainers("load", directory, what="the checkpoint to load")[0]
        if found is None:
            self._progress.note(f"--load {directory}: no checkpoint there yet, starting from --hf-checkpoint")
            return 0
        rollout_id, extra = found
        if extra.get("rollout") is not None and not self.config.debug.debug_train_only:
            self._workers.rollout("load_state_dict", extra["rollout"], what="the rollout manager to restore its state")
        self._progress.note(f"resumed from rollout {rollout_id} of {directory}")
        self.outcome.last_checkpoint = directory
        self._saved = rollout_id
        return rollout_id + 1

    # ------------------------------------------------------------------ one step

    def _step(self, rollout_id: int) -> bool:
        """Generate, train, push. False when the prompts are used up."""
        timer = PhaseTimer()
        debug = self.config.debug
        groups, scalars = self._generate(rollout_id, timer)
        if not groups:
            return False
        if debug.save_debug_rollout_data is not None:
            with timer.phase("other"):
                save_groups(groups, path_for(debug.save_debug_rollout_data, rollout_id))
        if not debug.debug_rollout_only:
            scalars |= self._train(groups, rollout_id, timer)
            self._save_if_due(rollout_id, timer)
            if not debug.debug_train_only:
                self._push(rollout_id + 1, timer)
        self._report(rollout_id, scalars, timer)
        return True

    def _generate(self, rollout_id: int, timer: PhaseTimer) -> tuple[Sequence[SampleGroup], dict[str, float]]:
        debug = self.config.debug
        with timer.phase("generate"):
            if debug.load_debug_rollout_data is not None:
                groups = load_groups(path_for(debug.load_debug_rollout_data, rollout_id))
                rewards = [r for g in groups for r in g.rewards]
                return groups, {"rollout/reward": sum(rewards) / len(rewards)}
            version = 0 if debug.debug_rollout_only else rollout_id
            result = self._workers.rollout(
                "generate", rollout_id, version, what=f"rollout {rollout_id} to be generated and scored"
            )
        # Time of the rewards and of the rollout as a whole lie inside the phase that was just measured.
        metrics = {k.replace("time/", "rollout/seconds_"): v for k, v in result["metrics"].items()}
        return result["groups"], metrics

    def _train(self, groups: Sequence[SampleGroup], rollout_id: int, timer: PhaseTimer) -> dict[str, float]:
        import ray

        if self._workers.shares_gpu:
            with timer.phase("sleep_wake"):
                self._workers.rollout("release_memory", what="the engines to release GPU memory")
                self._workers.trainers("wake", what="the trainer to take GPU memory back")
        with timer.phase("train_step"):
            batch = ray.put(TrainBatch.from_groups(groups, rollout_id))
            metrics = self._workers.trainers("train", batch, rollout_id, what=f"training step {rollout_id}")[0]
        # What the ranks spend in their phases; the rest of the call is transport and waiting for the slowest rank.
        phases = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
        timer.seconds |= phases
        timer.seconds["train_wait"] = max(0.0, timer.seconds.pop("train_step") - sum(phases.values()))
        return {k: v for k, v in metrics.items() if not k.startswith("time/")}

    def _push(self, version: int, timer: PhaseTimer) -> None:
        """Trainer -> engines; afterwards every engine serves ``version`` and nothing else."""
        with timer.phase("weight_update"):
            if self._workers.shares_gpu:
                self._workers.rollout("resume_memory", ("weights",), what="the engines to take back memory for weights")
            self._workers.trainers("push_weights", version, what=f"weights {version} to reach the engines")
        if self._workers.shares_gpu:
            with timer.phase("sleep_wake"):
                self._workers.trainers("sleep", what="the trainer to release GPU memory")
                self._workers.rollout("resume_memory", ("kv_cache",), what="the engines to take back their KV cache")
        with timer.phase("weight_update"):
            served = self._workers.rollout("weight_versions", what="the engines to name their weights", deadline_s=120)
        if any(v != version for v in served):
            raise RuntimeError(
                f"after the weight update to version {version} the engines serve {served}: stopping, because training "
                "on samples of other weights would go wrong in silence"
            )

    def _report(self, rollout_id: int, scalars: dict[str, float], timer: PhaseTimer) -> None:
        total = timer.total()
        seconds = dict(timer.seconds)
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        scalars |= {f"time/{k}": v for k, v in seconds.items()}
        scalars["time/step"] = total
        tokens = scalars.get("rollout/tokens", 0.0)
        if seconds.get("generate"):
            scalars["perf/tokens_per_s"] = tokens / seconds["generate"]
        scalars["perf/tokens_per_s_step"] = tokens / total
        self._trackers.log(scalars, rollout_id)
        last = self.config.run.num_rollout
        self._progress.step(rollout_id, last - 1 if last is not None else None, scalars)

    # ------------------------------------------------------------------ evaluation and checkpoints

    @property
    def _evaluates(self) -> bool:
        return self.config.run.eval_interval is not None and not self.config.debug.debug_train_only

    def _eval_due(self, rollout_id: int, start: int) -> bool:
        if not self._evaluates:
            return False
        if rollout_id == start:
            return not self.config.run.skip_eval_before_train
        return rollout_id % self.config.run.eval_interval == 0

    def _evaluate(self, rollout_id: int) -> None:
        version = 0 if self.config.debug.debug_rollout_only else rollout_id
        scalars = self._workers.rollout("evaluate", version, what="the evaluation")
        self._trackers.log(scalars, rollout_id)
        self._evaluated = rollout_id
        self.outcome.evals.append((rollout_id, scalars))
        self._progress.evaluation(rollout_id, scalars)

    def _save_if_due(self, rollout_id: int, timer: PhaseTimer) -> None:
        interval = self.config.train.checkpoint.save_interval
        if not self._saves or interval is None or (rollout_id + 1) % interval:
            return
        with timer.phase("save"):
            self._save(rollout_id)

    @property
    def _saves(self) -> bool:
        checkpoint = self.config.train.checkpoint
        return (checkpoint.save is not None or checkpoint.save_hf is not None) and not (
            self.config.debug.debug_rollout_only
        )

    def _save(self, rollout_id: int) -> None:
        checkpoint = self.config.train.checkpoint
        if checkpoint.save is not None:
            state = None
            if not self.config.debug.debug_train_only:
                state = self._workers.rollout("state_dict", what="the rollout manager's state")
            extra = {"rollout": state}
            self._workers.trainers("save", checkpoint.save, rollout_id, extra, what=f"checkpoint {rollout_id}")
            self.outcome.last_checkpoint = checkpoint.save
        self._saved = rollout_id
        if checkpoint.save_hf is not None:
            folder = str(Path(checkpoint.save_hf.replace("{rollout_id}", str(rollout_id))))
            self._workers.trainers("save_hf", folder, what=f"the Hugging Face export {folder}")

    def _save_at_end(self, next_rollout: int) -> None:
        """The last finished step is saved too, so that a run that ends or is asked to stop loses nothing."""
        finished = next_rollout - 1
        if not self._saves:
            return
        if finished < self.outcome.first_rollout or finished == self._saved:
            return
        if self._workers.shares_gpu:
            self._workers.rollout("release_memory", what="the engines to release GPU memory")
            self._workers.trainers("wake", what="the trainer to take GPU memory back")
        self._save(finished)
