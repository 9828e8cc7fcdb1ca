"""The start of a local Ray: it is not silent, a process that dies is noticed, and one failure is forgiven."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private import services
from ray.exceptions import RpcError
from relax_cli.cluster import local_ray
from relax_cli.cluster.kill_cleanup import move_logs
from relax_cli.cluster.local_ray import RayStartError
from relax_cli.cluster.ray_cluster import connected


@pytest.fixture
def ray_init(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts functions in the place of the first, second ... call of ``ray.init``; returns the options of the calls."""

    def replace(*actions: Callable[[], Any]) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        left = list(actions)

        def init(**options: Any) -> None:
            calls.append(options)
            left.pop(0)()

        monkeypatch.setattr("ray.init", init)
        monkeypatch.setattr("ray.shutdown", lambda: None)
        return calls

    return replace


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fail() -> None:
    raise Exception("The current node timed out during startup")


def test_one_failure_is_told_and_tried_again(ray_init: Callable[..., list[dict[str, Any]]]) -> None:
    calls = ray_init(fail, lambda: None)
    told: list[str] = []
    with connected(None, min_cpus=1, note=told.append):
        pass
    assert len(calls) == 2
    assert all(options["address"] == "local" for options in calls)
    assert len(told) == 1
    assert "timed out during startup" in told[0]
    assert "trying once more" in told[0]


def test_the_second_failure_says_why_and_what_to_do(ray_init: Callable[..., list[dict[str, Any]]]) -> None:
    calls = ray_init(fail, fail)
    with pytest.raises(RayStartError, match=r"timed out.*logs are in /.*--ray-address"), connected(None, min_cpus=1):
        raise AssertionError("not reached")
    assert len(calls) == 2


def test_a_deadline_that_passed_is_not_waited_for_twice(ray_init: Callable[..., list[dict[str, Any]]]) -> None:
    def late() -> None:
        raise TimeoutError("the raylet did not register within 300 s")

    calls = ray_init(late)
    with pytest.raises(RayStartError, match="within 300 s"), connected(None, min_cpus=1):
        raise AssertionError("not reached")
    assert len(calls) == 1


