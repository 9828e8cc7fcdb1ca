"""Names of traces: as documented, and never used twice."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.recorders.trace_files import (
    RankTag,
    TraceLayout,
    claim_staging,
    memory_snapshot_name,
    partial_path,
    publish,
    training_trace_name,
)
from relax_profiling.report.find_files import describe, find_files

TAG = RankTag(3, dp=1, tp=1, pp=0)


def write_partial(folder: Path, content: str) -> Path:
    path = partial_path(folder)
    path.write_text(content)
    return path


def test_names_are_those_of_the_documentation() -> None:
    assert training_trace_name("train_actor", TAG, 1713780123) == (
        "train_actor_rank3_dp1_tp1_pp0.1713780123.pt.trace.json.gz"
    )
    assert memory_snapshot_name(TAG, 1713780123, "snapshot.pickle") == (
        "memory_snapshot_time1713780123_rank3_dp1_tp1_pp0_snapshot.pickle"
    )
    layout = TraceLayout(Path("traces/run"))
    assert layout.rollout(2) == Path("traces/run/sglang_trace/rollout_2")
    assert layout.train == Path("traces/run/train_trace")
    assert layout.memory == Path("traces/run/memory_snapshot")


def test_a_tag_survives_its_name() -> None:
    assert RankTag.parse(training_trace_name("train_overall", TAG, 5)) == TAG
    assert RankTag.parse("nothing.json") is None


def test_a_second_file_in_one_second_gets_a_higher_number(tmp_path: Path, frozen_clock: Any) -> None:
    paths = [
        publish(write_partial(tmp_path, str(i)), tmp_path, lambda t: training_trace_name("a", TAG, t), frozen_clock)
        for i in range(3)
    ]
    assert [p.name.split(".")[1] for p in paths] == ["1713780123", "1713780124", "1713780125"]
    assert [p.read_text() for p in paths] == ["0", "1", "2"]
    assert sorted(tmp_path.iterdir()) == sorted(paths), "nothing unfinished is left"


PUBLISH_MANY = """
import sys
from pathlib import Path
from relax_profiling.recorders.trace_files import partial_path, publish
base = Path(sys.argv[1])
for i in range(25):
    partial = partial_path(base)
    partial.write_text(f"{sys.argv[2]} {i}")
    print(publish(partial, base, lambda t: f"f.{t}", lambda: 1713780123.0))
"""


def test_two_processes_with_one_rank_label_never_overwrite_each_other(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", PUBLISH_MANY, str(tmp_path), str(who)] for who in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    paths = [line for process in running for line in process.communicate(timeout=300)[0].split()]
    assert len(set(paths)) == 50
    written = sorted(Path(p).read_text() for p in paths)
    assert written == sorted(f"{who} {i}" for who in range(2) for i in range(25))


def test_a_file_system_without_hard_links(tmp_path: Path, frozen_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    first = publish(write_partial(tmp_path, "1"), tmp_path, lambda t: f"f.{t}", frozen_clock)
    second = publish(write_partial(tmp_path, "2"), tmp_path, lambda t: f"f.{t}", frozen_clock)
    assert (first.read_text(), second.read_text()) == ("1", "2")
    assert len(list(tmp_path.iterdir())) == 2


def test_staging_reserves_a_second_for_each_engine(tmp_path: Path, frozen_clock: Any) -> None:
    first = claim_staging(tmp_path, 0, frozen_clock)
    other_engine = claim_staging(tmp_path, 1, frozen_clock)
    again = claim_staging(tmp_path, 0, frozen_clock)
    assert (first.prefix, other_engine.prefix, again.prefix) == (
        "engine0-1713780123",
        "engine1-1713780123",
        "engine0-1713780124",
    )
    # Its folder is gone, its files are there: the second stays taken.
    (tmp_path / "engine0-1713780123-TP-0.trace.json.gz").touch()
    first.path.rmdir()
    assert claim_staging(tmp_path, 0, frozen_clock).stamp == 1713780125


@pytest.mark.parametrize(
    ("name", "role", "label"),
    [
        ("sglang_trace/rollout_7/engine0-1713780123-TP-0.trace.json.gz", "engine", "engine0 TP-0"),
        (
            "sglang_trace/rollout_7/engine12-1713780123-TP-1-DP-0-DECODE.trace.json.gz",
            "engine",
            "engine12 TP-1-DP-0 DECODE",
        ),
        ("train_trace/train_overall_rank1_dp1_tp0_pp0.1713780123.pt.trace.json.gz", "train", "rank1_dp1_tp0_pp0"),
        (
            "memory_snapshot/memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.pickle",
            "snapshot",
            "rank0_dp0_tp0_pp0",
        ),
        (
            "memory_snapshot/memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.bin",
            "memray",
            "rank0_dp0_tp0_pp0",
        ),
        ("1713780123.25-TP-0.trace.json.gz", "engine", "TP-0"),
        ("host_4711.1713780123.pt.trace.json", "trace", "host_4711.1713780123.pt.trace.json"),
    ],
)
def test_files_are_known_by_their_names(tmp_path: Path, name: str, role: str, label: str) -> None:
    found = describe(tmp_path / name)
    assert found is not None
    assert (found.role, found.label) == (role, label)
    assert found.rollout == (7 if "rollout_7" in name else None)
    assert found.stamp in (1713780123, 0)
    if "/" in name:
        assert found.run == tmp_path


def test_what_is_ours_is_found_and_what_is_left_behind_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "sglang_trace" / "rollout_0"
    folder.mkdir(parents=True)
    (folder / "engine0-1713780123-TP-0.trace.json.gz").touch()
    (folder / ".engine1-1713780123.partial").mkdir()
    (folder / ".engine1-1713780123.partial" / "1713780123-TP-0.trace.json.gz").touch()
    (tmp_path / "merged.json.gz").touch()
    (tmp_path / "notes.txt").touch()
    found, problems = find_files([tmp_path, tmp_path / "absent", tmp_path / "notes.txt"])
    assert [f.label for f in found] == ["engine0 TP-0"]
    assert len(problems) == 3
    assert "left behind" in problems[0]
    assert "absent: there is no such file" in problems[1]
    assert "notes.txt: neither a trace" in problems[2]
