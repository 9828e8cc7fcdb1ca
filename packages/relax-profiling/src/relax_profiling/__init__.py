"""Profilers for SGLang servers and torch training loops, and a report that says what to change.

Doors: :func:`analyze` for the report, :mod:`relax_profiling.recorders` for recording. Importing the package imports
neither torch nor the readers.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_profiling.report.model import Report

__all__ = ["analyze"]


def analyze(*paths: str | os.PathLike[str], peak_tflops: float | None = None) -> "Report":
    """Reads traces and memory recordings and says where the time and the memory go.

    A run folder shows ranks and engines together: which rank the others wait for, and how memory grows from snapshot
    to snapshot. ``relax-profile report`` prints what this returns.

    >>> import relax_profiling
    >>> report = relax_profiling.analyze("traces/my-run")
    >>> for trace in report.traces:
    ...     if trace.role == "train":
    ...         print(f"{trace.label}: idle for {trace.breakdown.share('idle'):.0%} of the recorded time")
    rank0_dp0_tp0_pp0: idle for 20% of the recorded time
    rank1_dp1_tp0_pp0: idle for 95% of the recorded time
    >>> print(report.findings[0].rule, "->", report.findings[0].flags[0])
    out of memory -> --max-tokens-per-gpu
    >>> report.memory[0].devices[0].oom[0].asked >> 30  # GiB
    8

    Args:
        paths: run folders (``traces/NAME``, ``runs/NAME``), folders of runs, traces (``.json``, ``.json.gz``),
            snapshots of torch (``.pickle``, ``.pickle.gz``) or recordings of memray (``.bin``).
        peak_tflops: dense peak of the GPU in TFLOP/s for MFU, in place of the table's.

    Returns:
        One entry a file, the findings, and in ``problems`` the files that could not be read, in whole or in part, and
        why: a damaged or missing file is never an exception.

    Raises:
        ValueError: when no path is given, or a peak that is not above 0.
    """
    from relax_profiling.report.build import build_report

    if not paths:
        raise ValueError("analyze() was given no path; give a run folder (traces/NAME), a trace or a snapshot")
    if peak_tflops is not None and not peak_tflops > 0:
        raise ValueError(f"peak_tflops {peak_tflops}: give a number above 0, for instance 989 for an H100")
    return build_report([Path(path) for path in paths], peak=peak_tflops)
