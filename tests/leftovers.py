"""Fails a test session that leaves processes, shared memory or temporary files behind.

The session gets a temporary folder of its own, which its processes inherit as ``TMPDIR``: what is in it at the end was
left by the session, and a process that has it in its environment is one of the session's.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

KEPT = ("ray", "torchinductor_", "uv-")
"""Beginnings of names that tools keep on purpose (logs, caches, locks); they go with the folder."""
GRACE_S = 60.0
"""What ends by itself may take this long."""
LONGEST = 20
"""Characters of a temporary folder's path: Ray puts sockets below it, whose paths may have 107."""
SHM = Path("/dev/shm")


class Leftovers:
    """A pytest plugin: looks after each test, so that it can say which one has left something."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self._before = os.environ.get("TMPDIR")
        place = Path(base if len(base) <= LONGEST else "/tmp")
        _remove_folders_of_killed_sessions(place)
        self.folder = Path(tempfile.mkdtemp(prefix=f"rx{os.getpid()}-", dir=place))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self.folder)
        # The folders of failed tests stay where pytest puts them, and it clears them up by its own rules.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", base)
        self._shm_before = _names(SHM)
        self._foreign: set[str] = set()
        self._since: dict[str, str] = {}
        self._found: list[str] = []

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Remembers which test was the first after which something was there."""
        fresh = _names(SHM) - self._shm_before - self._foreign
        # What stays for the whole session, as its server's does, is looked up once.
        shared = self._shared_memory() if any(str(SHM / name) not in self._since for name in fresh) else set()
        for what in self._files() | shared:
            self._since.setdefault(what, nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails the session for what is still there when all fixtures are gone."""
        ran = session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        end = time.monotonic() + (GRACE_S if ran else 0.0)  # who interrupts it does not want to wait
        left = self._all()
        while left and time.monotonic() < end:
            time.sleep(0.2)
            left &= self._all()
        self._found = [f"{what} (first seen after {self._since.get(what, 'the last test')})" for what in sorted(left)]
        if left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Says what was left."""
        if self._found:
            terminalreporter.section("left behind by these tests", red=True)
            for line in self._found:
                terminalreporter.line(line)

    def pytest_unconfigure(self) -> None:
        """Removes the folder, with what tools keep in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        tempfile.tempdir = None
        if self._before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = self._before

    def _all(self) -> set[str]:
        return self._files() | self._shared_memory() | self._processes()

    def _files(self) -> set[str]:
        return {str(self.folder / name) for name in _names(self.folder) if not name.startswith(KEPT)}

    def _shared_memory(self) -> set[str]:
        """Files that came since the start, without those that a process of somebody else uses or once used."""
        new = _names(SHM) - self._shm_before - self._foreign
        if not new:
            return set()
        ours: set[int] = set()
        others: set[int] = set()
        for pid in _pids():
            if used := _mapped(pid):
                (ours if self._is_ours(pid) else others).update(used)
        with os.scandir(SHM) as files:
            self._foreign |= {f.name for f in files if f.name in new and f.inode() in others - ours}
        return {str(SHM / name) for name in new - self._foreign}

    def _processes(self) -> set[str]:
        found = set()
        for pid in _pids():
            if pid != os.getpid() and self._is_ours(pid):
                command = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")
                tracks = "multiprocessing.resource_tracker" in command and _parent(pid) == os.getpid()
                if command and not tracks:  # a zombie has no command, and our own tracker ends with us
                    found.add(f"process {pid}: {command[:200]}")
        return found

    def _is_ours(self, pid: int) -> bool:
        """By its environment, or below us: a forked process shows the environment that we were started with."""
        above = pid
        while above > 1:
            if above == os.getpid():
                return True
            above = _parent(above)
        mark = f"TMPDIR={self.folder}".encode()
        return any(v == mark or v.startswith(mark + b"/") for v in _read(f"/proc/{pid}/environ").split(b"\0"))


def _remove_folders_of_killed_sessions(place: Path) -> None:
    for folder in place.glob("rx*-*"):
        pid = folder.name[2:].partition("-")[0]
        if pid.isdigit() and int(pid) not in _pids():
            shutil.rmtree(folder, ignore_errors=True)


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []


def _parent(pid: int) -> int:
    # The name before it stands in parentheses and may hold anything.
    words = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def _mapped(pid: int) -> set[int]:
    """Inodes under /dev/shm that the process has mapped; a semaphore's is mapped under a name that is gone."""
    prefix = f"{SHM}/".encode()
    lines = _read(f"/proc/{pid}/maps").splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if prefix in line}


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return b""
