"""A session of tests that leaves something behind fails and says what, and which test it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import leftovers

CONFTEST = """
import leftovers

leftovers.GRACE_S = 0.5  # what these tests leave does not go by itself

def pytest_configure(config):
    config.pluginmanager.register(leftovers.Leftovers(), "leftovers")
"""

LEAVING = """
import os, subprocess, sys, tempfile

def test_a_file():
    tempfile.mkdtemp(prefix="left-here-")

def test_shared_memory():
    open("/dev/shm/relax-left-%d" % os.getpid(), "w").close()

def test_a_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print("pid", process.pid)
    globals()["kept"] = os.dup(process.stdin.fileno())

def test_a_forked_process():
    if not os.fork():
        os.read(os.pipe()[0], 1)

def test_nothing():
    pass
"""

CLEAN = """
import os, subprocess, sys, tempfile

def test_what_goes_in_time(tmp_path):
    (tmp_path / "file").touch()
    with tempfile.NamedTemporaryFile() as file:
        print("folder", os.path.dirname(file.name))
    subprocess.run([sys.executable, "-c", "pass"], check=True)
"""


def run(folder: Path, tests: str) -> tuple[int, str]:
    """(exit code, output) of a session with these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DEBUG_TEMPROOT": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, str(folder)]
    with (folder / "output").open("w") as output:  # a pipe would be held open by the processes that are left
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, timeout=300, env=environment, cwd=folder, check=False
        )
    return done.returncode, (folder / "output").read_text()


def test_what_is_left_fails_the_session_and_is_named(tmp_path: Path) -> None:
    code, output = run(tmp_path, LEAVING)
    left = [line for line in output.splitlines() if " (first seen after " in line]
    try:
        assert code == 1, output
        assert "5 passed" in output
        files = {line.split("::")[1].rstrip(")"): line for line in left if not line.startswith("process ")}
        assert set(files) == {"test_a_file", "test_shared_memory"}
        assert "/left-here-" in files["test_a_file"]
        assert files["test_shared_memory"].startswith("/dev/shm/relax-left-")
        assert len(left) == 4, output
    finally:
        for line in left:
            if line.startswith("process "):
                os.kill(int(line.split()[1].rstrip(":")), signal.SIGKILL)
            elif line.startswith("/dev/shm/relax-left-"):
                os.unlink(line.split()[0])


def test_a_clean_session_passes_and_its_folder_is_gone(tmp_path: Path) -> None:
    code, output = run(tmp_path, CLEAN)
    assert code == 0, output
    (folder,) = [line.split()[1] for line in output.splitlines() if line.startswith("folder ")]
    assert os.path.basename(folder).startswith("rx")
    assert not os.path.exists(folder)


def test_the_folder_of_a_killed_session_goes_with_the_next_one(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    for name in (f"rx{ended.pid}-killed", f"rx{os.getpid()}-runs", "rx-of-somebody", "other"):
        (tmp_path / name).mkdir()
    leftovers._remove_folders_of_killed_sessions(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {f"rx{os.getpid()}-runs", "rx-of-somebody", "other"}
