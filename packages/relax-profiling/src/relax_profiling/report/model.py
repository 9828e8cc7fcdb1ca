"""The report as data: one object a file, and the findings."""

import dataclasses
from typing import Any

from relax_profiling.analysis.breakdown import Breakdown
from relax_profiling.analysis.communication import CommunicationKind
from relax_profiling.analysis.ranks import RankWaits
from relax_profiling.analysis.stages import Stage
from relax_profiling.analysis.top import TopEntry
from relax_profiling.analysis.work import Work
from relax_profiling.snapshot.analyse import DeviceMemory, Growth, Holder
from relax_profiling.timeline.shares import Timeline


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """One trace. Times in microseconds.

    Attributes:
        role: ``train`` or ``engine``.
        start: microseconds since the epoch at which it begins; 0 when the trace does not say.
        steps: durations of the marked training steps.
        flops: operations of the operators whose shapes were recorded; 0 when none were.
        mfu: model FLOPs utilisation, 0 to 1; None without FLOPs or without a known peak.
        stages: prefill and decode of an engine.
        waits: this rank among its peers.
        work: the computation by kind; None where nothing computes.
        device_memory: bytes of the device; None when the trace does not say.
    """

    role: str
    run: str
    label: str
    file: str
    events: int
    device: str
    breakdown: Breakdown
    kernels: list[TopEntry]
    operators: list[TopEntry]
    communication: list[CommunicationKind]
    target: str = ""
    rollout: int | None = None
    start: float = 0.0
    steps: list[float] = dataclasses.field(default_factory=list)
    flops: float = 0.0
    mfu: float | None = None
    allocated_peak: int | None = None
    stages: list[Stage] = dataclasses.field(default_factory=list)
    waits: RankWaits | None = None
    launches: int = 0
    work: Work | None = None
    device_memory: int | None = None

    @property
    def tflops(self) -> float | None:
        """Achieved TFLOP/s of the operators whose shapes were recorded."""
        return self.flops / self.breakdown.span / 1e6 if self.flops and self.breakdown.span else None

    @property
    def step_mean(self) -> float | None:
        """Mean duration of a marked step, microseconds."""
        return sum(self.steps) / len(self.steps) if self.steps else None

    @property
    def communication_own(self) -> float:
        """Exposed communication without the wait for later ranks, microseconds: what less traffic would save."""
        waits = self.waits.waits if self.waits else 0.0
        return max(0.0, self.breakdown.communication_exposed - waits)


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """One memory recording: the devices of a torch snapshot, or the host memory of a memray file (bytes)."""

    run: str
    label: str
    file: str
    kind: str
    stamp: int
    devices: list[DeviceMemory] = dataclasses.field(default_factory=list)
    host_peak: int | None = None
    host_holders: list[Holder] = dataclasses.field(default_factory=list)
    growth: list[Growth] = dataclasses.field(default_factory=list)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One piece of advice: what was seen, the figure behind it, and the flags that change it."""

    rule: str
    where: str
    figure: str
    advice: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Report:
    """All of it.

    Attributes:
        problems: name the files that could not be read, in whole or in part, and why.
        timelines: of runs, by what the trainer and the engines did in each step.
    """

    sources: list[str]
    traces: list[TraceReport]
    memory: list[MemoryReport]
    findings: list[Finding]
    problems: list[str]
    timelines: list[Timeline] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data; the curves of memory and the intervals of steps are left to the HTML page."""
        data = dataclasses.asdict(dataclasses.replace(self, timelines=[]))
        data["timelines"] = [
            {
                "file": timeline.file,
                "steps": len(timeline.steps),
                "judged": [timeline.judged[0].step, timeline.judged[-1].step],
                "window": timeline.window,
                "trainer": timeline.trainer,
                "engines": {name: dataclasses.asdict(shares) for name, shares in timeline.engines.items()},
            }
            for timeline in self.timelines
        ]
        for memory in data["memory"]:
            for device in memory["devices"]:
                del device["times"], device["curve"]
        return data
