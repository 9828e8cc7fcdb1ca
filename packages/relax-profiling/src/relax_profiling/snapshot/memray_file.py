"""Reads memray's recordings through memray itself, where it is installed."""

import dataclasses
from pathlib import Path

from relax_profiling.snapshot.analyse import Frames, Holder
from relax_profiling.snapshot.unpickle import NotASnapshot


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The host memory of one process, in bytes: its peak, and who held it then."""

    peak: int
    seconds: float
    holders: list[Holder]


def read_memray(path: Path, limit: int = 20) -> HostMemory | None:
    """The peak of a recording; None when memray is not installed.

    Raises:
        NotASnapshot: when memray cannot read the file.
    """
    try:
        import memray
    except ImportError:
        return None
    try:
        with memray.FileReader(path) as reader:
            meta = reader.metadata
            sums: dict[Frames, list[int]] = {}
            for record in reader.get_high_watermark_allocation_records(merge_threads=True):
                stack = tuple(f"{name} ({file}:{line})" for name, file, line in record.stack_trace(max_stacks=12))
                entry = sums.setdefault(stack, [0, 0])
                entry[0] += record.size
                entry[1] += record.n_allocations
            holders = sorted((Holder(size, n, stack) for stack, (size, n) in sums.items()), key=lambda h: -h.bytes)
            seconds = (meta.end_time - meta.start_time).total_seconds() if meta.end_time else 0.0
    except Exception as e:  # memray raises what its C++ reader raises
        raise NotASnapshot(f"{path}: memray cannot read it ({e})") from e
    return HostMemory(max(meta.peak_memory, sum(h.bytes for h in holders)), seconds, holders[:limit])
