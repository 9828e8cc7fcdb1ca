"""The Triton kernels against plain torch, on a CPU in Triton's interpreter and on a GPU as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kernels_agree_with_torch() -> None:
    pytest.importorskip("triton")
    import torch

    # The interpreter is chosen while triton is imported, so that it takes a process of its own.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    script = Path(__file__).with_name("kernel_checks.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert "all kernels agree" in done.stdout, done.stderr[-3000:]
