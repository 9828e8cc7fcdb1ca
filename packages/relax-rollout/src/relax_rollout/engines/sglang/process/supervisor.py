"""Runs a command and ends its whole process tree when the owner is gone. Standard library only; Linux.

Started by :class:`relax_rollout.engines.sglang.server.SGLangServer` as a script. It is the subreaper of everything
below it, so a process whose parent died stays its descendant and cannot be lost. It ends the tree when its standard
input closes (the owner died, even by ``kill -9``, or called stop), when its parent changes, or when it is told to by a
signal; and when the command itself ends, it ends what the command left behind.

It writes ``pid <n>`` to its standard output once the command runs, and exits with the command's exit code
(128 + signal number for a signal). What the owner writes to its standard input, a secret for example, goes on to that
of the command.

It is two processes. The one that the owner started only stands in for the other: it passes signals on and hands the
exit code back. A Ray worker that ends kills its children (not theirs) with a signal that nobody can catch; when that
hits the stand-in, the other one still ends the tree and removes what it has left.
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
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 1.0
END_DEADLINE_S = 10.0
SHM = "/dev/shm"
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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
                    if f"{SHM}/" in line:
                        inodes.add(int(line.split(maxsplit=5)[4]))
        except (OSError, ValueError, IndexError):
            continue
    if not inodes:
        return set()
    with os.scandir(SHM) as files:
        return {file.path for file in files if file.inode() in inodes}


def is_tracker(pid: int) -> bool:
    """True for Python's resource tracker, which unlinks semaphores once its users are gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return b"multiprocessing.resource_tracker" in f.read()
    except OSError:
        return False


class SharedMemory:
    """Files under /dev/shm that a tree was seen to have mapped: a process that is dead cannot tell any more."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.looked_at = 0

    def look(self, pids: Callable[[], list[int]]) -> None:
        """Looks at the processes, when files came or went since the last look."""
        try:
            changed = os.stat(SHM).st_mtime_ns
        except OSError:
            return
        if changed == self.looked_at:
            return
        self.files |= shared_memory(pids())
        # A file is made first and mapped a moment later: after one that came just now, look again.
        if time.time_ns() - changed > 2e9 * TICK_S:
            self.looked_at = changed


class ProcessSupervisor:
    """One command and everything below it.

    Args:
        command: its words.
        parent: pid of the stand-in.
    """

    def __init__(self, command: list[str], parent: int) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.parent = parent
        self.started = time.time()
        self.shm = SharedMemory()
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
        for number in ENDING:
            signal.signal(number, lambda n, _frame: self.told.append(n))
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The end of the stand-in wakes us at once, not at the next tick.
        self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        me = os.getpid()
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, preexec_fn=lambda: self._in_child(me)
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

    def pass_on(self) -> bool:
        """Gives the command what the owner has sent; False when the owner has closed the pipe."""
        sent = os.read(0, 4096)
        assert self.child.stdin is not None, "the command was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            os.write(self.child.stdin.fileno(), sent)
        return bool(sent)

    def watch(self) -> None:
        """Returns when the tree has to end."""
        while True:
            self.reap()
            if self.code is not None:
                return
            if os.getppid() != self.parent:
                self.reason = "the owner is gone"
                return
            if self.told:
                self.reason = f"signal {self.told[0]}"
                return
            readable, _, _ = select.select([0, self.wake_read], [], [], TICK_S)
            if self.wake_read in readable:
                os.read(self.wake_read, 4096)
            if 0 in readable and not self.pass_on():
                self.reason = "the owner closed the pipe"
                return
            self.shm.look(lambda: descendants(os.getpid()))

    def end_tree(self) -> None:
        """Kills everything below us and removes what it left in /dev/shm and in the temporary folder."""
        deadline = time.monotonic() + END_DEADLINE_S
        trackers_until = time.monotonic() + TRACKER_GRACE_S
        first = True
        while time.monotonic() < deadline:
            alive = descendants(os.getpid())
            if first:
                self.shm.files |= shared_memory(alive)
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
        for path in self.shm.files:
            try:
                # Mapped by us and made after we started: ours.
                if os.stat(path).st_ctime >= self.started - 1:
                    os.unlink(path)
            except OSError:
                continue
        shutil.rmtree(self.folder, ignore_errors=True)


def supervise(command: list[str], parent: int) -> int:
    """Runs the command until the tree has to end, and ends it; returns the exit code."""
    supervisor = ProcessSupervisor(command, parent)
    with contextlib.suppress(BrokenPipeError):
        print(f"pid {supervisor.child.pid}", flush=True)
    supervisor.watch()
    if supervisor.code is None:
        print(f"[relax] ending the server: {supervisor.reason}", file=sys.stderr, flush=True)
    else:
        print(f"[relax] the server ended with exit code {supervisor.code}", file=sys.stderr, flush=True)
    supervisor.end_tree()
    return supervisor.code if supervisor.code is not None else 0


def stand_in(supervisor_pid: int, owner: int) -> int:
    """Passes signals on to the supervisor and ends when the owner does; returns the supervisor's exit code."""
    # The pipes are the supervisor's: kept open here they would outlive it.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signals = {*ENDING, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    while True:
        pid, status = os.waitpid(supervisor_pid, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if os.getppid() != owner:
            return 1  # the supervisor notices, and nobody asks for a code
        told = signal.sigtimedwait(signals, TICK_S)
        if told is not None and told.si_signo in ENDING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor_pid, told.si_signo)


def main(command: list[str]) -> int:
    """Runs the command below a supervisor, which is a process of its own."""
    me, owner = os.getpid(), os.getppid()
    pid = os.fork()
    return stand_in(pid, owner) if pid else supervise(command, me)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
