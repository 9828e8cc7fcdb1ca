"""One window of training steps in torch.profiler, written as one trace for each target."""

import gzip
import logging
import shutil
import time
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from relax_profiling.recorders.trace_files import Clock, RankTag, partial_path, publish, training_trace_name
from relax_profiling.recorders.windows import LaunchOffset
from relax_profiling.settings import TrainProfileSettings
from relax_profiling.trace.cut import cut_to_spans

logger = logging.getLogger(__name__)

# Compression level of traces: at 9, torch's own choice, writing takes several times as long for 10 % less.
GZIP_LEVEL = 4


def span_name(target: str, offset: int) -> str:
    """The name of a phase within a trace: ``train_actor#2`` for the step with offset 2."""
    return f"{target}#{offset}"


class TorchSession:
    """Records a window of steps once.

    One profiler can run in a process, and the targets lie inside each other: so the whole window is recorded, and each
    target's trace is cut from it. ``train_overall`` is the recording as it is.

    Args:
        directory: the traces are written here, at the end of the window.

    Attributes:
        deferred: at the end of the window nothing is recorded any more; what takes time and can wait, waits for
            :meth:`close`. torch wants that on the same thread, and lets no other run meanwhile.
        waiting: the window is over, and :meth:`close` will write it.
    """

    def __init__(
        self, settings: TrainProfileSettings, directory: Path, tag: RankTag, *, clock: Clock = time.time
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._tag = tag
        self._clock = clock
        self.deferred = False
        self._window = settings.window()
        self._profiler: Any = None
        self._recording = False
        self._recorded: list[int] = []
        self._record_function: Any = None
        self._activities: list[Any] = []
        self._stopped = False
        self.waiting = False
        self.finished = False
        self.files: list[Path] = []

    def begin_step(self, offset: LaunchOffset) -> bool:
        """At the start of a step: the step before the window warms the profiler up, the first one in it starts it.

        False when nothing more will be recorded; so does :meth:`end_step`.
        """
        if self._recording and self._window.is_over(offset):
            self._end_window()  # steps were left out: the window's last one never came
        if self.finished or self.waiting:
            return False
        if offset in self._window:
            if self._profiler is None:
                self._prepare(warmup=False)
            else:
                self._profiler.step()
            self._recording = True
            self._recorded.append(int(offset))
        elif LaunchOffset(offset + 1) in self._window and self._profiler is None:
            self._prepare(warmup=True)
        return True

    def span(self, name: str, offset: LaunchOffset) -> AbstractContextManager[Any] | None:
        """Marks a phase in the trace; None outside the window."""
        return self._record_function(span_name(name, offset)) if self._recording else None

    def end_step(self, offset: LaunchOffset) -> bool:
        """At the end of a step: the last one of the window writes the traces, or leaves that to :meth:`close`."""
        if self._recording and self._window.is_over(LaunchOffset(offset + 1)):
            self._end_window()
        return not (self.finished or self.waiting)

    def _end_window(self) -> None:
        if not self.deferred:
            self.close()
            return
        self._recording, self.waiting = False, True
        gpu = len(self._activities) > 1
        if gpu or self._settings.profile_with_stack or self._settings.profile_with_memory:
            # A stack recorder and a memory recorder go on until then, at the cost of the steps that follow; and where
            # recording is merely switched off on a GPU, the trace lacks kernels of the window (a third was left).
            self._stop()
        else:
            self._profiler.toggle_collection_dynamic(False, self._activities)

    def close(self) -> None:
        """Stops and writes what was recorded, also in the middle of the window."""
        if self.finished:
            return
        self.finished = True
        recorded = self._recording or self.waiting
        self._recording = self.waiting = False
        if self._profiler is None:
            return
        self._stop()
        profiler, self._profiler = self._profiler, None
        if recorded:
            self._write(profiler)

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "profiler won't be using warmup" and the like
            self._profiler.stop()

    def _prepare(self, warmup: bool) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function, schedule

        s = self._settings
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        steps = s.profile_step_end - s.profile_step_start + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profiler = profile(
                activities=activities,
                # One more active step than we record: the profiler would stop itself, we stop it.
                schedule=schedule(wait=0, warmup=int(warmup), active=steps + 1, repeat=1),
                record_shapes=s.profile_with_flops,
                with_flops=s.profile_with_flops,
                profile_memory=s.profile_with_memory,
                with_stack=s.profile_with_stack,
            )
            profiler.start()
        self._profiler, self._activities = profiler, activities
        self._record_function = record_function

    def _write(self, profiler: Any) -> None:
        if not self._recorded:
            return
        raw = partial_path(self._directory)
        try:
            profiler.export_chrome_trace(str(raw))
            if not raw.exists():  # torch says so in its own log only
                raise OSError(f"torch could not write a trace into {self._directory}; is the disk full?")
            for target in self._settings.profile_target:
                self.files.append(self._publish(target, raw))
        finally:
            raw.unlink(missing_ok=True)
            raw.with_name(raw.name + ".tmp").unlink(missing_ok=True)  # what torch leaves when it fails
        logger.info("training trace of steps %s: %s", self._recorded, ", ".join(map(str, self.files)))

    def _publish(self, target: str, raw: Path) -> Path:
        partial = partial_path(self._directory)
        try:
            with gzip.open(partial, "wb", compresslevel=GZIP_LEVEL) as out:
                if target == "train_overall":
                    with raw.open("rb") as source:
                        shutil.copyfileobj(source, out, 1 << 20)
                else:
                    spans = {span_name(target, offset) for offset in self._recorded}
                    cut_to_spans(raw, out, spans)
            return publish(
                partial, self._directory, lambda stamp: training_trace_name(target, self._tag, stamp), self._clock
            )
        finally:
            partial.unlink(missing_ok=True)
