"""A driver that is killed leaves no process and no folder of its Ray behind, and other processes are left alone."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from relax_cli.cluster import kill_cleanup
from relax_rollout.engines.sglang.process import SUPERVISOR

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from relax_cli.cluster.kill_cleanup import KillCleanUp

folder, how = Path(sys.argv[1]), sys.argv[2]
link = folder / "link"
link.symlink_to(folder)
session, supervisor = folder / "session_1", folder / "engines" / "sglang" / "process" / "supervisor.py"
ends_in_order = (
    "import sys, time\\n"
    "sys.stdin.read()\\n"
    f"time.sleep({sys.argv[3]})\\n"
    f"open({str(folder / 'in order')!r}, 'w').close()\\n"
)
(session / "logs").mkdir(parents=True)
(session / "logs" / "raylet.out").write_text("last words")
(folder / "session_latest").symlink_to(session)
(folder / "engine_key").write_text("secret")
supervisor.parent.mkdir(parents=True)
supervisor.write_text(ends_in_order)

titled_sleep = ("bash", "-c", "exec -a ray::Worker sleep 600")

def start(*words, **options):
    return subprocess.Popen(words, start_new_session=True, **options).pid

with KillCleanUp(folder / "run" / "logs" / "ray", folder / "engine_key") as clean_up:
    (cleaner,) = map(int, Path("/proc/thread-self/children").read_text().split())
    clean_up.starts(["gcs_server", f"--session-dir={link / 'session_1'}", "--session-name=session_1"])
    environment = {**os.environ, **clean_up.environment}
    marked = start("sleep", "600", env=environment)
    titled = start(*titled_sleep, pass_fds=[os.open(session / "logs" / "worker.out", os.O_CREAT | os.O_WRONLY)])
    in_order = start(sys.executable, str(supervisor), env=environment, stdin=subprocess.PIPE)
    other = start("tail", "-f", str(session / "logs" / "raylet.out"), stdout=subprocess.DEVNULL)
    heir = os.fork()  # it holds the pipe open, and outlives the driver
    if heir == 0:
        os.closerange(0, clean_up._process.stdin.fileno())
        os.closerange(clean_up._process.stdin.fileno() + 1, 256)
        time.sleep(600)
    print(cleaner, marked, titled, in_order, other, heir, flush=True)
    if how == "killed":
        time.sleep(600)
"""
NAMES = ("cleaner", "marked", "titled", "in order", "other", "heir")


@contextlib.contextmanager
def driver(folder: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, psutil.Process]]]:
    seconds = str(kill_cleanup.GRACE_S + 1)
    words = [sys.executable, "-c", DRIVER, str(folder), how, seconds]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    found: dict[str, psutil.Process] = {}
    try:
        assert process.stdout is not None
        pids = map(int, process.stdout.readline().split())
        found = dict(zip(NAMES, map(psutil.Process, pids), strict=True))
        yield process, found
    finally:
        process.kill()
        process.wait()
        for left in found.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_killed_driver_leaves_nothing_of_its_ray(tmp_path: Path) -> None:
    tmp_path = tmp_path / "a folder\nof two lines"
    tmp_path.mkdir()
    with driver(tmp_path, "killed") as (process, found):
        process.kill()
        process.wait()
        end = time.monotonic() + 60
        while runs(found["cleaner"]):  # it ends last
            assert time.monotonic() < end, "it does not end"
            time.sleep(0.05)
        assert [name for name in NAMES if runs(found[name])] == ["other", "heir"], "a reader of the logs is not Ray's"
        assert (tmp_path / "in order").exists(), "an engine's supervisor was not killed before it had cleared up"
    assert not (tmp_path / "session_1").exists()
    assert not (tmp_path / "session_latest").is_symlink()
    assert not (tmp_path / "engine_key").exists()
    assert (tmp_path / "run" / "logs" / "ray" / "raylet.out").read_text() == "last words"


def test_a_driver_that_ends_clears_up_itself(tmp_path: Path) -> None:
    with driver(tmp_path, "ends") as (process, found):
        assert process.wait(60) == 0
        assert not runs(found["cleaner"])
        assert runs(found["marked"])
        assert runs(found["titled"])
    assert (tmp_path / "session_1").is_dir()
    assert (tmp_path / "engine_key").exists()
    assert not (tmp_path / "run").exists()


def test_the_supervisor_is_known_by_its_path() -> None:
    assert os.fsencode(SUPERVISOR).endswith(kill_cleanup.PATIENT[0])


@pytest.mark.parametrize("again", [False, True])
def test_what_a_next_run_puts_into_the_same_folder_stays(tmp_path: Path, again: bool) -> None:
    session, logs, key = tmp_path / "session_1", tmp_path / "logs" / "ray", tmp_path / "engine_key"
    (session / "logs").mkdir(parents=True)
    (session / "logs" / "raylet.out").write_text("of the killed run")
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("of an earlier run")
    key.write_text("key of the killed run")
    left = kill_cleanup._Left("mark")
    for message in (f"session {session}", f"logs {logs}", f"remove {key}"):
        left.hear(message)
    left.driver_ended()
    if again:
        key.unlink()
        key.write_text("key of the next run")
        source = tmp_path / "session_2" / "logs"
        source.mkdir(parents=True)
        (source / "raylet.out").write_text("of the next run")
        kill_cleanup.move_logs(source, logs)
    left.remove_files()
    assert not session.exists()
    assert key.exists() == again
    assert (logs / "raylet.out").read_text() == ("of the next run" if again else "of the killed run")
