"""The example of the package's README runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "relax-data" / "README.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300).stdout
    assert "micro-batches a rank: " in out
    assert "'ref_log_probs': [[-0.5, -0.1], [-2.0]]" in out
