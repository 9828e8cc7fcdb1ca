"""The fully-async controller: engines generate all the time, the trainer trains beside them.

The driver's loop, ``t`` is the step and the version of the weights that it trains:

    driver     next_step(t)   train(t)   settle(t)  report  begin_push  snapshot  push(t+1)  end_push(t+1)  save  eval
                  |              |           |                  |       (if due)      |           |         (if due)
    rollout    [gives step t]        |         [books t]      [samples rest] [state]  |      [samples go on]   |
               == generates, scores, filters, puts rows, in the background ==| . . . . . . |==========================
    plane      [rows of whole groups] |        [clears t]
    engines    [generate ...............................................]|             [weights t+1] [generate .......
    ranks      . . idle . .     [rows -> gradient -> step] . . . . . . . . . . . . . . [buckets]      [checkpoint] . .

    who        waits for                         unblocked by                       at most, and what the message names
    ---------  --------------------------------  ---------------------------------  -----------------------------------
    producer   the gate: open groups below       a push, a step that is closed,     no deadline of its own; it is no
               depth and bound                   a prompt that is dropped           fault: the trainer is behind
    driver     the groups of step t              a group that gets whole; a lost    5400 s without a sample: requests by
                                                 engine that is back                engine, first prompt, oldest group
    ranks      rows of their own samples         TransferQueue                      60 s: storage unit, rollout, rank
    driver     an evaluation, before a push      its last response                  a day
    push       samples interrupted too often     their end                          a response's own 3600 s
    push       running requests to end           engines                            60 s: requests and their engines
    ranks      an engine that takes a bucket     engine                             600 s: engine, bucket, bytes
    samples    the end of the push               driver                             as long as the push may take

Rows lie in TransferQueue from when their group is whole until their step is trained; the driver has their ids alone. A
storage unit that dies ends the run within seconds: the rollout worker asks for a sign of life all the time. It
keeps the samples until they are trained, so checkpoints need nothing of TransferQueue, and a resume puts rows again.

A training step waits for nothing but its rows: pushes and checkpoints lie between steps. An evaluation runs beside
generation and training, with one version: the next push waits for it. A checkpoint is taken where all samples rest, so
that it holds every token that was there.

How old a sample may be is decided in the rollout worker (:mod:`relax_rollout.staleness`) and looked at once more here,
where it is consumed. Engines that are lost (:mod:`relax_cli.controllers.engine_recovery`) restart in the background,
also while a step trains; they get the current weights while the driver waits for samples, or with the next push. A push
leaves behind an engine that cannot take it, and the others go on.
"""

import dataclasses
import time
from typing import TYPE_CHECKING

from relax_cli.controllers.base import Controller, PhaseTimer
from relax_cli.controllers.engine_recovery import EngineRecovery
from relax_cli.workers.plane_rows import RowsInPlane

if TYPE_CHECKING:
    from relax_data.types import StepManifest
    from relax_rollout.weight_sync.base import PushReport

    from relax_cli.workers.rollout import RolloutOutput


