"""Ends and removes what a local Ray has left when its driver was killed. Standard library only; Linux.

The kernel ends Ray's raylet and GCS together with the driver, but not the agents of the raylet: they want to tell the
GCS of its end first, and ask for 60 s for one that is gone. And nobody removes Ray's folder. So the driver starts this
file as a script of its own, outside of its process group, and tells it on its standard input, each followed by a NUL:

    session FOLDER   of a Ray that this driver has started
    logs FOLDER      where the logs of that Ray go
    remove FILE      what goes too
    done             the driver does all this itself

When the input ends without ``done`` the driver is gone. Then this process ends what is left, and itself last of all.
The run may have been started again in the same folder by then: what was put there since stays.
What belongs to the driver is told by a variable in its environment (:data:`MARK`), or by the title of a process of Ray
that has files of this Ray's folder open; nothing else has either.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = "LAUNCH_OF_RELAX"
"""Environment variable of Ray's processes, and of all that these start: which driver they belong to."""
TICK_S = 0.5
GRACE_S = 2.0
"""How long workers may take to end by themselves, as they do when their raylet is gone."""
ORDER_S = 20.0
"""How long supervisors of engines and Python's resource trackers have to put their things in order."""
END_S = 25.0
PATIENT = (b"/engines/sglang/process/supervisor.py", b"multiprocessing.resource_tracker")


class KillCleanUp:
    """The driver's side; inside the ``with`` block a kill of this process leaves nothing behind.

    Attributes:
        environment: for the processes of Ray.
        sessions: folders of the Rays that were started.
    """

    def __init__(self, logs: Path | None = None, remove: Path | None = None) -> None:
        """Starts the script, where there is a /proc to read.

        Args:
            logs: folder that the logs of a killed run's Ray are moved to; None removes them.
            remove: file that goes with a killed run.
        """
        self.sessions: list[Path] = []
        mark = secrets.token_hex(16)
        self.environment = {MARK: mark}
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the driver's group, or the end of its terminal, is not for it
            cwd="/",
        )
        for word, path in (("logs", logs), ("remove", remove)):
            if path is not None:
                self._tell(f"{word} {path.absolute()}")

    def starts(self, words: Sequence[str]) -> None:
        """Takes the command of a process of Ray that is about to start: it names Ray's folder."""
        for word in words:
            key, _, value = word.partition("=")
            # /proc names open files by their real path, and RAY_TMPDIR may be a link.
            if key == "--session-dir" and (folder := Path(os.path.realpath(value))) not in self.sessions:
                self.sessions.append(folder)
                self._tell(f"session {folder}")

    def _tell(self, message: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it was killed: the run goes on without it
                self._process.stdin.write(os.fsencode(message) + b"\0")
                self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tell("done")
        if self._process is not None:
            assert self._process.stdin is not None, "it was started with a pipe"
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:  # somebody has stopped it
                self._process.kill()
                self._process.wait()


def move_logs(source: Path, target: Path) -> None:
    """Copies what a Ray that has ended wrote into logs; an earlier launch's are replaced.

    Ray's folders are open to everybody (mode 0777). Here all gets the modes of the umask, as the rest of the run has.
    """
    shutil.rmtree(target, ignore_errors=True)
    for folder, _, names in os.walk(source):
        place = target / os.path.relpath(folder, source)
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(OSError):  # a link to nothing, a socket, a full disk
                shutil.copyfile(os.path.join(folder, name), place / name)


def remove_session(folder: Path) -> None:
    """Removes the folder of a Ray that has ended, and the link that calls it the latest."""
    latest = folder.with_name("session_latest")
    with contextlib.suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == folder.name:
            latest.unlink()
    shutil.rmtree(folder, ignore_errors=True)


class _Left:
    """What the driver has told of itself."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}".encode()
        self.done = False
        self.sessions: list[Path] = []
        self.logs: Path | None = None
        self.remove: Path | None = None
        self._found: dict[Path, tuple[int, ...] | None] = {}

    def hear(self, message: str) -> None:
        word, _, rest = message.partition(" ")
        if word == "done":
            self.done = True
        elif word == "session":
            self.sessions.append(Path(rest))
        elif word == "logs":
            self.logs = Path(rest)
        elif word == "remove":
            self.remove = Path(rest)

    def driver_ended(self) -> None:
        """Notes which files are there at the driver's end: those of a next run come later."""
        self._found = {path: _identity(path) for path in (self.logs, self.remove) if path is not None}

    def _untouched(self, path: Path) -> bool:
        """Whether the path holds what it held at the driver's end."""
        return _identity(path) == self._found.get(path)

    def processes(self) -> dict[int, bytes]:
        """Command lines of the driver's processes that are there now, by pid."""
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                command = _read(f"/proc/{name}/cmdline")  # empty for one that has ended and was not asked for
                if command and self._owns(name, command):
                    found[int(name)] = command
        return found

    def _owns(self, pid: str, command: bytes) -> bool:
        if self._mark in _read(f"/proc/{pid}/environ").split(b"\0"):
            return True
        # Ray's workers and agents write their title over it; they have files of Ray's folder open.
        return command.startswith(b"ray::") and any(
            path.is_relative_to(folder) for path in _open_files(pid) for folder in self.sessions
        )

    def end_processes(self) -> None:
        """Returns when none is left, or after :data:`END_S`."""
        start = time.monotonic()
        while (seconds := time.monotonic() - start) < END_S:
            left = self.processes()
            if not left:
                return
            for pid, command in left.items():
                in_order = any(word in command for word in PATIENT) or self._has_supervisor(pid, left)
                if seconds >= (ORDER_S if in_order else GRACE_S):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _has_supervisor(self, pid: int, left: dict[int, bytes]) -> bool:
        """Whether a supervisor above it will end it."""
        while pid > 1:
            pid = _parent(pid)
            if PATIENT[0] in left.get(pid, b""):
                return True
        return False

    def remove_files(self) -> None:
        """Moves Ray's logs and removes the rest, but for what a next run has put into the places of this one."""
        keep_logs = self.logs is not None and self._untouched(self.logs)
        for folder in self.sessions:
            if self.logs is not None and keep_logs and folder.is_dir():
                move_logs(folder / "logs", self.logs)
            remove_session(folder)
        if self.remove is not None and self._untouched(self.remove):
            with contextlib.suppress(OSError):
                self.remove.unlink()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Tells a file or folder from another one of its name; None where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or is somebody else's
        return b""


def _open_files(pid: str) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield Path(os.readlink(f"/proc/{pid}/fd/{number}"))


def _parent(pid: int) -> int:
    # The name before it stands in parentheses and may hold anything.
    words = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(words[1]) if words else 0


def main(mark: str, owner: int) -> None:
    """Listens until the driver is done or gone."""
    left, heard = _Left(mark), b""
    while not left.done:
        readable, _, _ = select.select([0], [], [], TICK_S)
        if readable:
            sent = os.read(0, 65536)
            if not sent:
                break
            *messages, heard = (heard + sent).split(b"\0")
            for message in messages:
                left.hear(os.fsdecode(message))
        elif os.getppid() != owner:  # a process that the driver has forked may hold the pipe open
            break
    if not left.done:
        left.driver_ended()
        left.end_processes()
        left.remove_files()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
