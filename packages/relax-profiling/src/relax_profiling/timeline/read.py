"""Reads the file that ``relax train`` writes, one line a step; damaged lines are left out and named."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

FILE = "timeline.jsonl"
METRICS = "metrics.jsonl"
"""By which the folder of a run is known that has no timeline."""

State = Literal["busy", "idle", "paused"]
STATES: tuple[State, ...] = ("busy", "idle", "paused")

_LONGEST_LINE = 4 << 20
_FARTHEST_S = 1e9
_MOST_NAMED = 5


class Setup(msgspec.Struct, frozen=True):
    """Mode, GPUs and limits of the launch that wrote a line.

    Attributes:
        mode: ``colocate`` or ``fully_async``.
        device: ``cuda`` or ``cpu``; on CPU a process counts as a GPU.
        train_unit: GPUs that train are a multiple of this.
        over_sampling_batch_size: most groups open at once, as far as this option goes.
        keeps_cache: responses go on over a push from the keys and values that they have.
    """

    mode: str
    device: str
    train_gpus: int
    train_unit: int
    engine_gpus: int
    gpus_per_engine: int
    rollout_batch_size: int
    over_sampling_batch_size: int
    max_staleness: int
    partial_rollout: bool = False
    keeps_cache: bool = False
    weight_sync: str = ""

    @property
    def flag(self) -> str:
        """The mode as it stands on a command line."""
        return f"--{self.mode.replace('_', '-')}"


class EngineStep(msgspec.Struct, frozen=True):
    """One engine in one step.

    Attributes:
        seconds: in each state.
        running: mean number of requests in each state.
        intervals: state, begin and end, seconds after the start of the step; short ones are merged.
    """

    seconds: dict[State, float]
    running: dict[State, float]
    intervals: list[tuple[State, float, float]]

    def share(self, state: State) -> float:
        """Share of the time in a state, 0 to 1."""
        return self.seconds.get(state, 0.0) / sum(self.seconds.values())


class Step(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        start: seconds since the epoch.
        end: seconds after ``start``.
        seconds: that count as the step.
        phases: name, begin and end of what the driver did, seconds after ``start``.
        reprefilled: tokens of which the engines computed keys and values again, for each that they generated.
    """

    step: int
    start: float
    end: float
    seconds: float
    run: Setup
    phases: list[tuple[str, float, float]]
    engines: dict[str, EngineStep] = {}
    reprefilled: float = 0.0

    def spent(self, *names: str) -> float:
        """Seconds in the phases of these names."""
        return math.fsum(end - begin for name, begin, end in self.phases if name in names)


def read_timeline(path: Path) -> tuple[list[Step], list[str]]:
    """The steps of a run, rising, and what is wrong with the file, in words.

    A run that goes on from a checkpoint trains steps again: what stands before in the file from that step on is left
    out.

    Raises:
        OSError: it cannot be read.
    """
    steps: list[Step] = []
    damaged: list[str] = []
    decoder = msgspec.json.Decoder(Step)
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            step = decoder.decode(line)
            _check(step)
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            damaged.append(f"{path}:{number}: {error}")
            continue
        while steps and steps[-1].step >= step.step:
            steps.pop()
        steps.append(step)
    problems = [f"{line}; this line is left out" for line in damaged[:_MOST_NAMED]]
    if len(damaged) > _MOST_NAMED:
        problems.append(
            f"{path}: {len(damaged)} damaged lines are left out, of which the first {_MOST_NAMED} are named"
        )
    if not steps:
        problems.append(f"{path}: no whole line in it, so there is no timeline; the first stands there after a step")
    return steps, problems


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST_LINE):
            number += 1
            whole = line
            while not whole.endswith(b"\n") and (more := file.readline(_LONGEST_LINE)):
                line, whole = b"too long", more  # never kept in memory
            yield number, line


def _check(step: Step) -> None:
    """Raises ValueError for figures that cannot be."""
    numbers = [step.end, step.seconds, step.reprefilled, *(t for _, *times in step.phases for t in times)]
    for name, engine in step.engines.items():
        numbers += [t for _, *times in engine.intervals for t in times]
        if not all(0 <= s < _FARTHEST_S for s in (*engine.seconds.values(), *engine.running.values())):
            raise ValueError(f"{name} has a time or a number of requests below 0 or without end")
        if not sum(engine.seconds.values()) > 0:
            raise ValueError(f"{name} has no time")
        if any(end < begin for _, begin, end in engine.intervals):
            raise ValueError(f"an interval of {name} ends before it begins")
    if not all(abs(number) < _FARTHEST_S for number in (*numbers, step.start / 1e3)):
        raise ValueError("a time is not a number of seconds")
    if step.reprefilled < 0:
        raise ValueError("the tokens whose keys and values were computed again are below 0")
    if step.seconds <= 0 or step.end < 0 or any(end < begin for _, begin, end in step.phases):
        raise ValueError("the step or a phase of it ends before it begins")
    setup = step.run
    if min(setup.train_gpus, setup.train_unit, setup.gpus_per_engine, setup.rollout_batch_size) < 1:
        raise ValueError("'run' names a number below 1")
    if max(setup.train_gpus, setup.engine_gpus) > 1_000_000:
        raise ValueError("'run' names more than a million GPUs")


def run_folders(path: Path) -> list[Path]:
    """The folders of runs under a path, itself included: those with a timeline or metrics.

    Raises:
        OSError: a folder cannot be looked into.
    """
    if path.is_file():
        return [path.parent] if path.name == FILE else []
    if not path.is_dir():
        return []
    return sorted({file.parent for name in (FILE, METRICS) for file in path.rglob(name)})
