"""The trainer's model on real GPUs, held to transformers; with two of them in every parallel layout."""

from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu_model_check.py")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(3600)]


def test_model_attention_checkpoint_and_offload(run_on_gpus: Callable[..., str]) -> None:
    assert "all checks held" in run_on_gpus(SCRIPT)


def test_parity_of_two_ranks(run_on_gpus: Callable[..., str]) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run_on_gpus(SCRIPT, "--only", "parity", gpus=2, launcher=torchrun)
    assert "all checks held" in output
