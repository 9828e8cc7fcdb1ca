"""Profiles the steps of a training loop: torch.profiler in a window of steps, memory snapshots, nothing outside.

::

    observer = build_observer(train_settings, memory_settings, trace_dir="traces/my-run", rank=0)
    observer.before_model()
    model = ...
    for step in range(steps):
        with observer.phase("train_overall", step):
            ...
    observer.close()

``phase`` takes the offset of the step in this launch (0 for the first one, also after a resume).
"""

import atexit
import contextlib
import logging
import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from relax_profiling.recorders.memory import RECORDERS, MemoryRecorder
from relax_profiling.recorders.session import TorchSession
from relax_profiling.recorders.trace_files import RankTag, TraceLayout
from relax_profiling.recorders.windows import LaunchOffset
from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def build_observer(
    train_settings: TrainProfileSettings,
    memory_settings: MemoryProfileSettings,
    *,
    trace_dir: Path | str,
    rank: int = 0,
    dp: int = 0,
    tp: int = 0,
    pp: int = 0,
) -> "TrainingObserver":
    """The observer of one training process.

    Args:
        trace_dir: the run's folder ``traces/NAME``, the same for all processes.
        rank: global rank; ``dp``, ``tp``, ``pp`` are its data, tensor and pipeline parallel ranks.

    Raises:
        ValueError: for settings with problems, all of them in one message.
    """
    found = train_settings.problems() + memory_settings.problems()
    if found:
        raise ValueError("\n".join(found))
    layout = TraceLayout(Path(trace_dir).expanduser().absolute())
    tag = RankTag(rank, dp, tp, pp)
    session = TorchSession(train_settings, layout.train, tag) if train_settings.use_pytorch_profiler else None
    recorder: MemoryRecorder | None = None
    if memory_settings.record_memory_history:
        chosen = memory_settings.memory_snapshot_dir
        folder = Path(chosen).expanduser().absolute() if chosen else layout.memory
        recorder = RECORDERS[memory_settings.memory_recorder](folder, tag, memory_settings.memory_snapshot_path)
    return TrainingObserver(session, recorder, snapshot_after=memory_settings.memory_snapshot_num_steps)


