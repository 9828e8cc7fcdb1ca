"""Profiles SGLang engines during a rollout.

::

    profiler = RolloutProfiler(settings, ["http://127.0.0.1:30000"], Path("traces/my-run/sglang_trace"))
    with profiler.rollout(rollout_id):      # or: async with
        ...                                 # the engines generate

A failing engine is a warning that names it; it hurts neither the other engines nor the rollout.
"""

import asyncio
import concurrent.futures
import dataclasses
import gzip
import logging
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from relax_profiling.recorders.server import ProfileServer, ServerRefused, ServerUnreachable
from relax_profiling.recorders.trace_files import Clock, StagingFolder, claim_staging, move_exclusive
from relax_profiling.recorders.windows import RolloutId
from relax_profiling.settings import SGLangProfileSettings

logger = logging.getLogger(__name__)

# By stage, SGLang 0.5.17 counts down from this number and fails in its scheduler when there is none.
_WHOLE_ROLLOUT = 1_000_000_000
# The two, as SGLang 0.5.17 writes them into the names of the files.
_STAGES = ("EXTEND", "DECODE")
# Above this size a file counts as whole when its size stands still; below, its checksum is verified too.
_VERIFIED_BYTES = 32 << 20
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class EngineTraces:
    """The traces that one engine left of one rollout: its files, and in words what went wrong."""

    engine: str
    url: str
    files: tuple[Path, ...]
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds to wait for: an engine to start recording, to stop and write, and for its files to appear."""

    start: float = 60.0
    stop: float = 600.0
    files: float = 20.0


class RolloutProfiler:
    """Records the engines in the rollouts that the settings select.

    Args:
        settings: see flags ``--sglang-profile*``.
        engine_urls: one address an engine; ``engine<i>`` in file names is the position here. The list may be changed
            between rollouts.
        out_dir: ``rollout_<id>/`` is made in it, unless the settings name a folder. An engine on another host writes
            to the same path there.
        api_key: when the servers were started with one.
    """

    def __init__(
        self,
        settings: SGLangProfileSettings,
        engine_urls: Sequence[str],
        out_dir: Path | str,
        *,
        api_key: str | None = None,
        deadlines: Deadlines | None = None,
        clock: Clock = time.time,
    ) -> None:
        found = settings.problems()
        if found:
            raise ValueError("\n".join(found))
        self.settings = settings
        self.engine_urls = list(engine_urls)
        # Absolute: the server resolves it in a working directory of its own.
        self.out_dir = Path(settings.sglang_profile_output_dir or out_dir).expanduser().absolute()
        self.deadlines = deadlines or Deadlines()
        self._api_key = api_key
        self._clock = clock
        self._window = settings.window()

    def wants(self, rollout_id: int) -> bool:
        """Whether this rollout (absolute id) is recorded."""
        return self.settings.sglang_profile and RolloutId(rollout_id) in self._window

    def rollout(self, rollout_id: int) -> "ProfiledRollout":
        """Surrounds one rollout, as a context manager or an asynchronous one. Does nothing outside the window."""
        recordings: list[_Recording] = []
        if self.wants(rollout_id):
            directory = self.out_dir / f"rollout_{rollout_id}"
            for i, url in enumerate(self.engine_urls):
                server = ProfileServer(url, self._api_key)
                recordings.append(_Recording(self.settings, server, i, directory, self.deadlines, self._clock))
        return ProfiledRollout(recordings)


class ProfiledRollout:
    """One rollout while it is recorded. ``traces`` holds the result after it."""

    def __init__(self, recordings: "list[_Recording]") -> None:
        self._recordings = recordings
        self.traces: list[EngineTraces] = []

    def __enter__(self) -> "ProfiledRollout":
        try:
            self._start()
        except BaseException:  # an interrupt while engines start: those that did must not stay armed
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    async def __aenter__(self) -> "ProfiledRollout":
        if not self._recordings:
            return self
        starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        try:
            await asyncio.shield(starting)
        except BaseException:
            await asyncio.wait([starting])
            await asyncio.to_thread(self._stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if not self._recordings:
            return
        stopping = asyncio.ensure_future(asyncio.to_thread(self._stop))
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait([stopping])
            raise

    def complete(self) -> bool:
        """Whether every engine that started has written all the files that it will write by itself."""
        return all(r.complete() for r in self._recordings if r.started)

    @property
    def started(self) -> int:
        """Number of engines that record."""
        return sum(r.started for r in self._recordings)

    def _start(self) -> None:
        self._on_all(lambda r: r.start())

    def _stop(self) -> None:
        """Stops, flushes and collects from every engine; never raises for an engine's failure."""
        self._on_all(lambda r: r.stop())
        self.traces = [r.result() for r in self._recordings]
        for trace in self.traces:
            for problem in trace.problems:
                logger.warning("SGLang profiling, %s (%s): %s", trace.engine, trace.url, problem)

    def _on_all(self, action: "Callable[[_Recording], None]") -> None:
        if not self._recordings:
            return
        # Every call has a deadline, so the pool ends. One engine's failure stays with it.
        with concurrent.futures.ThreadPoolExecutor(min(32, len(self._recordings))) as pool:
            running = [(r, pool.submit(action, r)) for r in self._recordings]
        for recording, done in running:
            if done.exception() is not None:
                recording.failed(done.exception())


