"""relax-profiling beside HolisticTraceAnalysis on the same training traces: shares, and the ratio of the two times.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install HolisticTraceAnalysis "pandas<2.3"
    python benchmarks/profiling_compare.py --hta-python /tmp/hta/bin/python [FOLDER ...]

Without folders: the recorded traces of the tests, and a made trace of two ranks with 100,000 events each. HTA rounds
times down to whole microseconds unless HTA_DISABLE_NS_ROUNDING is set; both are shown. Times are without
imports. (HTA 0.5.0 fails on larger traces with pandas 3.)
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from profiling_report import write_trace
from relax_profiling.analysis.breakdown import device_breakdown
from relax_profiling.report.build import build_report
from relax_profiling.trace.load import load_trace

HERE = Path(__file__).parent
RECORDED = HERE.parent / "tests" / "profiling" / "data" / "train_trace"


def ours(folder: Path) -> tuple[dict[str, dict[str, float]], float, float]:
    """Shares by rank; seconds for these shares alone, as HTA computes them; seconds for the whole report."""
    began = time.perf_counter()
    ranks: dict[str, dict[str, float]] = {}
    for path in sorted(folder.iterdir()):
        trace = load_trace(path)
        b = device_breakdown(trace, next(iter(trace.gpus.values())))
        communication = b.communication_exposed + b.communication_overlapped
        ranks[path.name.split("rank")[1].split("_")[0]] = {
            "compute": 100 * b.share("compute"),
            "other": 100 * (b.share("communication_exposed") + b.share("memory")),
            "idle": 100 * b.share("idle"),
            "overlap": 100 * b.communication_overlapped / communication if communication else 0.0,
        }
    shares_seconds = time.perf_counter() - began
    began = time.perf_counter()
    build_report([folder])
    return ranks, shares_seconds, time.perf_counter() - began


def theirs(python: str, folder: Path, exact: bool) -> Any:
    """HTA in its own environment, in a folder of its own (it writes beside the traces)."""
    environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1" if exact else "0"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder, Path(copy) / "traces")
        command = [python, str(HERE / "profiling_hta.py"), str(Path(copy) / "traces")]
        done = subprocess.run(command, capture_output=True, env=environment, timeout=600, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout)


def compare(python: str, folder: Path) -> bool:
    """Prints the comparison of one folder; whether all shares agree to one percentage point."""
    ranks, shares_seconds, report_seconds = ours(folder)
    exact, rounded = theirs(python, folder, True), theirs(python, folder, False)
    agree = True
    print(f"\n{folder}")
    print(f"{'rank':>4} {'share':>8} {'ours':>8} {'HTA':>8} {'HTA, whole us':>14}")
    for rank, shares in ranks.items():
        for name, value in shares.items():
            other = exact["ranks"][rank][name]
            agree &= abs(value - other) <= 1.0
            print(f"{rank:>4} {name:>8} {value:8.2f} {other:8.2f} {rounded['ranks'][rank][name]:14.2f}")
    fastest = min(exact["seconds"], rounded["seconds"])
    print(
        f"ours {shares_seconds:.2f} s for the shares, {report_seconds:.2f} s for the whole report; "
        f"HTA {fastest:.2f} s: {fastest / shares_seconds:.1f} and {fastest / report_seconds:.1f} times as long"
    )
    return agree


def made(folder: Path) -> Path:
    """Two ranks with 100,000 events each."""
    folder.mkdir()
    for rank in range(2):
        path = folder / f"train_overall_rank{rank}_dp{rank}_tp0_pp0.1713780123.pt.trace.json"
        packed = path.with_suffix(".json.gz")
        write_trace(packed, 100_000)
        text = gzip.decompress(packed.read_bytes()).replace(
            b'"with_flops": 1,', b'"with_flops": 1,\n  "distributedInfo": {"backend": "nccl", "rank": %d},' % rank
        )
        packed.write_bytes(gzip.compress(text, 1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--hta-python", required=True, help="a Python that has HolisticTraceAnalysis")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = arguments.folders or [RECORDED, made(Path(scratch) / "made")]
        results = [compare(arguments.hta_python, folder) for folder in folders]
    sys.exit(0 if all(results) else "some shares differ by more than one percentage point")


if __name__ == "__main__":
    main()
