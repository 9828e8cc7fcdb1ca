"""Records host memory with memray: one file a process."""

import importlib.util
import itertools
import logging
import time
from pathlib import Path
from typing import Any

from relax_profiling.recorders.trace_files import Clock, RankTag, memory_snapshot_name

logger = logging.getLogger(__name__)

_MISSING = "needs the package memray: pip install memray"


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

    @staticmethod
    def missing() -> str | None:
        """The command that installs memray, where it is not installed (it is not imported)."""
        return None if importlib.util.find_spec("memray") else _MISSING

    def start(self) -> None:
        """Opens the file and records; a process that memray records already is a warning."""
        if self._tracker is not None:
            return
        try:
            import memray
        except ImportError as e:
            raise ValueError(f"--memory-recorder memray {_MISSING}") from e

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
        """Ends the recording and completes the file."""
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.__exit__(None, None, None)