class _Recording:
    """One engine in one rollout: armed, stopped, its files moved into place."""

    def __init__(
        self,
        settings: SGLangProfileSettings,
        server: ProfileServer,
        engine: int,
        directory: Path,
        deadlines: Deadlines,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._server = server
        self._engine = engine
        self._directory = directory
        self._deadlines = deadlines
        self._clock = clock
        self._staging: StagingFolder | None = None
        self._expected: int | None = None  # files a stage; by stage there are two
        self._files: list[Path] = []
        self._problems: list[str] = []
        self.started = False
        self._armed = False
        self._waits_for_files = False

    def result(self) -> EngineTraces:
        return EngineTraces(f"engine{self._engine}", self._server.url, tuple(self._files), tuple(self._problems))

    def failed(self, error: BaseException | None) -> None:
        self._problems.append(f"{type(error).__name__}: {error}")

    def start(self) -> None:
        try:
            self._staging = claim_staging(self._directory, self._engine, self._clock)
            try:
                self._expected = self._server.expected_files(self._deadlines.start)
            except ServerRefused:
                self._expected = None  # an older server; any file then counts as all
            self._armed = True  # from here on it may record, whatever the answer is
            self._server.start(self._request(self._staging), self._deadlines.start)
            self.started = True
        except (ServerRefused, ServerUnreachable) as e:
            self._problems.append(f"did not start recording: {e}")
        except OSError as e:
            self._problems.append(f"did not start recording: cannot write to {self._directory}: {e}")

    def _request(self, staging: StagingFolder) -> dict[str, Any]:
        s = self._settings
        whole = s.sglang_profile_num_steps == -1
        steps = (_WHOLE_ROLLOUT if s.sglang_profile_by_stage else None) if whole else s.sglang_profile_num_steps
        return {
            "output_dir": str(staging.path),
            "profile_id": str(staging.stamp),
            "num_steps": steps,
            "activities": list(s.sglang_profile_activities),
            "profile_by_stage": s.sglang_profile_by_stage,
            # Sent although false: the server takes a missing value for true.
            "with_stack": s.sglang_profile_with_stack,
            "record_shapes": s.sglang_profile_record_shapes,
        }

    def stop(self) -> None:
        try:
            if self._armed:
                self._disarm()
        finally:
            if self._staging is not None:
                self._collect(self._staging)

    def _disarm(self) -> None:
        """Stops a recording that is still on. One that ended by itself answers with an error, which is no failure."""
        self._armed = False
        self._waits_for_files = self.started
        try:
            self._server.stop(self._deadlines.stop)
        except ServerRefused as e:
            # Either it had stopped by itself, and its files are there, or it did nothing at all.
            logger.debug("engine%d: %s", self._engine, e)
            self._waits_for_files = False
        except ServerUnreachable as e:
            self._waits_for_files = False
            if self.started:
                self._problems.append(f"did not stop recording: {e}")
            return
        if self._settings.sglang_profile_by_stage:
            self._forget_stages()

    def _forget_stages(self) -> None:
        """By stage, SGLang goes on waiting for a stage that did not come, into later rollouts.

        A start without any activity records nothing, writes nothing, and replaces what it waits for.
        """
        nothing: dict[str, Any] = {"activities": [], "profile_by_stage": False, "num_steps": None, "profile_id": "none"}
        assert self._staging is not None
        try:
            self._server.start({**nothing, "output_dir": str(self._staging.path)}, self._deadlines.start)
        except (ServerRefused, ServerUnreachable) as e:
            self._problems.append(f"may record into the next rollout: {e}")

    def complete(self) -> bool:
        if self._staging is None:
            return True
        found = _present(self._staging.path)
        return len(found) >= self._needed and all(_is_whole(p) for p in found)

    @property
    def _needed(self) -> int:
        """The number of files of a recording in which every stage came."""
        return (self._expected or 1) * (len(_STAGES) if self._settings.sglang_profile_by_stage else 1)

    def _collect(self, staging: StagingFolder) -> None:
        """Waits for the files to be whole and moves them to their names."""
        patience = self._deadlines.files if self._waits_for_files else min(1.0, self._deadlines.files)
        deadline = time.monotonic() + patience
        sizes: dict[Path, int] = {}
        while True:
            now = {p: p.stat().st_size for p in _present(staging.path)}
            if len(now) >= self._needed and now == sizes and all(_is_whole(p) for p in now):
                break
            if time.monotonic() > deadline:
                break
            sizes = now
            time.sleep(_POLL_SECONDS)
        for path in _present(staging.path):
            if _is_whole(path):
                self._files.append(self._place(path, staging))
            else:
                self._problems.append(f"{path} was still incomplete after {patience:.0f} s and stays there")
        if self.started and not self._files:
            self._problems.append(
                f"no trace arrived in {staging.path}: it ran no forward step, or it runs on another host, where its "
                "traces are under the same path"
            )
        elif self.started and len(self._files) < self._needed:
            self._problems.append(self._missing(staging))
        _remove_empty(staging.path)

    def _missing(self, staging: StagingFolder) -> str:
        """What to say when some of the files did not arrive."""
        arrived = len(self._files)
        if self._settings.sglang_profile_by_stage:
            for stage in _STAGES:
                of_stage = sum(stage in path.name for path in self._files)
                if of_stage == 0 and arrived == (self._expected or 1):
                    return f"no trace of the stage {stage}: it did not come while the engine was recorded"
        return (
            f"{arrived} of {self._needed} traces arrived; its other ranks may run on another host, where theirs are "
            f"under {staging.path}"
        )

    def _place(self, path: Path, staging: StagingFolder) -> Path:
        # The server puts a time or the profile id first; the stamp that we reserved takes its place.
        rest = re.sub(r"^\d{9,}(\.\d+)?-", "", path.name)
        for later in range(1000):
            target = self._directory / f"engine{self._engine}-{staging.stamp + later}-{rest}"
            if move_exclusive(path, target):
                return target
        raise FileExistsError(f"no free name for {path} in {self._directory}")


def _present(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".tmp")


def _is_whole(path: Path) -> bool:
    """Whether a trace is written to its end; a compressed one proves it by its checksum."""
    try:
        size = path.stat().st_size
        if size == 0:
            return False
        if path.suffix != ".gz" or size > _VERIFIED_BYTES:
            return True
        with gzip.open(path) as f:
            while f.read(1 << 20):
                pass
    except (EOFError, OSError, zlib.error):
        return False
    return True


def _remove_empty(folder: Path) -> None:
    for inner in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        _rmdir(inner)
    _rmdir(folder)


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        logger.debug("%s is not empty and stays", folder)
