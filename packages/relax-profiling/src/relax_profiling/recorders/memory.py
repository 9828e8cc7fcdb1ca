"""The table of memory recorders: allocations of the GPU (torch) or of the host (memray). Needs neither of both.

A further recorder is one file with a class like those two, and one line in :data:`RECORDERS`: the choices of
``--memory-recorder`` are the keys of that table.
"""

from pathlib import Path
from typing import Protocol

from relax_profiling.recorders.memory_memray import MemrayRecorder
from relax_profiling.recorders.memory_torch import TorchRecorder
from relax_profiling.recorders.trace_files import RankTag


class MemoryRecorder(Protocol):
    """Records allocations from :meth:`start` to :meth:`close`."""

    def start(self) -> None:
        """Before the first parameter is allocated. Never raises for a host that cannot record: it warns."""
        ...

    def dump(self) -> Path | None:
        """Writes what was recorded up to now; None when there is nothing to write."""
        ...

    def close(self) -> None:
        """Stops recording and completes the files; may be called twice."""
        ...


class RecorderBuilder(Protocol):
    """Makes a recorder; a class with this constructor and the static method ``missing`` is one."""

    def __call__(self, directory: Path, tag: RankTag, suffix: str, /) -> MemoryRecorder:
        """A recorder for one process that does not record yet.

        Args:
            directory: where the files go; made when the first one is written.
            tag: the place of the process among all, for the names of the files.
            suffix: end of the names, for instance ``snapshot.pickle``; a recorder may change its extension.
        """
        ...

    def missing(self) -> str | None:
        """The end of an error message, ``needs the package x: pip install x``; None when nothing is missing."""
        ...


RECORDERS: dict[str, RecorderBuilder] = {"torch": TorchRecorder, "memray": MemrayRecorder}
