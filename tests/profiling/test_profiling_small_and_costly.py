"""Small traces that unpack to much, damage everywhere, and clocks that nothing can align."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from relax_profiling.report.build import build_report
from relax_profiling.trace import reader as reader_module
from relax_profiling.trace.load import load_trace
from relax_profiling.trace.merge import merge_traces
from relax_profiling.trace.reader import TraceReader

MIB = 1 << 20
EVENT = b'{"ph":"X","cat":"cpu_op","name":"a","pid":1,"tid":1,"ts":1,"dur":1}'
TAIL = b', "deviceProperties": [{"id": 0}, {"id": 1}], "baseTimeNanoseconds": 5000, "x": [{"a": 1}]}'


@pytest.fixture
def traced() -> Iterator[Any]:
    """The most memory that was in use since the test began, in bytes."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("repeated", "count"),
    [
        (b"{},", 8 * MIB // 3),  # very many events
        (b"[],", 24 * MIB // 3),  # one event, with a list of lists
        (b"{", 24 * MIB),  # one event without end
    ],
)
def test_what_a_small_file_unpacks_to_is_never_all_in_memory(
    tmp_path: Path, traced: Any, repeated: bytes, count: int
) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wb", compresslevel=6) as f:
        f.write(b'{"traceEvents": [' + EVENT + b"," + (b"" if repeated == b"{}," else b'{"name": "b", "args": ['))
        f.write(repeated * count)
        f.write(EVENT + b"]}")
    assert path.stat().st_size < MIB // 10
    trace = load_trace(path)
    assert len(trace.threads[1].start) >= 1
    assert traced() < 160 * MIB


def test_a_merge_keeps_no_piece_of_text_for_every_event(tmp_path: Path, traced: Any) -> None:
    """The pieces were few bytes long and took a kilobyte each."""
    path = tmp_path / "t.json"
    path.write_bytes(b"[" + EVENT + b"".join(b',{"ph":"M","pid":%d}' % i for i in range(40_000)) + b"]")
    assert path.stat().st_size < MIB
    merge_traces([path], tmp_path / "merged.json")
    assert traced() < 160 * MIB
    assert len(json.loads((tmp_path / "merged.json").read_bytes())["traceEvents"]) == 80_001


class Loads:
    """``orjson`` or ``json``, whose calls of ``loads`` are counted."""

    def __init__(self, module: Any) -> None:
        self._module, self.calls = module, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def loads(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self._module.loads(*arguments, **options)


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"name": "say "aloud"", "args": {"a": [{"b": 1}, {"c": 2}]}}',
        b'{"name": "a", "args": {"b": 1}',
        b'{"name": "a, "args": {"a": [{"b": 1}, {"c": 2}]}}',
    ],
)
def test_an_event_that_cannot_be_read_is_tried_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes
) -> None:
    counted = [Loads(orjson), Loads(json)]
    monkeypatch.setattr(reader_module, "orjson", counted[0])
    monkeypatch.setattr(reader_module, "json", counted[1])
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [' + EVENT + (b"," + damaged) * 2000 + b"," + EVENT + b"]" + TAIL)
    reader = TraceReader(path)
    names = [e.get("name") for events in reader.chunks() for e in events]
    assert names[0] == names[-1] == "a"
    assert reader.problems
    pieces = 2000 * (damaged.count(b"}, {") + 1)
    assert sum(c.calls for c in counted) < 3 * pieces
    assert reader.meta["baseTimeNanoseconds"] == 5000


def test_nothing_more_is_read_after_very_many_damaged_events_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_MOST_IN_A_ROW", 1000)
    monkeypatch.setattr(reader_module, "_CHUNK", 4096)
    path = tmp_path / "t.json"
    broken = b'{"name": "say "aloud""},'
    path.write_bytes(b'{"traceEvents": [' + (broken * 900 + EVENT + b",") * 5 + broken * 30_000 + EVENT + b"]}")
    reader = TraceReader(path)
    names = [e["name"] for events in reader.chunks() for e in events]
    assert names == ["a"] * 5
    assert any("events in a row could not be read" in p for p in reader.problems)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_fields_after_the_events_survive_damage_among_them(tmp_path: Path, share: float) -> None:
    events = [EVENT] * 50
    events[int(share * 50)] = b'{"name": "say "aloud"", "args": [{"a": 1}], "b": {"c": 1}}'
    path = tmp_path / "t.json"
    path.write_bytes(b'{"schemaVersion": 1, "traceEvents": [' + b",".join(events) + b"]" + TAIL)
    trace = load_trace(path)
    assert trace.meta == {"schemaVersion": 1, **json.loads(b"{" + TAIL[1:])}
    assert len(trace.threads[1].start) == 49
    assert trace.problems == ["1 events could not be read and are left out"]


def write_ranks(trace_maker: Any, folder: Path, starts: dict[int, list[float]], marks: bool) -> None:
    """A trace of 1 ms for every start (seconds) of a rank, with the collectives of its step."""
    for rank, times in starts.items():
        for number, start in enumerate(times):
            t = trace_maker(baseTimeNanoseconds=1_790_000_000_000_000_000 + int(start * 1e9))
            for i in range(4):
                t.collective(250.0 * i, 200 - 50 * rank)
            t.operator(0, 10, "aten::add")
            if marks:
                t.span(0, 1000, f"train_overall#{number}")
            t.write(folder / "train_trace" / f"train_overall_rank{rank}_dp{rank}_tp0_pp0.{1790000000 + number}.json")


@pytest.mark.parametrize("marks", [False, True])
def test_clocks_further_apart_than_a_recording_are_told_and_not_compared(
    tmp_path: Path, trace_maker: Any, marks: bool
) -> None:
    write_ranks(trace_maker, tmp_path, {0: [0.0, 60.0], 1: [3600.0, 3660.0]}, marks)
    report = build_report([tmp_path])
    assert all(t.waits is None for t in report.traces)
    assert len(report.problems) == 2
    assert all(
        "rank1_dp1_tp0_pp0 begins 3600.000 s after rank0_dp0_tp0_pp0" in p and "not compared" in p
        for p in report.problems
    )
    _, problems = merge_traces([tmp_path], tmp_path / "merged.json")
    assert problems == report.problems


def test_a_clock_that_is_ahead_by_the_time_between_two_steps_pairs_no_wrong_steps(
    tmp_path: Path, trace_maker: Any
) -> None:
    """Rank 1's first step then lies on rank 0's second one."""
    write_ranks(trace_maker, tmp_path, {0: [0.0, 60.0], 1: [60.0, 120.0]}, marks=True)
    report = build_report([tmp_path])
    assert all(t.waits is None for t in report.traces)
    assert len(report.problems) == 2


def test_recordings_of_one_rank_are_not_moved_onto_each_other(tmp_path: Path, trace_maker: Any) -> None:
    write_ranks(trace_maker, tmp_path, {0: [0.0, 60.0], 1: [0.0, 60.0]}, marks=True)
    report = build_report([tmp_path])
    assert report.problems == []
    assert all(t.waits is not None and t.waits.collectives == 4 for t in report.traces)
    _, problems = merge_traces([tmp_path], tmp_path / "merged.json")
    assert problems == []
    merged = json.loads((tmp_path / "merged.json").read_bytes())["traceEvents"]
    steps = [e["ts"] for e in merged if e.get("cat") == "user_annotation"]
    assert max(steps) - min(steps) == pytest.approx(60e6)
