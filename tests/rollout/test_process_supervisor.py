"""The supervisor ends a whole tree of real processes, whatever happens to the owner. Without SGLang here: quick."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from relax_rollout.engines.sglang.server import SUPERVISOR

# A tree like that of a server: a child, a grandchild in its own session whose parent has ended (a daemon), a file and
# a semaphore in /dev/shm, and a temporary file.
TREE = """
import _multiprocessing, mmap, os, subprocess, sys, tempfile, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
subprocess.Popen(sleep)
spawn = f"import subprocess as s; print(s.Popen({sleep!r}, start_new_session=True, stdout=-3, stderr=-3).pid)"
daemon = subprocess.run([sys.executable, "-c", spawn], capture_output=True, text=True).stdout.strip()
shm = open("/dev/shm/relax-test-" + str(os.getpid()), "w+b")
shm.write(b"x" * 4096)
shm.flush()
mapped = mmap.mmap(shm.fileno(), 4096)
tempfile.NamedTemporaryFile(delete=False)
# What multiprocessing makes for each lock, without its resource tracker.
semaphore = f"/relax-test-{os.getpid()}"
lock = _multiprocessing.SemLock(0, 1, 1, semaphore, False)
with open(sys.argv[1], "w") as f:
    f.write(f"{daemon} {shm.name} {tempfile.gettempdir()}")
time.sleep(300)
"""

OWNER = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(300)
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Tree:
    """The running tree, and what it left on this machine."""

    def __init__(self, folder: Path, supervisor: psutil.Process) -> None:
        self.supervisor, note = supervisor, folder / "note"
        until(lambda: note.exists() and len(note.read_text().split()) == 3, "the tree to run")
        daemon, self.shm, self.temporary = note.read_text().split()
        self.semaphore = "/dev/shm/sem." + os.path.basename(self.shm)
        assert os.path.exists(self.semaphore)
        until(lambda: len(supervisor.children(recursive=True)) >= 3, "the whole tree")
        self.pids = [p.pid for p in supervisor.children(recursive=True)]
        assert int(daemon) in self.pids, "the daemon must be below the supervisor"

    def assert_gone(self) -> None:
        until(lambda: not any(map(running, self.pids)), "the tree to end", 15)
        until(lambda: not running(self.supervisor.pid), "the supervisor to end", 15)
        assert not os.path.exists(self.shm)
        assert not os.path.exists(self.semaphore)
        assert not os.path.exists(self.temporary)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], Tree]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], Tree]:
        command = [str(SUPERVISOR), sys.executable, "-c", TREE, str(tmp_path / "note")]
        owner = subprocess.Popen([sys.executable, "-c", OWNER, *command])
        started.append(owner)
        until(lambda: bool(psutil.Process(owner.pid).children()), "the supervisor")
        return owner, Tree(tmp_path, psutil.Process(owner.pid).children()[0])

    yield start
    for owner in started:
        owner.kill()
        owner.wait(timeout=10)


def test_kill_9_of_the_owner_ends_everything(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    owner, tree = start()
    owner.kill()
    owner.wait(timeout=10)
    tree.assert_gone()


def test_the_death_of_the_command_ends_what_it_left(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    _, tree = start()
    (command,) = [p for p in tree.supervisor.children() if "relax-test-" in " ".join(p.cmdline())]
    command.kill()
    until(lambda: not any(map(running, tree.pids)), "the tree to end", 15)
    until(lambda: not os.path.exists(tree.temporary), "the temporary folder to go", 15)
    # The supervisor looks for shared memory now and then; nobody had it mapped any more when this command was dead.
    Path(tree.shm).unlink(missing_ok=True)
    Path(tree.semaphore).unlink(missing_ok=True)


def test_a_signal_to_the_supervisor_ends_everything(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    _, tree = start()
    tree.supervisor.send_signal(signal.SIGTERM)
    tree.assert_gone()


def test_kill_9_of_the_supervisor_takes_the_command_along(
    start: Callable[[], tuple[subprocess.Popen[bytes], Tree]],
) -> None:
    _, tree = start()
    (command,) = [p for p in tree.supervisor.children() if "relax-test-" in " ".join(p.cmdline())]
    others = [psutil.Process(p) for p in tree.pids if p != command.pid]
    tree.supervisor.kill()
    until(lambda: not running(command.pid), "the command to end", 15)
    # Nobody is left to end the rest of this tree; SGLang's own processes end with their parent.
    for process in others:
        process.kill()
    os.unlink(tree.shm)
    os.unlink(tree.semaphore)
    shutil.rmtree(tree.temporary)


@pytest.mark.parametrize(
    ("code", "expected"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_that_of_the_command(code: str, expected: int) -> None:
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as supervisor:
        assert supervisor.wait(timeout=60) == expected
        assert supervisor.stdout is not None
        assert supervisor.stdout.read().startswith(b"pid ")
        assert supervisor.stderr is not None
        assert f"the server ended with exit code {expected}".encode() in supervisor.stderr.read()
