"""The start of a local Ray: it is not silent, a process that dies is noticed, and one failure is forgiven."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from relax_cli import local_ray
from relax_cli.cluster import connected
from relax_cli.local_ray import RayStartError


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


def fail() -> None:
    raise Exception("The current node timed out during startup")


def test_one_failure_is_told_and_tried_again(ray_init: Callable[..., list[dict[str, Any]]]) -> None:
    calls, told = ray_init(fail, lambda: None), []
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


KILLING = """
import threading, time
import psutil
from relax_cli.cluster import connected

def kill_first_raylet():
    while True:
        for child in psutil.Process().children():
            if child.name() == "raylet":
                child.kill()
                return
        time.sleep(0.01)

threading.Thread(target=kill_first_raylet, daemon=True).start()
with connected(None, min_cpus=1, note=lambda line: print(line, flush=True)):
    import ray
    print("answer", ray.get(ray.remote(lambda: 7).remote()))
print("left", psutil.Process().children(recursive=True))
"""


@pytest.mark.slow
def test_a_raylet_that_dies_at_once_is_noticed_and_replaced() -> None:
    done = subprocess.run([sys.executable, "-c", KILLING], capture_output=True, text=True, timeout=400)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("waiting for Ray")]
    assert done.returncode == 0, done.stderr
    assert "its process raylet ended while it started" in lines[0]
    assert lines[1:] == ["answer 7", "left []"]
