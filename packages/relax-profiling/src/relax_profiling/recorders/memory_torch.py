"""Records GPU memory with torch: a snapshot after N steps, and one at every out-of-memory error."""

import logging
import time
import types
from pathlib import Path

from relax_profiling.recorders.trace_files import Clock, RankTag, memory_snapshot_name, partial_path, publish

logger = logging.getLogger(__name__)

# Entries of torch's ring buffer: about 1 KB each in the host's memory, some 100 steps of a mid-sized model.
MAX_HISTORY = 100_000


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

    @staticmethod
    def missing() -> str | None:
        """None: a process that trains has torch, and a host without a GPU is a warning of :meth:`start`."""
        return None

    def start(self) -> None:
        """Switches on torch's history of allocations; a host without a GPU is a warning."""
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
        attach = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]  # not in its stubs
        attach(self._on_oom)
        self._recording = True

    def dump(self) -> Path | None:
        """Writes a snapshot; None when nothing is recorded."""
        return self._write(self._suffix) if self._recording else None

    def close(self) -> None:
        """Switches the history off."""
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