class TrainingObserver:
    """Told of every phase of every step on one process. All calls come from one thread.

    Args:
        session: records the window of steps; None records none.
        recorder: records allocations; None records none.
        snapshot_after: writes a memory snapshot after this many steps of this launch.
    """

    def __init__(
        self, session: TorchSession | None, recorder: MemoryRecorder | None, *, snapshot_after: int | None = None
    ) -> None:
        self._session = session
        self._unwritten: TorchSession | None = None  # its window is over
        self._recorder = recorder
        self._snapshot_after = snapshot_after
        self._depth = 0
        self._offset: int | None = None  # the step that has begun and not yet ended
        self._closed = False
        self._watching = session is not None or recorder is not None
        self._process = os.getpid()
        self._old_handler: Any = None
        self._writing = 0  # how many of the blocks that a SIGTERM waits for we are in
        self._told_to_end = False

    def before_model(self) -> None:
        """Before the first parameter is allocated: memory is recorded from here on."""
        if self._watching:
            atexit.register(self.close)
            self._catch_sigterm()
        if self._recorder is not None:
            self._recorder.start()

    def phase(self, name: str, offset: int) -> AbstractContextManager[None]:
        """Surrounds a phase of a step; an exception passes through it unchanged.

        Args:
            name: ``train_overall`` for the whole step, ``train_log_probs`` or ``train_actor`` for a part of it.
            offset: the step, counted from 0 in this launch.
        """
        return _Phase(self, name, offset) if self._watching and os.getpid() == self._process else _NOTHING

    def defer_traces(self) -> "TrainingObserver":
        """Leaves the writing of traces to :meth:`write_traces` and the end of the run; gives itself back."""
        if self._session is not None:
            self._session.deferred = True
        return self

    def write_traces(self, *, last: bool = False) -> None:
        """Writes the traces of a window that is over; for a moment at which nothing waits for this process.

        Args:
            last: no step will follow, so that a window which is not over ends here.
        """
        if os.getpid() != self._process:
            return
        if last and self._session is not None and self._depth == 0:
            self._unwritten, self._session = self._session, None
            self._watching = self._snapshot_after is not None
        with self._finishing():
            session, self._unwritten = self._unwritten, None
            if session is not None:
                _guarded("the training trace", session.close)

    def close(self) -> None:
        """Writes what is recorded; at the end of the run, also of a failed one; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._watching = False
        if os.getpid() != self._process:
            return  # a fork, as of a data loader: what is recorded is its parent's, and torch's profiler would hang
        atexit.unregister(self.close)
        with self._finishing():
            self.write_traces()
            session, self._session = self._session, None
            if session is not None:
                _guarded("the training trace", session.close)
            if self._recorder is not None:
                _guarded("the memory recording", self._recorder.close)
        self._restore_sigterm()

    def _enter(self, name: str, offset: int) -> AbstractContextManager[Any] | None:
        if self._depth == 0 and offset != self._offset:
            if self._offset is not None:
                self._end_step(self._offset)
            self._offset = offset
            self._tell_session(lambda session: session.begin_step(LaunchOffset(offset)))
        self._depth += 1
        return self._session.span(name, LaunchOffset(offset)) if self._session is not None else None

    def _exit(self, name: str, offset: int, failed: bool) -> None:
        self._depth -= 1
        # train_overall is the whole step. Without it, a step ends when the next one begins.
        if self._depth == 0 and name == "train_overall" and not failed:
            self._end_step(offset)

    def _end_step(self, offset: int) -> None:
        self._offset = None
        self._tell_session(lambda session: session.end_step(LaunchOffset(offset)))
        # On the step's number, not on how often we were called: a repeated step counts once.
        if self._snapshot_after is not None and offset + 1 >= self._snapshot_after and self._recorder is not None:
            self._snapshot_after = None
            with self._finishing():
                path = _guarded("the memory snapshot", self._recorder.dump)
            if path is not None:
                logger.info("memory snapshot after %d steps: %s", offset + 1, path)
        self._watching = self._session is not None or self._snapshot_after is not None

    def _tell_session(self, tell: Callable[[TorchSession], bool]) -> None:
        """Goes on without a session that is finished, or that failed."""
        session = self._session
        if session is None:
            return
        with self._finishing():  # the end of a window may write it
            running = _guarded("the training trace", lambda: tell(session))
            if not running:
                self._session = None
                self._unwritten = session if session.waiting else None
            if running is None:
                _guarded("the training trace", session.close)

    def _catch_sigterm(self) -> None:
        """A plain SIGTERM ends a process without a word to us; files would stay incomplete."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.SIG_DFL
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _restore_sigterm(self) -> None:
        if self._old_handler is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._old_handler)
        self._old_handler = None

    @contextlib.contextmanager
    def _finishing(self) -> Iterator[None]:
        """Inside, a SIGTERM waits: what is half written would be lost. It ends the process at the end of the block."""
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1
            if self._told_to_end and self._writing == 0:
                self._end_by_sigterm()

    def _on_sigterm(self, number: int, frame: types.FrameType | None) -> None:
        if self._writing and os.getpid() == self._process:
            self._told_to_end = True
        else:
            self._end_by_sigterm()

    def _end_by_sigterm(self) -> None:
        self.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _guarded(what: str, act: Callable[[], T]) -> T | None:
    """Gives what ``act`` returns, or None: the training goes on without what cannot be recorded or written."""
    try:
        return act()
    except Exception as e:
        logger.warning("%s is lost, and the training goes on: %s: %s", what, type(e).__name__, e)
        return None


class _Phase:
    __slots__ = ("_name", "_observer", "_offset", "_span")

    def __init__(self, observer: TrainingObserver, name: str, offset: int) -> None:
        self._observer = observer
        self._name = name
        self._offset = offset
        self._span: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        self._span = self._observer._enter(self._name, self._offset)
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if self._span is not None:
                self._span.__exit__(kind, error, at)
        finally:
            self._observer._exit(self._name, self._offset, failed=error is not None)
