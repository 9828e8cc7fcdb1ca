"""The supervisor ends a whole tree of real processes, whatever happens to the owner. Without SGLang here: quick."""

import functools
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from relax_rollout.engines.sglang.process import SUPERVISOR, supervisor

# A tree like that of a server: a child, a grandchild in its own session whose parent has ended (a daemon), a file and
# a semaphore in /dev/shm, and a temporary file.
TREE = """
import _multiprocessing, mmap, os, subprocess, sys, tempfile, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleep)
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
with open(sys.argv[1] + ".part", "w") as f:
    f.write(f"{os.getpid()} {child.pid} {daemon} {shm.name} {tempfile.gettempdir()}")
os.rename(f.name, sys.argv[1])
time.sleep(300)
"""

OWNER = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(300)
"""


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def none_runs(processes: Iterable[psutil.Process]) -> bool:
    return not any(map(running, processes))


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Tree:
    """The running tree, and what it left on this machine.

    Attributes:
        stand_in: what the owner has started.
        supervisor: below it; the parent of the command.
        processes: everything below the supervisor.
    """

    def __init__(self, folder: Path, stand_in: psutil.Process) -> None:
        self.stand_in, note = stand_in, folder / "note"
        until(note.exists, "the tree to run")
        command, child, daemon, self.shm, self.temporary = note.read_text().split()
        self.semaphore = "/dev/shm/sem." + os.path.basename(self.shm)
        assert os.path.exists(self.semaphore)
        self.command = psutil.Process(int(command))
        self.processes = [self.command, psutil.Process(int(child)), psutil.Process(int(daemon))]
        (self.supervisor,) = stand_in.children()
        assert self.command.ppid() == self.supervisor.pid
        assert int(daemon) in [p.pid for p in self.supervisor.children()], "the daemon must be below the supervisor"

    def assert_gone(self) -> None:
        until(lambda: not any(map(running, self.processes)), "the tree to end")
        until(lambda: not running(self.supervisor), "the supervisor to end")
        until(lambda: not running(self.stand_in), "the stand-in to end")
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
        below = psutil.Process(owner.pid).children(recursive=True) if owner.poll() is None else []
        owner.kill()
        owner.wait(timeout=300)
        until(functools.partial(none_runs, below), "what the test has left to end")


def test_kill_9_of_the_owner_ends_everything(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    owner, tree = start()
    owner.kill()
    owner.wait(timeout=300)
    tree.assert_gone()


def test_the_death_of_the_command_ends_what_it_left(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    _, tree = start()
    tree.command.kill()
    until(lambda: not any(map(running, tree.processes)), "the tree to end")
    until(lambda: not running(tree.stand_in), "the supervisor to end")
    assert not os.path.exists(tree.temporary)
    # The supervisor looks for shared memory now and then; nobody had it mapped any more when this command was dead.
    Path(tree.shm).unlink(missing_ok=True)
    Path(tree.semaphore).unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_to_the_stand_in_ends_everything(
    start: Callable[[], tuple[subprocess.Popen[bytes], Tree]], number: signal.Signals
) -> None:
    """SIGKILL is what a Ray worker that ends has for its children."""
    _, tree = start()
    tree.stand_in.send_signal(number)
    tree.assert_gone()


def test_a_signal_to_the_supervisor_ends_everything(start: Callable[[], tuple[subprocess.Popen[bytes], Tree]]) -> None:
    _, tree = start()
    tree.supervisor.send_signal(signal.SIGTERM)
    tree.assert_gone()


def test_kill_9_of_the_supervisor_takes_the_command_along(
    start: Callable[[], tuple[subprocess.Popen[bytes], Tree]],
) -> None:
    _, tree = start()
    tree.supervisor.kill()
    until(lambda: not running(tree.command), "the command to end")
    until(lambda: not running(tree.stand_in), "the stand-in to end")
    # Nobody is left to end the rest of this tree; SGLang's own processes end with their parent.
    for process in tree.processes[1:]:
        process.kill()
    os.unlink(tree.shm)
    os.unlink(tree.semaphore)
    shutil.rmtree(tree.temporary)


def test_shared_memory_is_known_after_the_death_of_those_who_used_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SHM", str(tmp_path))
    long_ago = 1_000_000_000
    looks = 0

    def pids() -> list[int]:
        nonlocal looks
        looks += 1
        return [os.getpid()]

    seen = supervisor.SharedMemory()
    file = tmp_path / "segment"
    file.write_bytes(b"x" * 4096)
    seen.look(pids)
    assert seen.files == set(), "there, but not mapped yet"
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 4096):
        seen.look(pids)
    assert seen.files == {str(file)}
    os.utime(tmp_path, (long_ago, long_ago))
    for _ in range(3):
        seen.look(pids)
    assert looks == 3, "nothing came or went since the third look"
    assert seen.files == {str(file)}


@pytest.mark.parametrize(
    ("code", "expected"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_exit_code_is_that_of_the_command(code: str, expected: int) -> None:
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(timeout=300) == expected
        assert process.stdout is not None
        assert process.stdout.read().startswith(b"pid ")
        assert process.stderr is not None
        assert f"the server ended with exit code {expected}".encode() in process.stderr.read()


def test_what_the_owner_writes_reaches_the_command_and_no_command_line() -> None:
    code = "import os, sys; word = sys.stdin.readline().strip(); sys.exit(5 if word == 'secret' else 6)"
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"secret\n")
        process.stdin.flush()
        assert process.wait(timeout=300) == 5
