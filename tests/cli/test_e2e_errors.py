"""What a user sees when a run fails: the cause in one line, an exit code, and nothing that hangs or stays."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

BAD_REWARD = """
def reward(sample):
    if sample.prompt.prompt_id >= 6:
        raise KeyError("no such answer")
    return 1.0
"""


def test_a_reward_that_raises_names_sample_and_function(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(BAD_REWARD)
    run = relax(
        "train",
        *task.flags(rm_type=None, custom_rm_path="my_reward:reward", debug_rollout_only=True, num_rollout=3),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.finish() == 1, run.output
    assert len(run.steps()) == 1, "the rollout before the faulty sample is kept"
    assert "FAILED" in run.output
    assert f"{task.train.name}:7" in run.output, "file and line of the sample"
    assert "my_reward:reward" in run.output
    assert "no such answer" in run.output
    assert run.survivors() == []


def test_sigterm_finishes_the_step_and_saves_it(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    run = relax("train", *task.flags(num_rollout=10**6, save=tmp_path / "checkpoints"))
    run.wait_for(lambda: len(run.steps()) >= 2, "second step")
    os.killpg(run.process.pid, signal.SIGTERM)  # as batch systems and `timeout` do
    assert run.finish() == 128 + signal.SIGTERM, run.output
    assert "SIGTERM" in run.output
    assert "Summary" in run.output
    assert (tmp_path / "checkpoints").is_dir()
    assert any((tmp_path / "checkpoints").iterdir()), "the last finished step is saved"
    assert run.survivors() == []


def test_training_from_saved_rollouts_needs_no_engine(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    data = tmp_path / "rollout_{rollout_id}.jsonl"
    first = relax(
        "train",
        *task.flags(save_debug_rollout_data=data, num_rollout=2, **ALL_PROFILERS),
        folder=sub(tmp_path, "a"),
    )
    assert first.finish() == 0, first.output
    check_traces(first.folder / "traces" / "run")
    again = relax(
        "train",
        *task.flags(load_debug_rollout_data=data, debug_train_only=True, num_rollout=2),
        folder=sub(tmp_path, "b"),
    )
    assert again.finish() == 0, again.output
    assert not (again.folder / "runs" / "run" / "logs" / "engine0.log").exists()
    for a, b in zip(first.steps(), again.steps(), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=1e-6)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-4)
        # Invariant 6 in the run itself: the engine sampled with the weights that the trainer had.
        assert a["train/logprob_diff_max"] < 1e-4


ALL_PROFILERS = {
    "sglang_profile": True,
    "sglang_profile_steps": 1,
    "use_pytorch_profiler": True,
    "profile_step_start": 1,
    "profile_step_end": 1,
    "record_memory_history": True,
    "memory_recorder": "memray",
    "memory_snapshot_num_steps": 2,
}


def check_traces(folder: Path) -> None:
    """The three profilers at once give exactly this tree."""
    patterns = {
        "sglang_trace": r"rollout_1/engine0-\d{10}-TP-0\.trace\.json\.gz",
        "train_trace": r"train_overall_rank0_dp0_tp0_pp0\.\d{10}\.pt\.trace\.json\.gz",
        "memory_snapshot": r"memory_snapshot_time\d{10}_rank0_dp0_tp0_pp0_snapshot\.bin",
    }
    assert sorted(p.name for p in folder.iterdir()) == sorted(patterns)
    for name, pattern in patterns.items():
        files = [p for p in (folder / name).rglob("*") if p.is_file()]
        assert len(files) == 1, files
        assert re.fullmatch(pattern, str(files[0].relative_to(folder / name))), files
        assert files[0].stat().st_size > 0


def sub(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
