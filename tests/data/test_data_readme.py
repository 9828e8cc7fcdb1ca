"""The example of the package's README runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "relax-data" / "README.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # the example leaves its files for the reader to look at
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "micro-batches a rank: " in out
    assert "'ref_log_probs': [[-0.5, -0.1], [-2.0]]" in out
