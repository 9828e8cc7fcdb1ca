"""Breaks down the time of one device, and its idle time by cause.

The shares of compute and idle time are those of HolisticTraceAnalysis' temporal breakdown: over the span from the first
to the last activity of the device.
"""

import dataclasses
import itertools
import re

from relax_profiling.analysis.intervals import Cover, Interval, intersection, total, union
from relax_profiling.trace.load import (
    COMMUNICATION,
    COMPUTE,
    MEMORY,
    GpuColumns,
    Trace,
    is_data_wait,
    is_host_communication,
)

# A kernel follows the one before it after a few microseconds even when both were queued long before.
_DEVICE_LATENCY_US = 10.0
# Python between two launches takes microseconds; a host that shows nothing for longer is doing something else.
_SILENT_HOST_US = 1000.0

_STEP_MARK = re.compile(r"^(train_overall|train_actor|train_log_probs)(#\d+)?$")

IDLE_CAUSES = {
    "launch": "host-bound launch gaps",
    "collective": "host waits for a collective",
    "data": "waiting for data",
    "between": "between steps",
    "host": "host outside torch (Python, I/O, sleep)",
    "other": "other waits of the device",
}


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Microseconds of one device (or of the host, for a trace without device activity).

    ``compute + communication_exposed + memory + idle`` is ``span``; ``communication_overlapped`` lies within compute.
    """

    span: float
    compute: float
    communication_exposed: float
    communication_overlapped: float
    memory: float
    idle: float
    idle_causes: dict[str, float]
    on_device: bool

    @property
    def between(self) -> float:
        """The part of ``idle`` that lies between the marked steps: with ``--colocate`` it is the engines' turn."""
        return self.idle_causes.get("between", 0.0)

    @property
    def idle_in_steps(self) -> float:
        """The rest of ``idle``; all of it where no steps are marked."""
        return max(0.0, self.idle - self.between)

    def of_steps(self, microseconds: float) -> float:
        """The share that a time is of the span without what lies between the steps."""
        within = self.span - self.between
        return microseconds / within if within > 0 else 0.0

    def share(self, part: str) -> float:
        """A part's share of the span, 0 to 1."""
        return self.of_span(float(getattr(self, part)))

    def of_span(self, microseconds: float) -> float:
        """The share of the span that a time is; 0 for a span without length, as of a single event."""
        return microseconds / self.span if self.span > 0 else 0.0


def device_breakdown(trace: Trace, gpu: GpuColumns) -> Breakdown:
    """The breakdown of one device's activities."""
    parts: list[list[Interval]] = []
    for kind in (COMPUTE, COMMUNICATION, MEMORY):
        parts.append(union((s, e) for s, e, k in zip(gpu.start, gpu.end, gpu.kind, strict=True) if k == kind))
    compute, communication, memory = parts
    busy = union(compute + communication + memory)
    overlapped = total(intersection(compute, communication))
    working = union(compute + communication)
    memory_exposed = total(memory) - total(intersection(memory, working))
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    return Breakdown(
        span=span,
        compute=total(compute),
        communication_exposed=total(communication) - overlapped,
        communication_overlapped=overlapped,
        memory=memory_exposed,
        idle=span - total(busy),
        idle_causes=_idle_causes(trace, gpu, busy),
        on_device=True,
    )


def host_breakdown(trace: Trace) -> Breakdown:
    """The breakdown of the host's operators, for a run without a device."""
    communication_ids = {i for i, n in enumerate(trace.names) if is_host_communication(n)}
    compute: list[Interval] = []
    communication = [(s.start, s.end) for s in trace.spans if is_host_communication(s.name)]
    for thread in trace.threads.values():
        for start, duration, name in zip(thread.start, thread.duration, thread.name, strict=True):
            (communication if name in communication_ids else compute).append((start, start + duration))
    compute, communication = union(compute), union(communication)
    overlapped = total(intersection(compute, communication))
    marked = union((s.start, s.end) for s in trace.spans)
    busy = union(compute + communication)
    everything = union(busy + marked)
    span = everything[-1][1] - everything[0][0] if everything else 0.0
    idle = span - total(busy)
    # Inside an annotation the process works on the step, though not in torch; outside, it waits for the next one.
    inside = total(marked) - total(intersection(marked, busy))
    return Breakdown(
        span=span,
        compute=total(compute),
        communication_exposed=total(communication) - overlapped,
        communication_overlapped=overlapped,
        memory=0.0,
        idle=idle,
        idle_causes={"host": inside, "between": max(0.0, idle - inside)} if marked else {"host": idle},
        on_device=False,
    )


