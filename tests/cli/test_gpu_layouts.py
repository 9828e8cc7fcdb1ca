"""`relax train` on real GPUs in every parallel layout that they allow."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_layouts_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_engine_and_trainer_agree_in_every_layout_of(
    gpus: int, run_on_gpus: Callable[..., str], tmp_path: Path
) -> None:
    output = run_on_gpus(SCRIPT, "--gpus", str(gpus), "--out", tmp_path, gpus=gpus)
    lines = [line for line in output.splitlines() if " log-probs of engine and trainer differ by " in line]
    assert lines
    assert all(line.split()[1] == "ok" for line in lines), output
