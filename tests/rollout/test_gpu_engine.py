"""The SGLang engine on real GPUs: parity, sleep and wake, pushes over CUDA IPC, abort."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_engine_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("gpus", [1, 2])
def test_engine_keeps_parity_through_pushes_and_sleep(
    gpus: int, run_on_gpus: Callable[..., str], tmp_path: Path
) -> None:
    output = run_on_gpus(SCRIPT, "--tp", str(gpus), "--out", tmp_path, gpus=gpus)
    assert "ok   what listens" in output
    assert "ok   the key" in output
    assert "ok   parity after three pushes" in output
    assert "FAIL" not in output
