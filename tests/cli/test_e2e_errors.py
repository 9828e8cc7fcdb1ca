"""What a user sees when a run fails: the cause in one line, an exit code, and nothing that hangs or stays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

BAD_REWARD = """
def reward(sample):
    if sample.prompt.prompt_id == 6:
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
