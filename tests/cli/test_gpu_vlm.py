"""`relax train` with pictures on a real GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_vlm_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_engine_and_trainer_agree_on_pictures(run_on_gpus: Callable[..., str], tmp_path: Path) -> None:
    output = run_on_gpus(SCRIPT, "--out", tmp_path, gpus=1)
    lines = [line for line in output.splitlines() if " log-probs of engine and trainer differ by " in line]
    assert len(lines) == 3
    assert all(line.split()[1] == "ok" for line in lines), output
