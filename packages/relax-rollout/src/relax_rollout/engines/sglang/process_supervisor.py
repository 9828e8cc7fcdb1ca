"""Runs a command and ends its whole process tree when the owner is gone. Standard library only; Linux.

Started by :class:`relax_rollout.engines.sglang.server.SGLangServer` as a script. It is the subreaper of everything
below it, so a process whose parent died stays its descendant and cannot be lost. It ends the tree when its standard
input closes (the owner died, even by ``kill -9``, or called stop), when its parent changes, or when it is told to by a
signal; and when the command itself ends, it ends what the command left behind.

It writes ``pid <n>`` to its standard output once the command runs, and exits with the command's exit code
(128 + signal number for a signal).
"""

import contextlib
import ctypes
import getpass
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 1.0
END_DEADLINE_S = 10.0
SHM_SCAN_TICKS = 5
TRACKER_GRACE_S = 4.0


def parents() -> dict[int, int]:
    """Parent of every process, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as f:
                    # The name stands in parentheses and may hold anything, parentheses too.
                    found[int(entry)] = int(f.read().rpartition(b")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    return found


def descendants(root: int) -> list[int]:
    """Pids below ``root``, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    found, queue = [], list(children.get(root, ()))
    while queue:
        pid = queue.pop(0)
        found.append(pid)
        queue.extend(children.get(pid, ()))
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Files under /dev/shm that the processes have mapped.

    Told by inode: a semaphore is mapped under a temporary name that is gone, and linked to its own name afterwards.
    """
    inodes = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps", errors="replace") as f:
                for line in f:
                    if "/dev/shm/" in line:
                        inodes.add(int(line.split(maxsplit=5)[4]))
        except (OSError, ValueError, IndexError):
            continue
    if not inodes:
        return set()
    with os.scandir("/dev/shm") as files:
        return {file.path for file in files if file.inode() in inodes}


def is_tracker(pid: int) -> bool:
    """True for Python's resource tracker, which unlinks semaphores once its users are gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return b"multiprocessing.resource_tracker" in f.read()
    except OSError:
        return False


class ProcessSupervisor:
    """One command and everything below it."""

    def __init__(self, command: list[str]) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.parent = os.getppid()
        self.started = time.time()
        self.shm: set[str] = set()
        self.code: int | None = None
        self.reason = "the command ended"
        # Sockets and temporary files of the tree go into one folder that is removed at the end.
        self.folder = tempfile.mkdtemp(prefix="relax-engine-")
        environment = {**os.environ, "TMPDIR": self.folder}
        # The compile cache outlives a run: it stays where torch has it.
        cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.set_wakeup_fd(wake_write)
        self.told: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda n, _frame: self.told.append(n))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        me = os.getpid()
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, preexec_fn=lambda: self._in_child(me)
        )

    def _in_child(self, supervisor: int) -> None:
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)

    def reap(self) -> None:
        """Collects every process below us that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = code if code >= 0 else 128 - code

    def watch(self) -> None:
        """Returns when the tree has to end."""
        ticks = 0
        while True:
            self.reap()
            if self.code is not None:
                return
            if self.told:
                self.reason = f"signal {self.told[0]}"
                return
            if os.getppid() != self.parent:
                self.reason = "the owner is gone"
                return
            readable, _, _ = select.select([0, self.wake_read], [], [], TICK_S)
            if self.wake_read in readable:
                os.read(self.wake_read, 4096)
            if 0 in readable and not os.read(0, 4096):
                self.reason = "the owner closed the pipe"
                return
            ticks += 1
            if ticks % SHM_SCAN_TICKS == 0:
                self.shm |= shared_memory(descendants(os.getpid()))

    def end_tree(self) -> None:
        """Kills everything below us and removes what it left in /dev/shm and in the temporary folder."""
        deadline = time.monotonic() + END_DEADLINE_S
        trackers_until = time.monotonic() + TRACKER_GRACE_S
        first = True
        while time.monotonic() < deadline:
            alive = descendants(os.getpid())
            if first:
                self.shm |= shared_memory(alive)
                first = False
            if not alive:
                break
            for pid in alive:
                if time.monotonic() > trackers_until or not is_tracker(pid):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
            time.sleep(0.02)
            self.reap()
        for path in self.shm:
            try:
                # Mapped by us and made after we started: ours.
                if os.stat(path).st_ctime >= self.started - 1:
                    os.unlink(path)
            except OSError:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)


def main(command: list[str]) -> int:
    supervisor = ProcessSupervisor(command)
    with contextlib.suppress(BrokenPipeError):
        print(f"pid {supervisor.child.pid}", flush=True)
    supervisor.watch()
    if supervisor.code is None:
        print(f"[relax] ending the server: {supervisor.reason}", file=sys.stderr, flush=True)
    else:
        print(f"[relax] the server ended with exit code {supervisor.code}", file=sys.stderr, flush=True)
    supervisor.end_tree()
    return supervisor.code if supervisor.code is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
