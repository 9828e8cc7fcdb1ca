"""Who looks after Ray's own processes: what is found, who is told, and what is ended. Real processes, without Ray."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from relax_cli.cluster import ray_watch
from relax_cli.cluster.ray_watch import JoinedCluster, LocalProcesses, RayLost, watched
from relax_cli.cluster.waits import StopFlag

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPS, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, ", killed (SIGKILL), as the system does when"), (signal.SIGTERM, "by signal 15")],
)
def test_a_process_that_was_killed_is_named_with_its_last_words(
    child: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals, how: str
) -> None:
    process = psutil.Process(child.pid)
    (tmp_path / f"{process.name()}.err").write_text("")
    (tmp_path / f"{process.name()}.out").write_text("first\nthe last words\n")
    watch = LocalProcesses([process], tmp_path)
    assert watch.look() is None
    name = process.name()
    child.send_signal(number)
    until(lambda: watch.look() is not None)
    message = str(watch.look())
    assert f"Ray's process {name} (pid {child.pid}) has ended" in message
    assert how in message
    assert message.endswith(f"Last lines of its {name}.out:\n  first\n  the last words")
    assert child.wait() == -number, "whoever started it can still ask for its end"


def test_every_wait_hears_of_it_and_a_run_that_is_stuck_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "UNWIND_S", 0.01)
    stop, stuck, lost = StopFlag(), threading.Event(), RayLost("gone")
    told: list[RayLost] = []
    stop.raise_broken()
    with watched(lambda: lost, stop, told.append, lambda error: stuck.set(), 0.01):
        assert stuck.wait(60)
    assert told == [lost], "at once, and once"
    with pytest.raises(RayLost, match="gone"):
        stop.raise_broken()


def test_a_run_that_ends_in_time_is_not_ended() -> None:
    stop, stuck = StopFlag(), threading.Event()
    told: list[RayLost] = []
    with watched(lambda: RayLost("gone"), stop, told.append, lambda error: stuck.set(), 0.01):
        until(lambda: stop.broken is not None)
    assert not stuck.is_set()


def test_an_error_that_comes_first_is_known_to_be_of_ray() -> None:
    stop = StopFlag()
    told: list[RayLost] = []
    with pytest.raises(ConnectionError), watched(lambda: RayLost("gone"), stop, told.append, print):
        raise ConnectionError("an actor died")
    assert str(stop.broken) == "gone"
    assert told == [stop.broken], "once"


def test_after_an_error_a_node_that_does_not_answer_is_waited_for() -> None:
    """Ray needs some time to give it up, and whoever worked with it hears of that first."""
    stop, looks, gone = StopFlag(), 0, RayLost("gone")
    told: list[RayLost] = []

    def look() -> RayLost | None:
        nonlocal looks
        looks += 1
        return gone if looks >= 4 else None

    with pytest.raises(ConnectionError), watched(look, stop, told.append, print, 0.01, lambda: looks < 4):
        raise ConnectionError("closed by the other side")
    assert told == [gone]
    assert stop.broken is gone
    looks = -100
    stop = StopFlag()
    stop.set(signal.SIGTERM)
    with pytest.raises(ConnectionError), watched(look, stop, told.append, print, 0.01, lambda: True):
        raise ConnectionError("closed by the other side")
    assert stop.broken is None, "who asked for the end does not want to wait"


def test_a_gcs_that_refuses_is_gone_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = JoinedCluster.__new__(JoinedCluster)  # without a Ray that tells where it is
    cluster._raylet, cluster._refused, cluster._answered = None, 0, time.monotonic()
    monkeypatch.setattr(JoinedCluster, "_look_at_node", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster._gcs = server.getsockname()
        assert cluster.look() is None
        cluster._refused = 2
        assert cluster.look() is None, "it answers again"
        assert cluster._refused == 0
    for _ in range(ray_watch.REFUSALS - 1):
        assert cluster.look() is None
    assert f"nothing listens at 127.0.0.1:{cluster._gcs[1]} any more" in str(cluster.look())


def test_a_gcs_that_was_silent_for_too_long_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = JoinedCluster.__new__(JoinedCluster)
    cluster._raylet, cluster._refused, cluster._gcs = None, 0, ("127.0.0.1", 9)
    cluster._answered = time.monotonic() - ray_watch.GCS_SILENCE_S
    monkeypatch.setattr(JoinedCluster, "_look_at_node", lambda self: None)

    def busy(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", busy)
    assert "127.0.0.1:9 was silent for 40 s" in str(cluster.look())


# A Ray in small: a process whose child outlives it, an engine's supervisor with a command, and the run's own child.
FAMILY = """
import os, subprocess, sys, time
import psutil
from relax_cli.cluster import ray_watch
from relax_rollout.engines.sglang.process import SUPERVISOR

sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
own = subprocess.Popen(sleeps)
before = psutil.Process().children()
ray_watch.adopt_orphans()
actor = ("import subprocess, sys, time; "
         f"subprocess.Popen([sys.executable, '-I', '-S', {str(SUPERVISOR)!r}, *{sleeps!r}], stdin=subprocess.PIPE); "
         f"subprocess.Popen({sleeps!r}); print('up', flush=True); time.sleep(600)")
code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {actor!r}]); time.sleep(600)"
raylet = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
assert raylet.stdout.readline() == b"up\\n"
end = time.monotonic() + 60
while len(psutil.Process().children(recursive=True)) < 7 and time.monotonic() < end:
    time.sleep(0.05)
found = psutil.Process().children(recursive=True)
print(len(found), flush=True)
raylet.kill()
raylet.wait()
ray_watch.end_local(before)
left = [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
print([p.pid for p in left] == [own.pid], left, flush=True)
own.kill()
own.wait()
"""


def test_what_is_left_of_a_lost_ray_is_ended_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=200, check=False)
    counted, _, verdict = done.stdout.partition("\n")
    # Ray, its actor, the actor's child, stand-in, supervisor and command of the engine, and the run's own child.
    assert counted == "7", done.stderr
    assert verdict.startswith("True"), verdict
    assert done.returncode == 0, done.stderr
