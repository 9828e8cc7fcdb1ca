"""Communication by kind and process group: how often, how long, and how much of it nothing hides."""

import dataclasses

from relax_profiling.analysis.intervals import Interval, intersection, total, union
from relax_profiling.trace.load import COMPUTE, GpuColumns, Trace


@dataclasses.dataclass(frozen=True)
class CommunicationKind:
    """Collectives of one kind in one process group. Microseconds; ``exposed`` is what no computation runs beside."""

    kind: str
    group: str
    group_size: int
    calls: int
    time: float
    exposed: float


def communication_kinds(trace: Trace, gpu: GpuColumns) -> list[CommunicationKind]:
    """The kinds on one device of a trace, the most exposed first."""
    collectives = [c for c in trace.collectives if trace.gpus.get(c.device) is gpu]
    if not collectives:
        return []
    compute = union((s, e) for s, e, k in zip(gpu.start, gpu.end, gpu.kind, strict=True) if k == COMPUTE)
    grouped: dict[tuple[str, str, int], list[Interval]] = {}
    for c in collectives:
        grouped.setdefault((c.kind, c.group, c.group_size), []).append((c.start, c.end))
    kinds = []
    for (kind, group, size), intervals in grouped.items():
        merged = union(intervals)
        exposed = total(merged) - total(intersection(merged, compute))
        kinds.append(CommunicationKind(kind, group, size, len(intervals), total(merged), exposed))
    return sorted(kinds, key=lambda k: -k.exposed)