def step_spans(trace: Trace) -> list[tuple[str, float, float]]:
    """The training steps that are marked in a trace: the outermost kind of mark that is there."""
    for target in ("train_overall", "train_actor", "train_log_probs"):
        found = [
            (s.name, s.start, s.end)
            for s in trace.spans
            if not s.on_device and _STEP_MARK.match(s.name) and s.name.startswith(target)
        ]
        if found:
            return sorted(found, key=lambda f: f[1])
    profiled = [(s.name, s.start, s.end) for s in trace.spans if not s.on_device and s.name.startswith("ProfilerStep#")]
    return sorted(profiled, key=lambda f: f[1])


def _idle_causes(trace: Trace, gpu: GpuColumns, busy: list[Interval]) -> dict[str, float]:
    """Splits every gap of the device by what the host did until it launched the work that ends the gap."""
    causes = dict.fromkeys(IDLE_CAUSES, 0.0)
    host = _HostActivity(trace)
    i = 0
    for (_, gap_start), (gap_end, _) in itertools.pairwise(busy):
        gap = gap_end - gap_start
        while gpu.start[i] < gap_end:
            i += 1
        launched = trace.launches.get(gpu.correlation[i])
        if launched is None:
            causes["other"] += gap
        elif launched <= gap_start:
            # It was queued in time: short is the device's own latency, long is a wait for another stream or device.
            causes["launch" if gap <= _DEVICE_LATENCY_US else "other"] += gap
        else:
            late = min(launched, gap_end)
            causes["launch"] += gap_end - late
            host.explain(gap_start, late, causes)
    return {k: v for k, v in causes.items() if v > 0}


class _HostActivity:
    """Activity of the host at any time: collectives, waits for data, torch work, nothing that torch sees."""

    def __init__(self, trace: Trace) -> None:
        collective_ids = {i for i, n in enumerate(trace.names) if is_host_communication(n)}
        data_ids = {i for i, n in enumerate(trace.names) if is_data_wait(n)}
        work: list[Interval] = list(zip(trace.runtime_start, trace.runtime_end, strict=True))
        collective: list[Interval] = []
        data: list[Interval] = [(s.start, s.end) for s in trace.spans if not s.on_device and is_data_wait(s.name)]
        for thread in trace.threads.values():
            for start, duration, name in zip(thread.start, thread.duration, thread.name, strict=True):
                interval = (start, start + duration)
                work.append(interval)
                if name in collective_ids:
                    collective.append(interval)
                elif name in data_ids:
                    data.append(interval)
        self._work = Cover(union(work))
        self._collective = Cover(union(collective))
        self._data = Cover(union(data))
        self._steps = Cover(union((s, e) for _, s, e in step_spans(trace)))

    def explain(self, start: float, end: float, causes: dict[str, float]) -> None:
        """Adds the parts of a window, in which the device had nothing to do, to their causes."""
        if end - start < _DEVICE_LATENCY_US:
            causes["launch"] += end - start
            return
        collective = self._collective.within(start, end)
        data = self._data.within(start, end)
        waited = union(collective + data)
        causes["collective"] += total(collective)
        causes["data"] += total(waited) - total(collective)
        for s, e in Cover(waited).outside(start, end):
            for quiet_start, quiet_end in self._work.outside(s, e):
                quiet = quiet_end - quiet_start
                if quiet < _SILENT_HOST_US:
                    causes["launch"] += quiet
                    continue
                between = total(self._steps.outside(quiet_start, quiet_end)) if self._steps else 0.0
                causes["between"] += between
                causes["host"] += quiet - between
            causes["launch"] += total(self._work.within(s, e))
