"""A run whose Ray is killed twice: each launch says what died and how to go on, and leaves nothing behind."""

import contextlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from relax_cli.run.debug_data import load_groups

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


def sessions() -> set[Path]:
    return set(Path(tempfile.gettempdir(), "ray").glob("session_2*"))


def child(run: Any, name: str) -> psutil.Process:
    (found,) = (p for p in psutil.Process(run.process.pid).children() if p.name() == name)
    return found


def listening(run: Any) -> list[Any]:
    """Sockets of the run's processes that take connections."""
    found: list[Any] = []
    for process in run.seen:
        with contextlib.suppress(psutil.Error):
            found += [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return found


def until_steps(run: Any, count: int) -> None:
    """Of this launch: the metrics have those of the launches before it too."""
    run.wait_for(lambda: len(re.findall(r"\] step \d", run.output)) >= count, f"{count} steps")


def test_raylet_and_gcs_are_killed_and_every_prompt_is_trained_once(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    checkpoints, data = tmp_path / "checkpoints", tmp_path / "rollout_{rollout_id}.jsonl"
    options = {"save": checkpoints, "load": checkpoints, "save_interval": 1, "save_debug_rollout_data": data}
    before = sessions()

    for victim in ("raylet", "gcs_server"):
        run = relax("train", *task.flags(num_rollout=10**6, **options))
        until_steps(run, 2)
        victim_process = child(run, victim)
        assert {c.laddr.ip for c in listening(run)} <= {"127.0.0.1", "::ffff:127.0.0.1"}, (
            "nothing of it can be reached from elsewhere"
        )
        victim_process.kill()
        assert run.finish() == 1, run.output
        said = run.output.partition("FAILED")[2]
        assert f"RayLost: Ray's process {victim} (pid {victim_process.pid}) has ended" in said
        assert re.search(r"the checkpoint of rollout \d+ in \S+ is whole; to go on from there", said), said
        assert f"--load {checkpoints}" in said
        assert "Traceback" not in run.output
        assert "Raylet is terminated" not in run.output, "Ray's own words are in the log"
        assert run.survivors() == []
        assert sessions() == before, "Ray's folder is gone"
        assert (run.folder / "runs" / "run" / "logs" / "ray" / f"{victim}.out").is_file(), "and its logs are kept"
        assert not (run.folder / "runs" / "run" / "engine_key").exists()

    steps = run.steps()[-1]["step"] + 3
    last = relax("train", *task.flags(num_rollout=steps, **options))
    assert last.finish() == 0, last.output
    assert last.survivors() == []
    rows = last.steps()
    assert [row["step"] for row in rows] == list(range(steps)), "no step is missing, none is there twice"
    ids = [g.prompt.prompt_id for i in range(steps) for g in load_groups(Path(str(data).format(rollout_id=i)))]
    assert ids == list(range(4 * steps)), "every prompt once, in order"
    assert rows[-1]["prompts/trained"] + rows[-1]["prompts/out"] == 4 * steps
