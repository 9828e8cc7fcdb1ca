"""One trace file in compact columns: what the analysers need, and nothing else of each event."""

import dataclasses
import math
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_profiling.trace.flops import COUNTED, operator_flops
from relax_profiling.trace.reader import Event, NotATrace, TraceReader

COMPUTE, COMMUNICATION, MEMORY = 0, 1, 2

# Microseconds: a duration of four months and a time of three thousand years are damage.
_LONGEST, _FURTHEST = 1e13, 1e17
# NCCL and RCCL, and the all-reduce kernels that inference engines bring themselves.
_COMMUNICATION_KERNEL = re.compile(
    r"^(nccl|rccl)|cross_device_reduce|one_shot_all_reduce|two_shot_all_reduce|multimem_all_reduce|"
    r"all_?reduce_?fusion|nvshmem|deep_ep::",
    re.IGNORECASE,
)
_COMMUNICATION_HOST = re.compile(r"^(gloo:|nccl:|c10d::|c10d_functional::|_c10d_functional::)")
_DATA_HOST = re.compile(
    r"dataloader|data_loader|next_batch_to_train|wait_for_data|get_batch\b|recv_requests|scheduler\.recv", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Span:
    """An annotation: a named stretch of time, in microseconds on the trace's clock."""

    name: str
    start: float
    end: float
    on_device: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation on the device, in microseconds on the trace's clock.

    ``group`` is the description of its process group, ``members`` the text of the global ranks in it.
    """

    kind: str
    group: str
    group_size: int
    members: str
    start: float
    end: float


class GpuColumns:
    """The device's activities of one GPU, column by column, sorted by start after :meth:`sort`. Microseconds."""

    def __init__(self) -> None:
        self.start = array("d")
        self.end = array("d")
        self.kind = bytearray()
        self.name = array("l")
        self.correlation = array("q")

    def __len__(self) -> int:
        return len(self.start)

    def sort(self) -> None:
        order = sorted(range(len(self.start)), key=self.start.__getitem__)
        self.start = array("d", [self.start[i] for i in order])
        self.end = array("d", [self.end[i] for i in order])
        self.kind = bytearray(self.kind[i] for i in order)
        self.name = array("l", [self.name[i] for i in order])
        self.correlation = array("q", [self.correlation[i] for i in order])


class HostColumns:
    """The operators of one host thread: start, duration (microseconds), name."""

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.name = array("l")


class Trace:
    """One trace file, read.

    Attributes:
        path: the file.
        meta: the fields of the file beside the events.
        problems: what could not be read.
        names: the text of every name id.
        gpus: device number -> its activities.
        threads: host thread -> its operators.
        launches: correlation id -> start of the call that launched it.
        runtime: starts and ends of the runtime calls, for telling a busy host from an idle one.
        spans: annotations.
        collectives: on the device, in order of start.
        flops: element type -> floating-point operations of the operators whose shapes were recorded.
        allocated: device -> peak of allocated bytes; empty when memory was not recorded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.problems: list[str] = []
        self.events = 0
        self.names: list[str] = []
        self.gpus: dict[int, GpuColumns] = {}
        self.threads: dict[Any, HostColumns] = {}
        self.launches: dict[int, float] = {}
        self.runtime_start = array("d")
        self.runtime_end = array("d")
        self.spans: list[Span] = []
        self.collectives: list[Collective] = []
        self.flops: dict[str, float] = {}
        self.allocated: dict[int, int] = {}
        self.processes: set[str] = set()
        self.first = math.inf
        self.last = -math.inf
        self._name_ids: dict[str, int] = {}

    @property
    def base(self) -> float:
        """Microseconds since the epoch of this trace's zero."""
        value = self.meta.get("baseTimeNanoseconds", 0)
        return value / 1000 if isinstance(value, (int, float)) else 0.0

    @property
    def gpu_name(self) -> str | None:
        devices = self.meta.get("deviceProperties")
        if isinstance(devices, list) and devices and isinstance(devices[0], dict):
            return str(devices[0].get("name", "")) or None
        return None

    @property
    def has_shapes(self) -> bool:
        return bool(self.meta.get("record_shapes") or self.meta.get("with_flops"))

    def name_id(self, name: str) -> int:
        known = self._name_ids.get(name)
        if known is None:
            if not isinstance(name, str):
                raise TypeError("a name is text")
            known = self._name_ids[name] = len(self.names)
            self.names.append(name)
        return known


def load_trace(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        NotATrace: for a file that holds no event.
        OSError: when it cannot be opened.
    """
    trace = Trace(path)
    reader = TraceReader(path)
    trace.meta = reader.meta
    loader = _Loader(trace)
    for events in reader.chunks():
        trace.events += len(events)
        loader.take(events)
    loader.finish()
    trace.problems = reader.problems
    if loader.malformed:
        trace.problems.append(f"{loader.malformed} events have missing or impossible fields and are left out")
    if trace.events == 0:
        raise NotATrace(f"{path}: holds no events")
    return trace


class _Loader:
    """Sorts events into the columns of a trace, by their category. Millions pass here: one call an event."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kinds: dict[str, int] = {}
        self._name_ids = trace._name_ids
        self.malformed = 0
        self._takers: dict[Any, Callable[[Event], None]] = {
            "cpu_op": self._operator,
            "cuda_runtime": self._launch,
            "cuda_driver": self._launch,
            "kernel": self._device_activity,
            "gpu_memcpy": self._device_activity,
            "gpu_memset": self._device_activity,
            "user_annotation": self._annotation,
            "gpu_user_annotation": self._annotation,
            "cpu_instant_event": self._memory,
            None: self._metadata,
        }

    def take(self, events: list[Event]) -> None:
        takers = self._takers
        for event in events:
            try:
                taker = takers.get(event.get("cat"))
                if taker is not None:
                    taker(event)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                self.malformed += 1

    def finish(self) -> None:
        """Sorts, and finds the first and last time."""
        trace = self._trace
        starts = [s.start for s in trace.spans]
        ends = [s.end for s in trace.spans]
        for gpu in trace.gpus.values():
            gpu.sort()
            starts.append(gpu.start[0])
            ends.append(max(gpu.end))
        for thread in trace.threads.values():
            starts.append(min(thread.start))
            ends.append(max(s + d for s, d in zip(thread.start, thread.duration, strict=True)))
        if trace.runtime_start:
            starts.append(min(trace.runtime_start))
            ends.append(max(trace.runtime_end))
        trace.first, trace.last = min(starts, default=math.inf), max(ends, default=-math.inf)
        trace.collectives.sort(key=lambda c: c.start)

    def _operator(self, e: Event) -> None:
        start = float(e["ts"])
        duration = float(e.get("dur", 0.0))
        if not (0.0 <= duration < _LONGEST and -_FURTHEST < start < _FURTHEST):
            raise ValueError("impossible time")
        trace = self._trace
        name = e["name"]
        # Before the columns grow: a name that is no text must not leave them uneven.
        name_id = self._name_ids.get(name)
        if name_id is None:
            name_id = trace.name_id(name)
        thread = e.get("tid")
        columns = trace.threads.get(thread)
        if columns is None:
            columns = trace.threads[thread] = HostColumns()
        columns.start.append(start)
        columns.duration.append(duration)
        columns.name.append(name_id)
        if name in COUNTED:
            arguments = e.get("args") or {}
            if "Input Dims" in arguments:
                counted = operator_flops(name, arguments["Input Dims"])
                if counted:
                    dtype = str((arguments.get("Input type") or ["?"])[0])
                    trace.flops[dtype] = trace.flops.get(dtype, 0.0) + counted

    def _device_activity(self, e: Event) -> None:
        start = float(e["ts"])
        duration = float(e.get("dur", 0.0))
        if not (0.0 <= duration < _LONGEST and -_FURTHEST < start < _FURTHEST):
            raise ValueError("impossible time")
        trace = self._trace
        arguments = e.get("args") or {}
        device = arguments.get("device")
        if not isinstance(device, int):
            device = int(e["pid"])
        name = e["name"]
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = device_kind(name, e["cat"])
        correlation = int(arguments.get("correlation", -1))
        name_id = trace.name_id(name)
        columns = trace.gpus.get(device)
        if columns is None:
            columns = trace.gpus[device] = GpuColumns()
        columns.correlation.append(correlation)  # first: it may be too large for its column
        columns.start.append(start)
        columns.end.append(start + duration)
        columns.kind.append(kind)
        columns.name.append(name_id)
        if kind == COMMUNICATION:
            what = str(arguments.get("Collective name") or _collective_of(name))
            group = str(arguments.get("Process Group Description") or arguments.get("Process Group Name") or "")
            size = arguments.get("Group size")
            members = str(arguments.get("Process Group Ranks", ""))
            count = size if isinstance(size, int) else 0
            trace.collectives.append(Collective(what, group, count, members, start, start + duration))

    def _launch(self, e: Event) -> None:
        start = float(e["ts"])
        duration = float(e.get("dur", 0.0))
        if not (0.0 <= duration < _LONGEST and -_FURTHEST < start < _FURTHEST):
            raise ValueError("impossible time")
        trace = self._trace
        correlation = e["args"].get("correlation")
        if correlation is not None:
            trace.launches[correlation] = start
        trace.runtime_start.append(start)
        trace.runtime_end.append(start + duration)

    def _annotation(self, e: Event) -> None:
        start, duration = _times(e)
        self._trace.spans.append(Span(str(e["name"]), start, start + duration, e["cat"] == "gpu_user_annotation"))

    def _memory(self, e: Event) -> None:
        arguments = e.get("args") or {}
        allocated = arguments.get("Total Allocated")
        if e.get("name") == "[memory]" and arguments.get("Device Type") == 1 and isinstance(allocated, int):
            device = int(arguments.get("Device Id", 0))
            peaks = self._trace.allocated
            peaks[device] = max(peaks.get(device, 0), allocated)

    def _metadata(self, e: Event) -> None:
        if e.get("ph") == "M" and e.get("name") == "process_name":
            self._trace.processes.add(str(e["args"]["name"]))


def _times(e: Event) -> tuple[float, float]:
    """Start and duration in microseconds; the handlers of the most frequent events have these lines in them."""
    start = float(e["ts"])
    duration = float(e.get("dur", 0.0))
    if not (0.0 <= duration < _LONGEST and -_FURTHEST < start < _FURTHEST):
        raise ValueError("impossible time")
    return start, duration


def device_kind(name: str, category: str = "kernel") -> int:
    """:data:`COMPUTE`, :data:`COMMUNICATION` or :data:`MEMORY` of a device activity."""
    if category != "kernel" or name.startswith(("Memcpy", "Memset")):
        return MEMORY
    return COMMUNICATION if _COMMUNICATION_KERNEL.search(name) else COMPUTE


def is_host_communication(name: str) -> bool:
    """Whether a host operator is a collective (gloo's, or the call that waits for NCCL's)."""
    return _COMMUNICATION_HOST.match(name) is not None


def is_data_wait(name: str) -> bool:
    """Whether a host operator or annotation is the wait for the next data."""
    return _DATA_HOST.search(name) is not None


def _collective_of(kernel: str) -> str:
    found = re.search(r"(all_?reduce|all_?gather|reduce_?scatter|broadcast|send_?recv|all_?to_?all)", kernel, re.I)
    if found is None:
        return "collective"
    plain = found.group(1).lower().replace("_", "")
    return {"allreduce": "allreduce", "allgather": "allgather", "reducescatter": "reduce_scatter"}.get(plain, plain)
