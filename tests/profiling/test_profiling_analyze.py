"""``relax_profiling.analyze``: the report of a folder, a trace or a snapshot, by one call."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest
import relax_profiling
from relax_profiling.report.build import build_report

README = Path(__file__).parents[2] / "packages" / "relax-profiling" / "README.md"


@pytest.fixture
def beside_run(recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which ``traces/my-run`` lies, as the working directory."""
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "my-run").symlink_to(recorded_run)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("beside_run")
def test_the_example_of_the_docstring_holds() -> None:
    result = doctest.testmod(relax_profiling)
    assert result.attempted >= 5
    assert result.failed == 0


def test_the_example_of_the_readme_runs(beside_run: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    (code,) = (example for example in examples if "relax_profiling.analyze" in example)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=beside_run, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "out of memory" in done.stdout
    assert "rank1_dp1_tp0_pp0 95% idle" in done.stdout


def test_a_folder_gives_what_the_command_prints(recorded_run: Path) -> None:
    assert relax_profiling.analyze(recorded_run) == build_report([recorded_run])


def test_one_trace_and_one_snapshot(recorded_run: Path) -> None:
    trace = min((recorded_run / "train_trace").iterdir())
    (report,) = relax_profiling.analyze(str(trace), peak_tflops=98.9).traces
    assert report.label == "rank0_dp0_tp0_pp0"
    assert report.mfu == pytest.approx(10 * (relax_profiling.analyze(trace).traces[0].mfu or 0), rel=1e-3)
    snapshot = min((recorded_run / "memory_snapshot").glob("*_oom_*"))
    both = relax_profiling.analyze(trace, snapshot)
    assert [t.file for t in both.traces] == [str(trace)]
    assert [m.kind for m in both.memory] == ["out of memory"]


def test_what_is_not_there_is_a_problem_and_no_error(tmp_path: Path) -> None:
    report = relax_profiling.analyze(tmp_path / "nothing")
    assert report.traces == report.memory == report.findings == []
    assert report.problems == [f"{tmp_path / 'nothing'}: there is no such file or folder"]


def test_wrong_usage_is_refused(recorded_run: Path) -> None:
    with pytest.raises(ValueError, match="no path"):
        relax_profiling.analyze()
    with pytest.raises(ValueError, match=r"peak_tflops 0: .*989"):
        relax_profiling.analyze(recorded_run, peak_tflops=0)


def test_the_import_loads_neither_torch_nor_the_readers() -> None:
    code = "import sys, relax_profiling; print([m for m in ('torch', 'msgspec', 'orjson') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
