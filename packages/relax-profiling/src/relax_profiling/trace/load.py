"""One trace file in compact columns: what the analysers need, and nothing else of each event."""

import contextlib
import dataclasses
import gc
import math
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from relax_profiling.trace.fields import NO_ARGUMENTS, Arguments, Fields, fields_of, read_fields
from relax_profiling.trace.flops import SHAPED, operator_flops
from relax_profiling.trace.reader import Event, NotATrace, TraceReader

COMPUTE, COMMUNICATION, MEMORY = 0, 1, 2
# Annotations around the steps of a training loop: ours, and torch.profiler's.
STEP_PREFIXES = ("train_overall", "train_actor", "train_log_probs", "ProfilerStep#")

# Microseconds: a duration of four months and a time of three thousand years are damage.
_LONGEST, FURTHEST = 1e13, 1e17
# Bytes and operations beyond any machine are damage too, and may be too large to compute with.
_MOST_BYTES, _MOST_FLOPS = 1 << 60, 1e30
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
    device: int = 0


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
        """Orders all columns by the start of the activity."""
        order = sorted(range(len(self.start)), key=self.start.__getitem__)
        self.start = array("d", [self.start[i] for i in order])
        self.end = array("d", [self.end[i] for i in order])
        self.kind = bytearray(self.kind[i] for i in order)
        self.name = array("l", [self.name[i] for i in order])
        self.correlation = array("q", [self.correlation[i] for i in order])