class FullyAsyncController(Controller):
    """One launch of ``relax train --fully-async``."""

    def _set_up(self) -> None:
        self._recovery = EngineRecovery(self.workers, self.progress.note, self._catch_up, repeats=True)
        self._version = 0
        """Of the trainer's weights, as they were sent last."""
        self._evaluating: int | None = None
        self._push_metrics: dict[str, float] = {}
        self.workers.rollout.meanwhile = self._while_generating
        self.workers.trainers.meanwhile = self._while_training

    def _while_generating(self) -> None:
        """Hears of rows that are lost, without waiting for calls that need them; restarts lost engines, which join."""
        self.workers.rollout.check_rows()
        self._recovery.watch()

    def _while_training(self) -> None:
        self.workers.rollout.check_rows()
        self._recovery.restart_lost()

    def _step(self, rollout_id: int) -> bool:
        """Takes the samples of a step, trains, reports, pushes, saves. False when the prompts are used up."""
        timer = self._timer.go_on()
        output = self._next_samples(rollout_id, timer)
        if output.manifest is None:
            return False
        self._check_staleness(output.manifest, rollout_id)
        scalars = output.metrics | self._recovery.metrics() | self._push_metrics
        scalars |= self._train_on(output.manifest, RowsInPlane(), timer)
        self.workers.rollout.settle(rollout_id)
        idle = sum(timer.seconds.get(name, 0.0) for name in ("wait_for_rollout", "wait_for_eval", "pause"))
        scalars["async/trainer_idle_share"] = idle / timer.total()
        self._end_step(rollout_id, scalars, timer, output=output)
        return True

    def _next_samples(self, rollout_id: int, timer: PhaseTimer) -> "RolloutOutput":
        with timer.phase("wait_for_rollout"):
            output = self.workers.rollout.next_step(rollout_id)
        # The rollout worker's seconds are of another clock: they run beside those of the driver.
        metrics = {k.replace("time/", "rollout/seconds_"): v for k, v in output.metrics.items()}
        return dataclasses.replace(output, metrics=metrics)

    def _check_staleness(self, manifest: "StepManifest", step: int) -> None:
        most, ages = self.config.cluster.max_staleness, step - manifest.oldest_versions
        late = [f"{manifest.names[i]}: {ages[i]}" for i in range(len(manifest)) if not 0 <= ages[i] <= most]
        if late:
            raise RuntimeError(
                f"step {step} was given samples whose staleness is not within 0 and --max-staleness {most} "
                f"({', '.join(late[:3])}): stopping, because this must never be"
            )

    # ------------------------------------------------------------------ between two steps

    def _after_training(self, rollout_id: int, timer: PhaseTimer) -> None:
        """Pushes the weights of a step, and saves it if due, in the state that all samples had at the push."""
        due, state = self._save_due(rollout_id), None
        self._begin_push(timer)
        if due:
            with timer.phase("save"):
                state = self._snapshot(rollout_id)
        self._send(rollout_id + 1, timer)
        if due:
            with timer.phase("save"):
                self._write(rollout_id, state)

    def _push(self, version: int, timer: PhaseTimer) -> None:
        self._begin_push(timer)
        self._send(version, timer)

    def _begin_push(self, timer: PhaseTimer) -> None:
        """Brings all samples to rest."""
        with timer.phase("wait_for_eval"):
            self._finish_evaluation()
        with timer.phase("pause"):
            seconds = self.workers.rollout.begin_push()
        self._push_metrics = {f"weights/{name}_s": value for name, value in seconds.items()}

    def _send(self, version: int, timer: PhaseTimer) -> None:
        """Trainer -> engines; then all of them generate with the new weights."""
        self._version = version
        begin = time.perf_counter()
        with timer.phase("weight_update"):
            report = self._reach_engines()
        sent = time.perf_counter()
        with timer.phase("resume"):
            self.workers.rollout.end_push(version)
        self._push_metrics |= {"weights/send_s": sent - begin, "weights/resume_s": time.perf_counter() - sent}
        if report is not None and report.seconds.get("send"):
            self._push_metrics["weights/GBps"] = report.bytes / 1e9 / report.seconds["send"]

    def _catch_up(self) -> None:
        """Gives restarted engines the weights that the others have, while the trainer waits for samples."""
        self._reach_engines(joining_only=True)

    def _reach_engines(self, *, joining_only: bool = False) -> "PushReport | None":
        """Sends the trainer's weights; afterwards whoever got them serves, and nobody serves others."""
        report = self._recovery.push(self._version, joining_only=joining_only)
        self._check_served(self._version)
        self._recovery.include(self._version)
        return report

    # ------------------------------------------------------------------ evaluation and end

    def _evaluate(self, rollout_id: int) -> None:
        """Begins an evaluation; before the first step it also waits for it."""
        self.workers.rollout.start_evaluation(rollout_id)
        self._evaluating = self._evaluated = rollout_id
        if rollout_id == self.outcome.first_rollout:
            with self._timer.beside("eval"):
                self._finish_evaluation()

    def _finish_evaluation(self) -> None:
        """Waits for the evaluation that runs, if one does."""
        if self._evaluating is not None:
            rollout_id, self._evaluating = self._evaluating, None
            self._note_evaluation(rollout_id, self.workers.rollout.finish_evaluation())

    def _finish(self) -> None:
        if self.stop.requested and self._evaluating is not None:
            self._evaluating = None
            self.workers.rollout.drop_evaluation()
        self._finish_evaluation()

    def _save(self, rollout_id: int) -> None:
        self._begin_push(PhaseTimer())  # nothing goes on any more
        super()._save(rollout_id)
