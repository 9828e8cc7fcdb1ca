"""Who worked, waited and was paused: shares of one stretch of time, for the trainer and for each engine."""

import dataclasses
import functools
import math

from relax_profiling.analysis.intervals import Interval, intersection, total, union
from relax_profiling.timeline.read import Setup, State, Step

WAITS = ("wait_for_rollout", "wait_for_eval", "pause")
"""Phases in which a trainer beside the engines waits; ``async/trainer_idle_share`` is their share."""
PUSH = ("weight_update", "resume", "sleep_wake")
"""Phases in which weights travel, or engines and trainer change places on their GPUs."""


@dataclasses.dataclass(frozen=True)
class EngineShares:
    """Shares of the time of one engine; ``busy``, ``idle``, ``paused`` and ``resting`` add up to 1.

    Attributes:
        busy: it had requests.
        idle: it had none and could have had some.
        paused: requests were held back for a push of weights.
        resting: with colocate, the trainer's turn.
        running: mean number of requests while busy.
    """

    busy: float
    idle: float
    paused: float
    resting: float
    running: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The timeline of one run.

    Attributes:
        file: its path.
        steps: all of them, rising.
    """

    file: str
    steps: list[Step]

    @property
    def setup(self) -> Setup:
        """That of the last step."""
        return self.steps[-1].run

    @functools.cached_property
    def judged(self) -> list[Step]:
        """The steps that shares and advice are of: those with the options of the last one.

        The run's first, in which everything warms up, is left out if there are others.
        """
        alike = [step for step in self.steps if step.run == self.setup]
        return [step for step in alike if step is not self.steps[0]] or alike

    @property
    def seconds(self) -> float:
        """Of the judged steps, in all."""
        return math.fsum(step.seconds for step in self.judged)

    def mean(self, *phases: str) -> float:
        """Mean seconds a step in the phases of these names."""
        return math.fsum(step.spent(*phases) for step in self.judged) / len(self.judged)

    @property
    def _counted(self) -> list[Step]:
        """The lines whose engines count. What a line says of them begins with the samples of the step before."""
        return self.judged[1:] or self.judged

    @functools.cached_property
    def _rounds(self) -> list[Interval]:
        """From samples to samples, of each line that counts; empty where one of them does not tell, or is the first."""
        found = []
        for step in self._counted:
            times = [t for engine in step.engines.values() for _, *ends in engine.intervals for t in ends]
            if not times or step is self.steps[0]:
                return []
            found.append((step.start + min(times), step.start + max(times)))
        return found

    @functools.cached_property
    def window(self) -> list[Interval]:
        """The time that all shares are of, seconds since the epoch: one interval, or one for each launch.

        It goes from the samples of the first judged step to those of the last one: a whole number of rounds, of which
        both the trainer and the engines are known. Of the first step of a run, or without engines, it is the steps.
        """
        return union(self._rounds or ((step.start, step.start + step.end) for step in self.judged))

    @property
    def window_in_words(self) -> str:
        """What :attr:`window` is, for people."""
        first, last = self.judged[0], self.judged[-1]
        if not self._rounds:
            steps = f"step {last.step}" if first is last else f"steps {first.step} to {last.step}"
            return steps + (", of the engines up to its samples" if last.engines else "")
        if first is last:
            return f"the {total(self.window):.1f} s up to the samples of step {last.step}"
        return f"the {total(self.window):.1f} s from the samples of step {first.step} to those of step {last.step}"

    @functools.cached_property
    def trainer(self) -> dict[str, float]:
        """Share of the window by phase of the driver, the largest first; what is in no phase is ``other``."""
        phases: dict[str, list[Interval]] = {}
        for step in self.steps:
            for name, begin, end in step.phases:
                phases.setdefault(name, []).append((step.start + begin, step.start + end))
        whole = total(self.window) or 1.0
        shares = {name: total(intersection(union(times), self.window)) / whole for name, times in phases.items()}
        shares = {name: share for name, share in shares.items() if share}
        shares["other"] = max(0.0, 1.0 - math.fsum(shares.values()))
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    @property
    def trainer_waits(self) -> float:
        """Share of the window in which the trainer waited, of a run with ``--fully-async``."""
        return math.fsum(self.trainer.get(name, 0.0) for name in WAITS)

    @functools.cached_property
    def engines(self) -> dict[str, EngineShares]:
        """The shares of each engine by its name."""
        names = dict.fromkeys(name for step in self._counted for name in step.engines)
        return {name: self._engine(name) for name in names}

    @property
    def engine_mean(self) -> EngineShares | None:
        """The mean of all engines; None without engines."""
        found = [dataclasses.astuple(shares) for shares in self.engines.values()]
        return EngineShares(*(math.fsum(column) / len(found) for column in zip(*found, strict=True))) if found else None

    def _engine(self, name: str) -> EngineShares:
        parts = [(step, step.engines[name]) for step in self._counted if name in step.engines]
        seconds: dict[State, float] = {
            state: math.fsum(engine.seconds.get(state, 0.0) for _, engine in parts)
            for state in ("busy", "idle", "paused")
        }
        requests = math.fsum(e.running.get("busy", 0.0) * e.seconds.get("busy", 0.0) for _, e in parts)
        rest = math.fsum(trainers_turn(step, name) for step in (step for step, _ in parts))
        whole = math.fsum(seconds.values())
        return EngineShares(
            busy=seconds["busy"] / whole,
            idle=(seconds["idle"] - rest) / whole,
            paused=seconds["paused"] / whole,
            resting=rest / whole,
            running=requests / seconds["busy"] if seconds["busy"] else 0.0,
        )


def trainers_turn(step: Step, name: str) -> float:
    """Seconds in which an engine was idle because it was the trainer's turn; 0 unless they take turns."""
    if step.run.mode != "colocate":
        return 0.0
    # The intervals are merged where they are short, so that their idle time is not exactly that of the seconds.
    return max(0.0, step.engines[name].seconds.get("idle", 0.0) - total(idle_in_turn(step, name)))


def idle_in_turn(step: Step, name: str) -> list[Interval]:
    """Intervals, seconds after the start, in which an engine was idle while it was the engines' turn (colocate)."""
    idle = union((begin, end) for state, begin, end in step.engines[name].intervals if state == "idle")
    turns = union((begin, end) for phase, begin, end in step.phases if phase in ("generate", "eval"))
    return intersection(idle, turns)
