"""Engines that die or fall silent while a run goes on: restarted in the background, then given the current weights.

Nothing here runs by itself. The driver calls :meth:`EngineRecovery.watch` while it waits for a rollout or an
evaluation, and the other methods round a push:

    lost        a request or a push showed it; requests go on at other engines, or wait
    restarted   while the trainer does not use the engine's GPUs: its server would find no memory for its own
    joined      at the next push; where nothing shares memory, or no engine serves, at once: by a push to it alone

The rollout worker's :class:`relax_rollout.engines.pool.EnginePool` knows the states and counts. Three restarts an
engine; with no engine left the rollout ends with the last words of the one that was lost last.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from relax_rollout.engines.pool import RESTARTS, EngineReport, EngineState
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed

if TYPE_CHECKING:
    from relax_cli.workers.group import WorkerGroups

DYING_S = 3.0
"""Seconds after a failed push in which an engine that is about to end may still answer."""


class EngineRecovery:
    """Watches over the engines of one run.

    Attributes:
        restarts: engines restarted so far.
    """

    def __init__(
        self,
        workers: "WorkerGroups",
        note: Callable[[str], None],
        catch_up: Callable[[], None],
        *,
        repeats: bool = False,
    ) -> None:
        """Takes what it works with.

        Args:
            workers: started actors.
            note: takes lines for the user.
            catch_up: gives the current weights to the engines that have restarted, and includes them.
            repeats: a push that reached no engine is repeated once, also when all of them live: each has a way of its
                own for weights, which is made anew.
        """
        self._workers, self._note, self._catch_up, self._repeats = workers, note, catch_up, repeats
        self._reports: dict[str, EngineReport] = {}
        self._told: dict[str, int] = {}  # losses of each engine that the user knows of
        self._begun: dict[str, int] = {}  # losses of each engine after which it was restarted
        self._starting: dict[str, float] = {}
        self._moved = False
        self.restarts = 0

    def metrics(self) -> dict[str, float]:
        """Engines that serve, as far as is known, and restarts so far."""
        serving = len(self._names(EngineState.SERVING))
        return {"engines/serving": float(serving), "engines/restarts": float(self.restarts)}

    @property
    def all_serve(self) -> bool:
        """Whether no engine is lost or starts, as far as is known."""
        return all(report.state is EngineState.SERVING for report in self._reports.values())

    # ------------------------------------------------------------------ while engines generate

    def watch(self) -> None:
        """Restarts what was lost, and lets what has restarted join if it can. Returns soon unless it can."""
        if not self.restart_lost() or not self._names(EngineState.JOINING):
            return
        if not self._workers.shares_gpu or not (self._names(EngineState.SERVING) or self._starting):
            self._catch_up()

    def restart_lost(self) -> bool:
        """Restarts what was lost, in the background; True when it knows the state of the engines of a moment ago."""
        reports = self._workers.rollout.poll_engines()
        if reports is None:
            return False
        self._look_at(reports)
        for name in self._names(EngineState.LOST):
            losses = self._reports[name].losses
            if self._begun.get(name, 0) < losses:
                self._begun[name] = losses
                self._starting[name] = time.monotonic()
                if self._workers.shares_gpu:
                    self._workers.trainers.free_resident()  # its server measures the free memory
                self._workers.engines.begin_restart(name)
        self._collect()
        return True

    def _names(self, *states: EngineState) -> list[str]:
        return [name for name, report in self._reports.items() if report.state in states]

    def _look_at(self, reports: Sequence[EngineReport]) -> None:
        """Takes note of the states, and tells the user of losses."""
        self._reports = {report.name: report for report in reports}
        for report in reports:
            if report.losses <= self._told.get(report.name, 0):
                continue
            self._told[report.name] = report.losses
            others = ", ".join(self._names(EngineState.SERVING))
            why = report.error.splitlines()[0].partition(" Last lines of")[0].rstrip(".")
            if report.state is EngineState.OUT:
                rest = f"after {RESTARTS} restarts it is out for good" + (f"; {others} go on" if others else "")
                self._workers.engines.end([report.name])
            else:
                requests = f"its requests go on at {others}" if others else "its requests wait for it"
                rest = f"restarting it, {report.losses} of {RESTARTS}; {requests}"
            self._note(f"{report.name} was lost ({why}): {rest}")

    def _collect(self, *, wait: bool = False) -> None:
        """Takes note of restarts that have ended."""
        if not self._starting:
            return
        rollout = self._workers.rollout
        for name, result in self._workers.engines.restarted(wait=wait).items():
            seconds = time.monotonic() - self._starting.pop(name)
            if isinstance(result, str):
                rollout.engine_not_restarted(name, result)
            else:
                rollout.replace_engine(result)
                self._moved = True
                self.restarts += 1
                self._note(f"{name} is up again after {seconds:.0f} s; it serves when it has the current weights")
        self._look_at(rollout.engine_reports())

    # ------------------------------------------------------------------ round a push

    def release_gpus(self) -> None:
        """Has every engine give its GPU memory to the trainer: those that start now, when they have; lost ones end."""
        self._collect(wait=True)
        self._workers.rollout.release_memory()
        self._look_at(self._workers.rollout.engine_reports())
        if lost := self._names(EngineState.LOST):
            self._workers.engines.end(lost)

    def check(self) -> list[str]:
        """Names of the engines that weights can be sent to: those that serve and those that have restarted."""
        self._collect()
        self._look_at(self._workers.rollout.check_engines())
        return self._names(EngineState.SERVING, EngineState.JOINING)

    def push(self, version: int, *, joining_only: bool = False) -> PushReport | None:
        """Sends the trainer's weights to the engines; once more, to those that live, when one died meanwhile.

        Without an engine nothing is sent: whoever is restarted gets the weights then.

        Args:
            version: of the weights.
            joining_only: leave the engines alone that serve.

        Returns:
            what was sent; None without an engine. An engine that did not get the weights, while others did, is lost.

        Raises:
            WeightPushFailed: for another reason, or again.
        """
        names = self._wanted(joining_only)
        try:
            return self._send(version, names)
        except WeightPushFailed:
            time.sleep(DYING_S)
            living = self._wanted(joining_only)
            if not set(names) - set(living) and not self._repeats:
                raise
            if living:
                self._note(f"the push of version {version} is repeated, to {', '.join(living)}")
            return self._send(version, living)

    def _wanted(self, joining_only: bool) -> list[str]:
        living = self.check()
        return self._names(EngineState.JOINING) if joining_only else living

    def _send(self, version: int, names: Sequence[str]) -> PushReport | None:
        if not names:
            return None
        if self._moved:
            self._workers.trainers.connect(self._workers.engines.addresses)
            self._moved = False
        report = self._workers.trainers.push_weights(version, names)
        for name, why in report.failed.items():
            self._workers.rollout.exclude_engine(name, f"it did not take the weights of version {version}: {why}")
        if report.failed:
            self._look_at(self._workers.rollout.engine_reports())
        return report

    def include(self, version: int) -> None:
        """Lets the engines serve that got the last push beside those that served before."""
        rollout = self._workers.rollout
        if not self._names(EngineState.JOINING):
            return
        self._look_at(rollout.engine_reports())
        for name in self._names(EngineState.JOINING):
            rollout.include_engine(name)
            self._note(f"{name} joined with the weights of version {version}")
        self._look_at(rollout.engine_reports())
