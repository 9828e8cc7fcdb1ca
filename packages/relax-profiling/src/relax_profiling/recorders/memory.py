"""Memory recorders: allocations of the GPU (torch) or of the host (memray), written after N steps and on OOM.

A further recorder is one class that satisfies :class:`MemoryRecorder`.
"""

import itertools
import logging
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from relax_profiling.recorders.trace_files import Clock, RankTag, memory_snapshot_name, partial_path, publish
from relax_profiling.settings import MemoryProfileSettings

logger = logging.getLogger(__name__)

# Entries of torch's ring buffer: about 1 KB each in the host's memory, some 100 steps of a mid-sized model.
MAX_HISTORY = 100_000


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


class TorchRecorder:
    """CUDA allocations with their Python stacks, as snapshots for the report or PyTorch's memory viewer.

    A snapshot is also written at every out-of-memory error, while the allocations that stood in its way are still
    held; the error itself goes on unchanged.
    """

    def __init__(
        self, directory: Path, tag: RankTag, suffix: str, *, max_entries: int = MAX_HISTORY, clock: Clock = time.time
    ) -> None:
        self._directory = directory
        self._tag = tag
        self._suffix = suffix
        self._max_entries = max_entries
        self._clock = clock
        self._recording = False
        self._memory: types.ModuleType | None = None

    def start(self) -> None:
        import torch

        if not torch.cuda.is_available():
            logger.warning(
                "--record-memory-history records GPU memory and this host has no CUDA device, so nothing is recorded; "
                "--memory-recorder memray records the memory of the host"
            )
            return
        if self._recording:
            return
        self._memory = torch.cuda.memory
        self._memory._record_memory_history(max_entries=self._max_entries, stacks="python")
        # torch has no call to take an observer away: a closed recorder's observer does nothing.
        torch._C._cuda_attach_out_of_memory_observer(self._on_oom)
        self._recording = True

    def dump(self) -> Path | None:
        return self._write(self._suffix) if self._recording else None

    def close(self) -> None:
        if self._recording and self._memory is not None:
            self._recording = False
            self._memory._record_memory_history(enabled=None)

    def _on_oom(self, device: int, requested: int, total: int, free: int) -> None:
        """Called by the allocator on the thread that runs out, before it raises. Must not raise itself."""
        if not self._recording:
            return
        try:
            path = self._write("oom_" + self._suffix)
            logger.warning(
                "out of memory on device %d: %.2f GiB asked for, %.2f GiB free; snapshot in %s",
                device,
                requested / 2**30,
                free / 2**30,
                path,
            )
        except Exception as e:  # the OOM is the error that the user must see, not ours
            logger.warning("out of memory on device %d, and no snapshot could be written: %s", device, e)

    def _write(self, suffix: str) -> Path:
        assert self._memory is not None
        partial = partial_path(self._directory)
        try:
            self._memory._dump_snapshot(str(partial))
            return publish(
                partial, self._directory, lambda stamp: memory_snapshot_name(self._tag, stamp, suffix), self._clock
            )
        finally:
            partial.unlink(missing_ok=True)


class MemrayRecorder:
    """Allocations of the host, in one ``.bin`` file a process that ``memray`` reads (``memray flamegraph FILE``).

    The file is complete after :meth:`close`, and still readable up to its last record after a kill. memray records a
    process once: the snapshot after N steps ends the recording.
    """

    def __init__(
        self, directory: Path, tag: RankTag, suffix: str, *, native_traces: bool = False, clock: Clock = time.time
    ) -> None:
        self._directory = directory
        self._tag = tag
        self._suffix = str(Path(suffix).with_suffix(".bin"))
        self._native_traces = native_traces
        self._clock = clock
        self._tracker: Any = None
        self._path: Path | None = None

    def start(self) -> None:
        if self._tracker is not None:
            return
        try:
            import memray
        except ImportError as e:
            raise ValueError("--memory-recorder memray needs the package memray: pip install memray") from e

        self._directory.mkdir(parents=True, exist_ok=True)
        for stamp in itertools.count(int(self._clock())):
            path = self._directory / memory_snapshot_name(self._tag, stamp, self._suffix)
            try:
                # Exclusive, like all our files: memray refuses a name that exists.
                tracker = memray.Tracker(path, native_traces=self._native_traces)
            except OSError:
                if path.exists():
                    continue
                raise
            try:
                tracker.__enter__()
            except RuntimeError as e:
                del tracker  # it completes its file when it goes
                path.unlink(missing_ok=True)
                logger.warning("memray records this process already, so this recording is left out: %s", e)
                return
            self._tracker, self._path = tracker, path
            return

    def dump(self) -> Path | None:
        """Ends the recording: memray completes a file by closing it."""
        path = self._path if self._tracker is not None else None
        self.close()
        return path

    def close(self) -> None:
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.__exit__(None, None, None)


RECORDERS: dict[str, Callable[..., MemoryRecorder]] = {"torch": TorchRecorder, "memray": MemrayRecorder}


def build_recorder(settings: MemoryProfileSettings, directory: Path, tag: RankTag) -> MemoryRecorder | None:
    """The recorder that the settings ask for; None when they ask for none."""
    if not settings.record_memory_history:
        return None
    folder = Path(settings.memory_snapshot_dir).expanduser().absolute() if settings.memory_snapshot_dir else directory
    return RECORDERS[settings.memory_recorder](folder, tag, settings.memory_snapshot_path)
