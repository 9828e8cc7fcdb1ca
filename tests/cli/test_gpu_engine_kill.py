"""The only engine of a real run on a GPU is killed in the middle of a rollout."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_engine_kill_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_it_generates_again_and_no_prompt_is_lost(run_on_gpus: Callable[..., str], tmp_path: Path) -> None:
    output = run_on_gpus(SCRIPT, "--out", tmp_path)
    assert "ok   generates again" in output, output
