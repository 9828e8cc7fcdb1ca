"""Weights over NCCL to a real SGLang engine on another GPU, and what a stopped or killed engine leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_group_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_arrive_over_nccl_and_a_lost_engine_is_survived(
    ranks: int, run_on_gpus: Callable[..., str], tmp_path: Path
) -> None:
    output = run_on_gpus(SCRIPT, "--tp", str(ranks), "--out", tmp_path, gpus=1 + ranks)
    assert "ok   parity after pushes in buckets of 512 MiB" in output
    assert "ok   an engine that is killed in bucket 2" in output
    assert "FAIL" not in output