def test_only_what_the_start_has_left_is_ended(ray_init: Callable[..., list[dict[str, Any]]]) -> None:
    """A process of the caller's own, and the processes below it, are none of Ray's, also those that start meanwhile."""
    nested = (
        "import subprocess, sys\n"
        "for line in sys.stdin: subprocess.Popen(['sleep', '600']); print('started', flush=True)"
    )

    def family() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def grow(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        assert process.stdout.readline() == "started\n"

    own = family()
    grow(own)
    rays: list[subprocess.Popen[str]] = []

    def leave_processes_and_fail() -> None:
        grow(own)
        rays.append(family())
        grow(rays[0])
        rays_below.extend(psutil.Process(rays[0].pid).children())
        fail()

    rays_below: list[psutil.Process] = []
    ray_init(leave_processes_and_fail, lambda: None)
    try:
        with connected(None, min_cpus=1):
            pass
        assert not psutil.pid_exists(rays[0].pid)
        assert [p for p in rays_below if runs(p)] == []
        assert len(rays_below) == 1
        assert own.poll() is None
        assert len(psutil.Process(own.pid).children()) == 2
    finally:
        for process in [*psutil.Process(own.pid).children(), own]:
            process.kill()
        own.wait()


def test_what_ray_tells_of_its_processes_goes_to_the_log(
    ray_init: Callable[..., list[dict[str, Any]]],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ray._private import worker

    assert "print_to_stdstream" in worker.listen_error_messages.__code__.co_names, "the way of its messages"
    ray_init(lambda: None)
    before = worker.print_to_stdstream
    with caplog.at_level("INFO"), connected(None, min_cpus=1):
        worker.print_to_stdstream(
            {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}, ignore_prefix=False
        )
    assert "Ray: Raylet is terminated." in caplog.text
    assert capsys.readouterr().out == ""
    assert worker.print_to_stdstream is before


def test_a_signal_while_ray_starts_leaves_no_folder(
    ray_init: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    session = tmp_path / "session_1"

    def begin_and_be_told_to_stop() -> None:
        session.mkdir()
        words = ["sleep", "600", f"--session-dir={session}"]
        process = services.ConsolePopen(["bash", "-c", "exec sleep 600", *words])
        started.append(psutil.Process(process.pid))
        signal.raise_signal(signal.SIGTERM)

    started: list[psutil.Process] = []
    ray_init(begin_and_be_told_to_stop)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit), connected(None, min_cpus=1):
            raise AssertionError("not reached")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not session.exists()
    assert not runs(started[0])


def test_a_long_start_is_not_silent(
    ray_init: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "REMIND_S", 0.01)
    spoken, told = threading.Event(), []

    def note(line: str) -> None:
        told.append(line)
        spoken.set()

    ray_init(lambda: spoken.wait(60))
    with connected(None, min_cpus=1, note=note):
        pass
    assert told[0].startswith("waiting for Ray to start on this machine (")


def test_a_gcs_that_is_slow_to_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [RpcError("Deadline Exceeded"), {}, {b"\xab": "info"}]

    class Client:
        def __init__(self, address: str) -> None:
            assert address == "host:1"

        def get_all_node_info(self, timeout: float) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr("ray._raylet.GcsClient", Client)
    monkeypatch.setattr(services, "get_node", lambda address, node: f"{node} at {address}")
    with local_ray._registration_watched(set(psutil.Process().children())):
        assert services.get_node("host:1", "ab") == "ab at host:1"
    assert answers == []


KILLING = """
import os
import time
import psutil
from ray._private import services
from relax_cli.cluster.ray_cluster import connected

class KillsTheFirstRaylet(services.ConsolePopen):
    killed = False

    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        if psutil.Process(self.pid).name() == "raylet" and not KillsTheFirstRaylet.killed:
            KillsTheFirstRaylet.killed = True
            self.kill()

services.ConsolePopen = KillsTheFirstRaylet
with connected(None, min_cpus=1, note=lambda line: print(line, flush=True)):
    import ray
    print("answer", ray.get(ray.remote(lambda: 7).remote()))
    folder = ray._private.worker._global_node.get_session_dir_path()

def left():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]

end = time.monotonic() + 60
while left() and time.monotonic() < end:
    time.sleep(0.1)
print("left", left(), os.path.exists(folder))
"""


@pytest.mark.slow
def test_a_raylet_that_dies_at_once_is_noticed_and_replaced() -> None:
    """And a Ray that ends well leaves neither a process nor a folder."""
    done = subprocess.run([sys.executable, "-c", KILLING], capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("waiting for Ray")]
    assert done.returncode == 0, done.stderr
    assert "its process raylet ended while it started" in lines[0]
    assert lines[1:] == ["answer 7", "left [] False"]


def test_the_folder_of_a_ray_that_was_there_before_is_left_alone(
    ray_init: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Node:
        def get_session_dir_path(self) -> str:
            return str(tmp_path)

    monkeypatch.setattr("ray._private.worker._global_node", Node())
    ray_init(lambda: None)
    with connected(None, min_cpus=1):
        pass
    assert tmp_path.is_dir()


def test_logs_of_ray_get_the_modes_of_the_umask(tmp_path: Path) -> None:
    """Ray opens its folders to everybody."""
    source, target = tmp_path / "session" / "logs", tmp_path / "run" / "logs" / "ray"
    (source / "old").mkdir(parents=True)
    (source / "raylet.err").write_text("last words")
    (source / "old" / "gcs.out").write_text("more")
    (source / "gone").symlink_to(tmp_path / "nothing")
    for path in (source, source / "old", source / "raylet.err"):
        path.chmod(0o777)
    before = os.umask(0o077)
    try:
        move_logs(source, target)
    finally:
        os.umask(before)
    assert (target / "raylet.err").read_text() == "last words"
    modes = {str(p.relative_to(target)): stat.S_IMODE(p.stat().st_mode) for p in (target, *target.rglob("*"))}
    assert modes == {".": 0o700, "old": 0o700, "raylet.err": 0o600, "old/gcs.out": 0o600}


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_folder_of_ray_with_its_logs() -> None:
    code = (
        "from relax_cli.cluster.ray_cluster import connected\n"
        "with connected(None, min_cpus=1):\n"
        "    import ray\n"
        "    print(ray._private.worker._global_node.get_session_dir_path(), flush=True)\n"
        "    raise SystemExit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr
    folder = Path(done.stdout.split()[-1])
    assert folder.is_dir()
    shutil.rmtree(folder)


STOPPED = """
import os, signal, sys
from ray._private import worker
from relax_cli.cluster.ray_cluster import connected

connect = worker.connect

def connect_and_be_told_to_stop(*words, **options):
    connect(*words, **options)
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("not reached")

worker.connect = connect_and_be_told_to_stop
with connected(None, min_cpus=1):
    raise AssertionError("not reached")
"""


@pytest.mark.slow
def test_a_sigterm_in_the_last_part_of_the_start_prints_nothing() -> None:
    """By then the library of Ray is up in the driver, and would write its stack and abort."""
    sessions = Path(tempfile.gettempdir(), "ray")
    before = set(sessions.glob("session_2*"))
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == signal.SIGTERM, done.stderr
    assert done.stdout + done.stderr == ""
    assert set(sessions.glob("session_2*")) == before
