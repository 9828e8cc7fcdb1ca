"""An engine of a real run on GPUs is killed while it generates: the only one, in both modes, and one of two."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_engine_kill_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("mode", "gpus"),
    [([], 1), (["--fully-async"], 2), (["--fully-async", "--engines", "2"], 4)],
    ids=["colocate", "fully-async", "one of two"],
)
def test_it_generates_again_and_no_prompt_is_lost(
    mode: list[str], gpus: int, run_on_gpus: Callable[..., str], tmp_path: Path
) -> None:
    output = run_on_gpus(SCRIPT, *mode, "--out", tmp_path, gpus=gpus)
    assert "ok   generates again" in output, output
