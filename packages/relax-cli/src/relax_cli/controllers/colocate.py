"""The colocate controller: generate, train, push weights, on the same devices in turn.

One loop in the driver; nothing runs beside it. ``t`` is the rollout id and the version of its weights:

    driver      generate(t)        train(t)      report  save   push(t+1)
                 |                  |                     |      |
    rollout     [prompts -> groups] [hands rows out]     [state] |
                 |   ^              |                            |
    engines     [generate]          .......sleep........        [weights t+1]  name it
                                    |                            ^
    ranks       .....sleep......   [rows -> gradient -> step]   [buckets]
                                                                 (dots: only where they share a GPU)

    who       consumes               produces                waits for              unblocked by         deadline
    --------  ---------------------  ----------------------  ---------------------  -------------------  --------------
    driver    manifest, metrics;     metrics, checkpoints,   the call it made       its end, or the      a day a call;
              never a row            the order of it all                            first failure        120 s: versions
                                                             a lost engine's new    engine actor         1860 s
                                                             server, before the
                                                             trainer wakes there
    rollout   prompts, responses,    groups; manifest; rows  responses and scores   engines, rewards     5400 s without
    worker    scores                 until the next rollout                                              any progress
                                                             any engine, when       driver: a restart    2400 s without
                                                             none serves            and a push           any change
    engines   requests, buckets of   tokens with log-prob    a request or a push    rollout worker,      none: they
              weights                and version                                    ranks                serve
    ranks     manifest, rows of      weights ``t+1``         rows; an engine that   rollout worker (or   120 s: rows;
              their own samples                              takes a bucket; each   a file); engines;    600 s: bucket
                                                             other                  the slowest rank

Engines that are lost on the way: :mod:`relax_cli.controllers.engine_recovery`. While the driver waits for a rollout it
restarts them, and where that is possible at once pushes ``t`` to them:

    driver      generate(t) ... restart ..................... [ push(t) to the new server ] ...          train(t)
    rollout     [requests go on elsewhere, or wait            |                           | and go on]
    engine      dies     [loads start weights] sleep          [weights t]                 [generate]
    ranks       .....sleep........................... wake    [buckets]             sleep

With ``--debug-rollout-only`` the loop is generate and report; with ``--debug-train-only`` the rows come from a file
and there is no rollout worker and no engine.
"""

import dataclasses
from typing import TYPE_CHECKING

from relax_cli.controllers.base import Controller, PhaseTimer
from relax_cli.controllers.engine_recovery import EngineRecovery
from relax_cli.run.debug_data import FileRows, path_for, read_manifest
from relax_cli.workers.rollout import RolloutOutput

if TYPE_CHECKING:
    from relax_data.types import StepManifest

    from relax_cli.workers.references import RowReference


class ColocateController(Controller):
    """One launch of ``relax train --colocate``."""

    def _set_up(self) -> None:
        self._recovery = EngineRecovery(self.workers, self.progress.note, self._catch_up)
        self._version = 0
        """Of the trainer's weights, as they were sent last."""
        if not self.config.debug.debug_train_only:
            self.workers.rollout.meanwhile = self._recovery.watch

    def _step(self, rollout_id: int) -> bool:
        """Generate, train, report, save, push. False when the prompts are used up."""
        timer = self._timer.go_on()
        output = self._generate(rollout_id, timer)
        if not output.groups:
            return False
        scalars = dict(output.metrics)
        if not self.config.debug.debug_train_only:
            scalars |= self._recovery.metrics()
        if output.manifest is not None:
            scalars |= self._train(output.manifest, self._rows(rollout_id), timer)
        trained = output.manifest is not None
        self._end_step(rollout_id, scalars, timer, output=output, trained=trained)
        return True

    def _generate(self, rollout_id: int, timer: PhaseTimer) -> RolloutOutput:
        debug = self.config.debug
        save_to = None
        if debug.save_debug_rollout_data is not None:
            save_to = path_for(debug.save_debug_rollout_data, rollout_id)
        with timer.phase("generate"):
            if debug.load_debug_rollout_data is not None:
                path = path_for(debug.load_debug_rollout_data, rollout_id)
                manifest, reward = read_manifest(path, rollout_id)
                return RolloutOutput(len(set(manifest.group_ids)), manifest, {"rollout/reward": reward})
            version = 0 if debug.debug_rollout_only else rollout_id
            output = self.workers.rollout.generate(rollout_id, version, save_to=save_to)
        timer.seconds["generate"] -= output.saving_s
        timer.seconds["other"] = output.saving_s
        # Time of the rewards and of the rollout as a whole lie inside the phase that was just measured.
        metrics = {k.replace("time/", "rollout/seconds_"): v for k, v in output.metrics.items()}
        return dataclasses.replace(output, metrics=metrics)

    def _rows(self, rollout_id: int) -> "RowReference":
        """Names the place that the ranks get the rows of this rollout from."""
        template = self.config.debug.load_debug_rollout_data
        if template is not None:
            return FileRows(path_for(template, rollout_id), rollout_id)
        return self.workers.rollout.rows(rollout_id)

    def _train(self, manifest: "StepManifest", rows: "RowReference", timer: PhaseTimer) -> dict[str, float]:
        if self.workers.shares_gpu:
            with timer.phase("sleep_wake"):
                if self._recovery.all_serve:
                    self.workers.trainers.measure_room()
                self._wake_trainer()
        return self._train_on(manifest, rows, timer)

    def _wake_trainer(self) -> None:
        if self.workers.shares_gpu:
            self._recovery.release_gpus()
            self.workers.trainers.wake()

    def _catch_up(self) -> None:
        """Gives restarted engines the weights that the others have, or had, in the middle of a rollout."""
        if self.config.debug.debug_rollout_only:
            self._recovery.include(0)  # the start weights, which they have loaded
            return
        self._wake_trainer()
        self._push(self._version, PhaseTimer(), joining_only=True)

    def _push(self, version: int, timer: PhaseTimer, *, joining_only: bool = False) -> None:
        rollout, trainers = self.workers.rollout, self.workers.trainers
        self._version = version
        with timer.phase("weight_update"):
            if self.workers.shares_gpu:
                rollout.resume_memory("weights")
            self._recovery.push(version, joining_only=joining_only)
        if self.workers.shares_gpu:
            with timer.phase("sleep_wake"):
                trainers.sleep()
                rollout.resume_memory("kv_cache")
        with timer.phase("weight_update"):
            self._check_served(version)
        self._recovery.include(version)
