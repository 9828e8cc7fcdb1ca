"""The parts of a run that modes share: start, resume, one step after another, evaluations, checkpoints, metrics, end.

    _prepare --> rollout_id = start
    while rollouts are left and no stop was requested:
        evaluate, if due
        _step(rollout_id)        <-- the mode: see the controller's own file
    evaluate, unless stopped --> save what is not saved yet

The metrics of a step are written before its checkpoint: a driver that dies in between does the step again, and the new
values replace the old ones; the other way round they would be lost. What follows the line of a step, its checkpoint and
the push of its weights, is timed as the beginning of the next step.

Everything here runs in the driver and blocks. A stop (SIGINT, SIGTERM) is looked at between two steps; a wait inside a
step gives way to it when its grace time is over.

    the driver waits for                                   unblocked by                           deadline
    -----------------------------------------------------  -------------------------------------  --------
    a checkpoint to load, to be written, to be exported    all ranks                              a day
    an evaluation                                          the rollout worker, by its requests    a day
    the state of the rollout worker                        the rollout worker                     a day

A day is :data:`relax_cli.cluster.waits.CALL_DEADLINE_S`: no call lasts as long, so a wait that does is a hang.
"""

import abc
import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_train.checkpoint.folders import side_folder

if TYPE_CHECKING:
    from relax_data.types import StepManifest

    from relax_cli.cluster.waits import StopFlag
    from relax_cli.config.run_config import RunConfig
    from relax_cli.run.progress import Progress
    from relax_cli.run.timeline import TimelineFile
    from relax_cli.run.tracking import Histograms, Trackers
    from relax_cli.workers.group import WorkerGroups
    from relax_cli.workers.references import RowReference
    from relax_cli.workers.rollout import RolloutOutput


