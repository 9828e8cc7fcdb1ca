"""The relax-profile command: report, merge, memory; and the page in a real browser."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.cli import main
from relax_profiling.report.build import build_report
from relax_profiling.report.html import to_html
from relax_profiling.report.timeline import downsample
from relax_profiling.snapshot.analyse import analyse_snapshot, growth
from relax_profiling.snapshot.unpickle import load_snapshot
from relax_profiling.trace import merge
from relax_profiling.trace.load import load_trace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_report_as_text(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(recorded_run)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "What to change",
        "-> even out the tokens of the ranks",
        "rank0_dp0_tp0_pp0 train_overall  [NVIDIA H200]",
        "compute 3.3%   communication 76.9% exposed, 1.8% overlapped",
        "last at 6 of 6 collectives",
        "DECODE: 4 steps, batch 1.0",
        "out of memory: 8.00 GiB asked for at <module>",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "MFU 0.2%",
    ):
        assert expected in text, expected


def test_report_as_json(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(recorded_run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"sources", "traces", "memory", "findings", "problems", "timelines"}
    assert [t["role"] for t in data["traces"]].count("engine") == 2
    assert data["traces"][0]["breakdown"]["idle_causes"]
    assert "curve" not in data["memory"][0]["devices"][0]


def test_an_own_peak(recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded_run / "train_trace"
    assert main(["report", str(folder), "--json", "--peak-tflops", "98.9"]) == 0
    low = json.loads(capsys.readouterr().out)["traces"][0]["mfu"]
    assert main(["report", str(folder), "--json"]) == 0
    assert low == pytest.approx(10 * json.loads(capsys.readouterr().out)["traces"][0]["mfu"], rel=1e-3)
    assert main(["report", str(folder), "--peak-tflops", "0"]) == 2
    assert "--peak-tflops 0.0: give a number above 0" in capsys.readouterr().err


def test_nothing_to_read_is_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "absent")]) == 1
    assert "there is no such file or folder" in capsys.readouterr().out


def test_wrong_usage_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["reprt"], ["report"], ["report", "x", "--htm", "y"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    capsys.readouterr()


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys\nfrom relax_profiling.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "sys.exit('orjson' in sys.modules or 'torch' in sys.modules or 'urllib.request' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0
    assert "{" not in done.stdout.split("\n")[0]
    for command in ("sglang", "report", "merge", "memory"):
        assert command in done.stdout


def test_merge_puts_all_on_one_clock(recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged.json.gz"
    assert main(["merge", str(recorded_run), "-o", str(out)]) == 0
    assert "4 traces in" in capsys.readouterr().out
    with gzip.open(out) as f:
        merged = json.load(f)
    events = merged["traceEvents"]
    sources = [load_trace(p) for p in sorted(recorded_run.rglob("*.json.gz"))]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(kernels) == sum(
        1
        for s in sources
        for g in s.gpus.values()
        for k, n in zip(g.kind, g.name, strict=True)
        if not memory_op(s, n, k)
    )
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert any(n.startswith("engine0 TP-0 rollout 2 · sglang::scheduler") for n in names.values())
    assert {e["pid"] for e in events if "pid" in e} <= set(names)
    # The ends of an all-reduce coincide on both ranks.
    ends: dict[str, list[float]] = {"rank0": [], "rank1": []}
    for e in kernels:
        if e["name"].startswith("ncclDevKernel_AllReduce"):
            ends[names[e["pid"]][:5]].append(e["ts"] + e["dur"])
    assert len(ends["rank0"]) == 4
    assert sorted(ends["rank0"]) == pytest.approx(sorted(ends["rank1"]), abs=50)
    marks = [e["name"] for e in events if e.get("cat") == "step"]
    assert any("step[DECODE bs=1]" in m for m in marks)
    assert min(e["ts"] for e in events if e.get("ph") == "X" and e.get("cat") != "Trace") == pytest.approx(0, abs=1)
    arrows = {e["id"] for e in events if e.get("cat") == "ac2g"}
    assert all(re.match(r"^[0-3]\.\d+$", a) for a in arrows)
    # It can be read again, but is no part of a run's report.
    assert build_report([tmp_path]).traces == []


def memory_op(trace: Any, name: int, kind: int) -> bool:
    return bool(trace.names[name].startswith(("Memcpy", "Memset")))


def test_merge_overwrites_nothing_and_says_what_it_left_out(
    recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(recorded_run / "train_trace", run / "train_trace")
    (run / "train_trace" / "train_actor_rank0_dp0_tp0_pp0.1.pt.trace.json.gz").write_bytes(b"")
    out = tmp_path / "m.json"
    assert main(["merge", str(run), "-o", str(out)]) == 0
    assert "train_actor_rank0_dp0_tp0_pp0.1.pt.trace.json.gz: the file is empty" in capsys.readouterr().err
    before = out.read_bytes()
    json.loads(before)
    assert main(["merge", str(run), "-o", str(out)]) == 1
    assert "exists; name another file" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert main(["merge", str(tmp_path / "absent"), "-o", str(tmp_path / "n.json")]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.json", "run"]


def test_a_kill_leaves_no_half_merged_file(recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[str] = []

    def killed(*_: Any) -> Iterator[bytes]:
        yield b"{}"
        during.extend(p.name for p in tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        yield b"{}"

    monkeypatch.setattr(merge, "_moved", killed)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        main(["merge", str(recorded_run), "-o", str(tmp_path / "merged.json")])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert len(during) == 1
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_memory_page(recorded_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (snapshot,) = (recorded_run / "memory_snapshot").glob("*pp0_snapshot.pickle")
    out = tmp_path / "page.html"
    assert main(["memory", str(snapshot), "-o", str(out)]) == 0
    page = out.read_text()
    assert "<svg" in page
    assert "peak 483.5 MiB" in page
    assert "fixed_cross_entropy" in page
    assert_self_contained(page)
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(b"")
    assert main(["memory", str(bad), "-o", str(tmp_path / "no.html")]) == 1
    assert "bad.pickle: the file is empty" in capsys.readouterr().err
    assert not (tmp_path / "no.html").exists()


def test_the_recorded_snapshots(recorded_run: Path) -> None:
    plain, oom = (
        analyse_snapshot(load_snapshot(next((recorded_run / "memory_snapshot").glob(pattern))))[0]
        for pattern in ("*pp0_snapshot.pickle", "*_oom_snapshot.pickle")
    )
    assert (plain.peak, plain.allocated, plain.oom, plain.truncated) == (507006632, 171989120, [], False)
    assert plain.curve[-1] == plain.allocated, "the replayed history ends at what the segments say"
    assert sum(h.bytes for h in plain.peak_holders) == plain.peak
    (error,) = oom.oom
    assert (error.asked, error.device_free) == (8589934592, 2144403456)
    assert error.stack == ("<module> (/srv/example/make_fixtures.py:26)",)
    assert oom.held[0].bytes == 17 * 8589934592
    assert growth(plain, oom)[0].grown == 17 * 8589934592


def test_a_history_that_begins_late_still_has_the_right_height(make_snapshot: Any) -> None:
    import pickle

    path = make_snapshot("a_snapshot.pickle", [(100, [("f", "/x.py", 1)]), (200, [("g", "/x.py", 2)])])
    data = pickle.loads(path.read_bytes())
    # The ring buffer lost the first allocation, and a block that was freed had been allocated before it too.
    freed = {"action": "free_completed", "addr": 77, "size": 1000, "time_us": 1, "frames": []}
    data["device_traces"][0][:1] = [freed]
    (device,) = analyse_snapshot(data)
    assert device.curve == [100, 300]
    assert (device.peak, device.truncated) == (1100, True)
    assert device.peak_holders[0].place == "(allocated before the recording began)"


def test_no_peak_is_lost_in_the_picture() -> None:
    times = [i / 1000 for i in range(100_000)]
    values = [5] * 100_000
    values[54_321] = 9
    points = downsample(times, values)
    assert len(points) <= 1800
    assert max(v for _, v in points) == 9


def assert_self_contained(page: str) -> None:
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", page), "nothing is loaded from elsewhere"
    assert "@import" not in page
    assert "url(" not in page


def test_names_in_traces_cannot_become_html(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker(deviceProperties=[{"name": "<script>alert(1)</script>"}])
    for i in range(60):
        t.kernel(100 * i, 50, '<img src=x onerror="alert(1)">')
    t.collective(9000, 10, "<b>", "<i>")
    folder = tmp_path / "train_trace"
    t.write(folder / "train_overall_rank0_dp0_tp0_pp0.1.pt.trace.json.gz")
    page = to_html(build_report([tmp_path]))
    assert "<script>" not in page
    assert "<img" not in page
    assert "<b>&lt;" not in page
    assert "&lt;img src=x" in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_in_a_browser(recorded_run: Path, tmp_path: Path, width: int) -> None:
    """Rendered at this width, nothing sticks out to the side, and every section is there."""
    page = to_html(build_report([recorded_run]))
    assert_self_contained(page)
    measure = (
        f"<body><iframe id=f width={width} height=900 style='border:0'></iframe><script>"
        "const f=document.getElementById('f');f.onload=()=>{const d=f.contentDocument;"
        "d.querySelectorAll('details').forEach(x=>x.open=true);"
        "const out=[...d.querySelectorAll('body *')].filter(e=>!e.closest('.scroll,.bar')&&"
        f"e.getBoundingClientRect().right>{width}+1).length;"
        "document.title=JSON.stringify({scroll:d.documentElement.scrollWidth,out,"
        "height:d.documentElement.scrollHeight,heads:[...d.querySelectorAll('h2')].map(h=>h.textContent)})};"
        "f.srcdoc=JSON.parse(document.getElementById('page').textContent)</script>"
    )
    payload = json.dumps(page).replace("<", "\\u003c")
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"<!doctype html><script type=application/json id=page>{payload}</script>{measure}")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", wrapper.as_uri()]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-500:]
    seen = json.loads(title.group(1).replace("&quot;", '"'))
    assert seen["heads"] == ["What to change", "Training", "Engines", "Memory"]
    assert seen["scroll"] <= width
    assert seen["out"] == 0
    assert seen["height"] > 1000


def test_a_page_never_replaces_what_it_is_made_of(
    tmp_path: Path, trace_maker: Any, make_snapshot: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    t = trace_maker()
    t.kernel(0, 10)
    trace = t.write(tmp_path / "t.json")
    snapshot = make_snapshot("s.pickle", [(1024, [("f", "a.py", 1)])])
    link = tmp_path / "link.html"
    link.symlink_to(snapshot)
    before = trace.read_bytes(), snapshot.read_bytes()
    assert main(["report", str(tmp_path), "--html", str(trace)]) == 2
    assert main(["memory", str(snapshot), "-o", str(snapshot)]) == 2
    assert main(["memory", str(snapshot), "-o", str(link)]) == 2
    assert capsys.readouterr().err.count("is one of the recordings that are read") == 3
    assert (trace.read_bytes(), snapshot.read_bytes()) == before