class HostColumns:
    """The operators, or the Python functions, of one host thread: start, duration (microseconds), name.

    ``flops`` holds the operations of those whose shapes were recorded, by their place in the columns.
    """

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.name = array("l")
        self.flops: dict[int, float] = {}

    def add(self, start: float, duration: float, name: int) -> None:
        """Appends one."""
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(name)


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
        launched_by: correlation id -> host thread of that call.
        frames: host thread -> its Python functions; empty when stacks were not recorded.
        shapes: (operator, text of its input shapes) -> calls, of products and embeddings.
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
        self.launched_by: dict[int, Any] = {}
        self.frames: dict[Any, HostColumns] = {}
        self.shapes: dict[tuple[str, bytes], int] = {}
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
        known = isinstance(value, (int, float)) and -FURTHEST * 1000 < value < FURTHEST * 1000
        return value / 1000 if known else 0.0

    @property
    def gpu_name(self) -> str | None:
        """Name of the first GPU (``NVIDIA H200``); None when the trace has none."""
        devices = self.meta.get("deviceProperties")
        if isinstance(devices, list) and devices and isinstance(devices[0], dict):
            return str(devices[0].get("name", "")) or None
        return None

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of the first GPU; None when the trace does not say."""
        devices = self.meta.get("deviceProperties")
        first = devices[0] if isinstance(devices, list) and devices else None
        total = first.get("totalGlobalMem") if isinstance(first, dict) else None
        return total if isinstance(total, int) and 0 < total < _MOST_BYTES else None

    def clock_and_collectives(self) -> "Trace":
        """The part that comparing several traces needs, so that the rest need not be kept."""
        slim = Trace(self.path)
        slim.meta = {"baseTimeNanoseconds": self.meta.get("baseTimeNanoseconds", 0)}
        slim.problems, slim.collectives = self.problems, self.collectives
        slim.spans = [s for s in self.spans if not s.on_device and s.name.startswith(STEP_PREFIXES)]
        slim.first, slim.last = self.first, self.last
        return slim

    def name_id(self, name: str) -> int:
        """The number that stands for a name in the columns; a new name gets the next one."""
        known = self._name_ids.get(name)
        if known is None:
            if not name:
                raise ValueError("an activity needs a name")
            known = self._name_ids[name] = len(self.names)
            self.names.append(name)
        return known


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """For reading traces: millions of small objects without a cycle, at which the collector looks again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
    for events in reader.typed_chunks(read_fields):
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
        self._counted: dict[tuple[str, bytes, bytes], tuple[float, str]] = {}
        self._name_ids = trace._name_ids
        self.malformed = 0
        self._takers: dict[Any, Callable[[Fields], None]] = {
            "cpu_op": self._operator,
            "python_function": self._frame,
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

    def take(self, events: list[Fields] | list[Event]) -> None:
        takers = self._takers
        for event in events:
            try:
                if isinstance(event, dict):
                    if event.get("cat") not in takers:
                        continue
                    event = fields_of(event)
                taker = takers.get(event.cat)
                if taker is not None:
                    taker(event)
            except (TypeError, ValueError, OverflowError):
                self.malformed += 1

    def finish(self) -> None:
        """Sorts, and finds the first and last time."""
        trace = self._trace
        # A device of which every event was refused has none.
        trace.gpus = {device: gpu for device, gpu in trace.gpus.items() if gpu.start}
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

    def _operator(self, e: Fields) -> None:
        start, duration = _times(e)
        name = e.name
        name_id = self._name_ids.get(name)
        if name_id is None:
            name_id = self._trace.name_id(name)
        columns = self._trace.threads.get(e.tid)
        if columns is None:
            columns = self._trace.threads[e.tid] = HostColumns()
        columns.add(start, duration, name_id)
        if name in SHAPED and e.args is not None and e.args.dims:
            flops = self._count(name, e.args)
            if flops:
                columns.flops[len(columns.start) - 1] = flops

    def _frame(self, e: Fields) -> None:
        start, duration = _times(e)
        columns = self._trace.frames.get(e.tid)
        if columns is None:
            columns = self._trace.frames[e.tid] = HostColumns()
        columns.add(start, duration, self._trace.name_id(e.name))

    def _count(self, name: str, arguments: Arguments) -> float:
        """Adds an operator's FLOPs; a model calls the same operator with the same shapes again and again."""
        key = (name, bytes(arguments.dims), bytes(arguments.types))
        counted = self._counted.get(key)
        if counted is None:
            types = orjson.loads(key[2]) if key[2] else None
            flops = operator_flops(name, orjson.loads(key[1]))
            if not flops < _MOST_FLOPS:
                raise ValueError("impossible shapes")
            counted = flops, str(types[0]) if isinstance(types, list) and types else "?"
            self._counted[key] = counted
        flops, dtype = counted
        shaped = (name, key[1])
        self._trace.shapes[shaped] = self._trace.shapes.get(shaped, 0) + 1
        if flops:
            self._trace.flops[dtype] = self._trace.flops.get(dtype, 0.0) + flops
        return flops

    def _device_activity(self, e: Fields) -> None:
        start, duration = _times(e)
        name = e.name
        arguments = e.args or NO_ARGUMENTS
        device = arguments.device
        if not isinstance(device, int):
            device = int(e.pid)
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = device_kind(name, e.cat or "")
        correlation = -1 if arguments.correlation is None else int(arguments.correlation)
        name_id = self._name_ids.get(name)
        if name_id is None:
            name_id = self._trace.name_id(name)
        columns = self._trace.gpus.get(device)
        if columns is None:
            columns = self._trace.gpus[device] = GpuColumns()
        columns.correlation.append(correlation)  # first: it may be too large for its column
        columns.start.append(start)
        columns.end.append(start + duration)
        columns.kind.append(kind)
        columns.name.append(name_id)
        if kind == COMMUNICATION:
            what = str(arguments.collective or _collective_of(name))
            group = str(arguments.group or arguments.group_name or "")
            size = arguments.group_size if isinstance(arguments.group_size, int) else 0
            members = str(arguments.members or "")
            self._trace.collectives.append(Collective(what, group, size, members, start, start + duration, device))

    def _launch(self, e: Fields) -> None:
        start, duration = _times(e)
        trace = self._trace
        if e.args is not None and e.args.correlation is not None:
            hash(e.tid)  # a list or an object is no thread: the event is damaged, as one of another kind would be
            trace.launches[e.args.correlation] = start
            trace.launched_by[e.args.correlation] = e.tid
        trace.runtime_start.append(start)
        trace.runtime_end.append(start + duration)

    def _annotation(self, e: Fields) -> None:
        start, duration = _times(e)
        self._trace.spans.append(Span(e.name, start, start + duration, e.cat == "gpu_user_annotation"))

    def _memory(self, e: Fields) -> None:
        arguments = e.args or NO_ARGUMENTS
        allocated = arguments.allocated
        if e.name == "[memory]" and arguments.device_type == 1 and isinstance(allocated, int):
            if not 0 <= allocated < _MOST_BYTES:
                raise ValueError("impossible size")
            device = int(arguments.device_id or 0)
            peaks = self._trace.allocated
            peaks[device] = max(peaks.get(device, 0), allocated)

    def _metadata(self, e: Fields) -> None:
        if e.ph == "M" and e.name == "process_name" and e.args is not None:
            self._trace.processes.add(str(e.args.name))


def _times(e: Fields) -> tuple[float, float]:
    """Start and duration in microseconds."""
    start, duration = e.ts, e.dur
    if not (0.0 <= duration < _LONGEST and -FURTHEST < start < FURTHEST):
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
