"""The profilers on a real GPU: the traces of a loop, snapshots, out-of-memory errors, the cost of recording."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_traces_snapshots_and_out_of_memory_errors(run_on_gpus: Callable[..., str], tmp_path: Path) -> None:
    assert '"mfu"' in run_on_gpus(SCRIPT, "--out", tmp_path).splitlines()[-1]