class PhaseTimer:
    """Wall time of the phases of one step, seconds.

    Attributes:
        seconds: of each phase.
        created: when the timer was made, seconds of ``time.perf_counter()``.
        spans: name, begin and end of what took place, in the same seconds.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self._start = self.created = time.perf_counter()
        self._stopped: float | None = None

    def stop(self) -> None:
        """Holds the clock until :meth:`go_on`."""
        self._stopped = self.total()

    def go_on(self) -> "PhaseTimer":
        """Lets the clock run again; what passed in between does not count."""
        if self._stopped is not None:
            self._start, self._stopped = time.perf_counter() - self._stopped, None
        return self

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to ``name``."""
        try:
            with self.beside(name):
                yield
        finally:
            _, start, end = self.spans[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + end - start

    @contextlib.contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Notes when something took place that is not counted as a part of the step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((name, start, time.perf_counter()))

    def total(self) -> float:
        """Seconds since the step began, without those in which the clock was held."""
        return time.perf_counter() - self._start if self._stopped is None else self._stopped


@dataclasses.dataclass
class Outcome:
    """Result of a run when it ends."""

    first_rollout: int = 0
    next_rollout: int = 0
    stopped_by: int | None = None
    evals: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    last_checkpoint: str | None = None
    saved_rollout: int | None = None
    """The last rollout that this launch saved, as a checkpoint or an export."""


class Controller(abc.ABC):
    """One launch of ``relax train``. A mode says what a step is and how weights reach the engines."""

    def __init__(
        self,
        config: "RunConfig",
        workers: "WorkerGroups",
        trackers: "Trackers",
        progress: "Progress",
        stop: "StopFlag",
        outcome: Outcome | None = None,
        timeline: "TimelineFile | None" = None,
    ) -> None:
        """Takes what it works with.

        Args:
            config: all settings of the run.
            workers: started actors.
            trackers: take the metrics.
            progress: takes lines for the user.
            stop: ends the run between two steps.
            outcome: filled in as the run goes on, so that the caller has it also when the run is interrupted.
            timeline: takes the phases of each step with what the engines did.
        """
        self.config, self.workers, self.trackers = config, workers, trackers
        self.progress, self.stop, self._timeline = progress, stop, timeline
        self.outcome = Outcome() if outcome is None else outcome
        self._told_bad_rows = False
        self._timer = PhaseTimer()
        """Of the step to come: it holds what was done for it since the line of the one before."""
        self._timer.stop()
        self._saved: int | None = None
        self._evaluated: int | None = None
        self._set_up()

    def _set_up(self) -> None:
        """Makes what a mode keeps for itself over the run, from what the controller was given."""
        return

    # ------------------------------------------------------------------ what a mode decides

    @abc.abstractmethod
    def _step(self, rollout_id: int) -> bool:
        """Trains on one rollout, reports, saves if due, pushes the weights. False when the prompts are used up."""

    @abc.abstractmethod
    def _push(self, version: int, timer: PhaseTimer) -> None:
        """Trainer -> engines; afterwards every engine serves ``version`` and nothing else."""

    def _wake_trainer(self) -> None:
        """Lets the trainer work after the last step, where a mode has given its GPUs to the engines."""
        return

    def _finish(self) -> None:
        """Ends what a mode has begun beside its steps, after the last of them."""
        return

    # ------------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Runs all rollouts, or until a stop is requested between two of them."""
        start = self._prepare()
        self.outcome.first_rollout = self.outcome.next_rollout = start
        last = self.config.run.num_rollout
        if last is not None and start >= last:
            self.progress.note(f"nothing to do: the next rollout is {start}, and --num-rollout is {last}")
        rollout_id = start
        while last is None or rollout_id < last:
            if self.stop.requested:
                break
            if self._eval_due(rollout_id, start):
                self._evaluate(rollout_id)
            if not self._step(rollout_id):
                break
            rollout_id += 1
        if self.stop.requested:
            self.outcome.stopped_by = self.stop.signal_number
        elif self._evaluates and rollout_id > start and rollout_id != self._evaluated:
            self._evaluate(rollout_id)
        self._finish()
        self._save_at_end(rollout_id)
        if not self.config.debug.debug_rollout_only:
            self.workers.trainers.finish_traces()
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
            self._push(start, self._timer.go_on())
            self._timer.stop()
        return start

    def _resume(self, directory: str) -> int:
        found = self.workers.trainers.load(directory)
        if found is None:
            self.progress.note(f"--load {directory}: no checkpoint there yet, starting from --hf-checkpoint")
            return 0
        rollout_id, extra = found.rollout_id, found.extra
        if not self.config.debug.debug_train_only:
            if "rollout" not in extra:
                raise ValueError(
                    f"--load {directory}: the checkpoint of rollout {rollout_id} does not say which prompts come next, "
                    "so the run would begin with the first again; copy it again from where it is whole, or start a new "
                    "run from its weights (--save-hf, --hf-checkpoint)"
                )
            if extra["rollout"] is None:
                self.progress.note("the checkpoint is of a run without rollouts: the prompts begin with the first")
            else:
                self.workers.rollout.load_state(extra["rollout"], found.folder)
        resharded = "" if found.layout_change is None else f", resharded: {found.layout_change}"
        self.progress.note(f"resumed from rollout {rollout_id} of {directory}{resharded}")
        self.outcome.last_checkpoint = directory
        self._saved = rollout_id
        return rollout_id + 1

    def _end_step(
        self,
        rollout_id: int,
        scalars: dict[str, float],
        timer: PhaseTimer,
        *,
        output: "RolloutOutput",
        trained: bool = True,
    ) -> None:
        """Writes the metrics of a step, and then what follows a step that has trained: checkpoint and weights.

        Args:
            output: the rollout that the step trained on.
        """
        self._report(rollout_id, scalars, timer, output.histograms)
        self.outcome.next_rollout = rollout_id + 1  # a stop may cut what follows
        if self._timeline is not None:
            self._timeline.write(
                rollout_id,
                timer.spans,
                output.usage,
                began=timer.created,
                seconds=scalars["time/step"],
                reprefilled=scalars.get("rollout/reprefilled_tokens", 0.0)
                / max(1.0, scalars.get("rollout/tokens", 0.0)),
            )
        self._timer = PhaseTimer()
        if trained:
            self._after_training(rollout_id, self._timer)
            self.workers.trainers.begin_traces()
        self._timer.stop()

    def _after_training(self, rollout_id: int, timer: PhaseTimer) -> None:
        """Saves a step if due, and pushes its weights."""
        self._save_if_due(rollout_id, timer)
        if not self.config.debug.debug_train_only:
            self._push(rollout_id + 1, timer)

    def _report(
        self, rollout_id: int, scalars: dict[str, float], timer: PhaseTimer, histograms: "Histograms | None"
    ) -> None:
        total = timer.total()
        seconds = dict(timer.seconds)
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        scalars |= {f"time/{k}": v for k, v in seconds.items()}
        scalars["time/step"] = total
        tokens = scalars.get("rollout/tokens")
        if tokens is not None:  # else nothing was generated
            if seconds.get("generate"):
                scalars["perf/tokens_per_s"] = tokens / seconds["generate"]
            scalars["perf/tokens_per_s_step"] = tokens / total
        self.trackers.log(scalars, rollout_id, histograms)
        if scalars.get("prompts/bad_rows") and not self._told_bad_rows:
            self._told_bad_rows = True
            self.progress.note(
                f"{scalars['prompts/bad_rows']:.0f} rows of the prompt data were left out (--skip-bad-rows): "
                "prompts/bad_rows counts them, logs/rollout.log names some (of a stream after each epoch)"
            )
        last = self.config.run.num_rollout
        self.progress.step(rollout_id, last - 1 if last is not None else None, scalars)

    def _train_on(self, manifest: "StepManifest", rows: "RowReference", timer: PhaseTimer) -> dict[str, float]:
        """All optimizer steps on one rollout; the seconds of their phases go to the timer."""
        with timer.phase("train_step"):
            metrics = self.workers.trainers.train(manifest, rows, manifest.rollout_id)
        # What the ranks spend in their phases; the rest of the call is transport and waiting for the slowest rank.
        phases = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
        timer.seconds |= phases
        timer.seconds["train_wait"] = max(0.0, timer.seconds.pop("train_step") - sum(phases.values()))
        return {k: v for k, v in metrics.items() if not k.startswith("time/")}

    def _check_served(self, version: int) -> None:
        """Asks the engines for their version after a push."""
        served = self.workers.rollout.weight_versions()
        if any(v != version for v in served):
            raise RuntimeError(
                f"after the weight update to version {version} the engines serve {served}: stopping, because training "
                "on samples of other weights would go wrong in silence"
            )

    # ------------------------------------------------------------------ evaluation

    @property
    def _evaluates(self) -> bool:
        return self.config.run.eval_interval is not None and not self.config.debug.debug_train_only

    def _eval_due(self, rollout_id: int, start: int) -> bool:
        interval = self.config.run.eval_interval
        if interval is None or not self._evaluates:
            return False
        if rollout_id == start:
            return not self.config.run.skip_eval_before_train
        return rollout_id % interval == 0

    def _evaluate(self, rollout_id: int) -> None:
        version = 0 if self.config.debug.debug_rollout_only else rollout_id
        with self._timer.beside("eval"):
            scalars = self.workers.rollout.evaluate(version)
        self._note_evaluation(rollout_id, scalars)

    def _note_evaluation(self, rollout_id: int, scalars: dict[str, float]) -> None:
        self.trackers.log(scalars, rollout_id)
        self._evaluated = rollout_id
        self.outcome.evals.append((rollout_id, scalars))
        self.progress.evaluation(rollout_id, scalars)

    # ------------------------------------------------------------------ checkpoints

    def _save_due(self, rollout_id: int) -> bool:
        interval = self.config.train.checkpoint.save_interval
        return self._saves and interval is not None and (rollout_id + 1) % interval == 0

    def _save_if_due(self, rollout_id: int, timer: PhaseTimer) -> None:
        if not self._save_due(rollout_id):
            return
        with timer.phase("save"):
            self._save(rollout_id)

    @property
    def _saves(self) -> bool:
        checkpoint = self.config.train.checkpoint
        return (checkpoint.save is not None or checkpoint.save_hf is not None) and not (
            self.config.debug.debug_rollout_only
        )

    def _snapshot(self, rollout_id: int) -> dict[str, Any] | None:
        """The rollout worker's state, with what :meth:`_save` makes a part of a checkpoint; None without one."""
        directory = self.config.train.checkpoint.save
        if directory is None or self.config.debug.debug_train_only:
            return None
        return self.workers.rollout.save_state(directory, rollout_id)

    def _save(self, rollout_id: int) -> None:
        self._write(rollout_id, self._snapshot(rollout_id))

    def _write(self, rollout_id: int, state: dict[str, Any] | None) -> None:
        """Writes checkpoint and export of a rollout, as far as they are asked for."""
        checkpoint = self.config.train.checkpoint
        if checkpoint.save is not None:
            # The worker has written its file beside the checkpoint; the ranks make it a part of it, or of nothing.
            files = None if state is None else side_folder(Path(checkpoint.save).absolute(), rollout_id)
            self.workers.trainers.save(checkpoint.save, rollout_id, {"rollout": state}, files)
            self.outcome.last_checkpoint = checkpoint.save
        self._saved = rollout_id
        if checkpoint.save_hf is not None:
            folder = str(Path(checkpoint.save_hf.replace("{rollout_id}", str(rollout_id))))
            self.workers.trainers.save_hf(folder)
        self.outcome.saved_rollout = rollout_id

    def _save_at_end(self, next_rollout: int) -> None:
        """The last finished step is saved too, so that a run that ends or is asked to stop loses nothing."""
        finished = next_rollout - 1
        if not self._saves:
            return
        if finished < self.outcome.first_rollout or finished == self._saved:
            return
        self._wake_trainer()
        self._save(finished)
