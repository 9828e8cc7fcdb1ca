"""Damaged and hostile files: each is named, what can be read is read, and the others are read too."""

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import orjson
import pytest
from relax_profiling.cli import main
from relax_profiling.report.build import build_report
from relax_profiling.snapshot.unpickle import NotASnapshot, load_snapshot
from relax_profiling.trace import load as load_module
from relax_profiling.trace import reader as reader_module
from relax_profiling.trace.load import load_trace
from relax_profiling.trace.reader import NotATrace, TraceReader


def read(path: Path) -> tuple[list[str], list[str]]:
    """Names of the events, and the problems."""
    reader = TraceReader(path)
    names = [e.get("name", "?") for events in reader.chunks() for e in events]
    return names, reader.problems


def kineto_text(names: list[str], after: str = '],\n"traceName": "x"}') -> str:
    """Events in the layout of torch's own writer."""
    events = ",\n".join(
        f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 1, "tid": 1,\n'
        f'    "ts": {i}.5, "dur": 1.25,\n    "args": {{\n      "External id": {i}\n    }}\n  }}'
        for i, name in enumerate(names)
    )
    return (
        '{"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}],\n"traceEvents": [\n' + events + "\n" + after
    )


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader works in pieces of a kilobyte, so that small files have many boundaries."""
    monkeypatch.setattr(reader_module, "_CHUNK", 1024)
    monkeypatch.setattr(reader_module, "_COMPRESSED_PIECE", 300)
    monkeypatch.setattr(reader_module, "_BOUNDARY_WINDOW", 400)


NAMES = [f"op{i}" for i in range(60)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("packed", [False, True])
def test_whole_files_piece_by_piece(tmp_path: Path, packed: bool) -> None:
    text = kineto_text(NAMES).encode()
    path = tmp_path / "t.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    reader = TraceReader(path)
    pieces = list(reader.chunks())
    assert len(pieces) >= 3
    assert [e["name"] for events in pieces for e in events] == NAMES
    assert reader.problems == []
    assert reader.meta == {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], "traceName": "x"}


@pytest.mark.usefixtures("small_pieces")
def test_the_layout_of_the_text_does_not_matter(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": n, "args": {"list": [{"a": 1}, {"b": "}, {"}]}} for n in NAMES]
    for i, text in enumerate(
        (
            json.dumps({"traceEvents": events, "last": [{"x": 1}, {"y": 2}]}),
            json.dumps({"traceEvents": events}, indent=1),
            json.dumps(events),
        )
    ):
        path = tmp_path / f"{i}.json"
        path.write_text(text)
        names, problems = read(path)
        assert names == NAMES
        assert problems == []


def test_gzip_in_several_members(tmp_path: Path) -> None:
    text = kineto_text(NAMES).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(text[:700]) + gzip.compress(text[700:]))
    assert read(path) == (NAMES, [])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("share", [0.5, 0.8, 0.99])
def test_a_truncated_gz_gives_what_is_there(tmp_path: Path, share: float) -> None:
    packed = gzip.compress(kineto_text(NAMES).encode())
    path = tmp_path / "t.json.gz"
    path.write_bytes(packed[: int(len(packed) * share)])
    names, problems = read(path)
    assert names == NAMES[: len(names)]
    assert 5 < len(names) <= 60
    assert "compressed data is cut off; read up to there" in problems


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("cut", range(1, 160, 7))
def test_text_cut_anywhere_gives_the_complete_events(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.json"
    path.write_text(kineto_text(NAMES)[: -cut - 20])
    names, problems = read(path)
    assert names == NAMES[: len(names)]
    assert len(names) >= 57
    assert problems == ["the list of events is cut off; read up to there"]


def test_damage_inside_compressed_data(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(os.urandom(3000).hex().encode() + kineto_text(NAMES).encode()))
    packed[1500] ^= 0xFF
    path = tmp_path / "t.json.gz"
    path.write_bytes(bytes(packed))
    with pytest.raises(NotATrace, match=r"t\.json\.gz"):
        read(path)


@pytest.mark.usefixtures("small_pieces")
def test_nan_and_infinity_cost_their_events_only(tmp_path: Path) -> None:
    text = kineto_text(NAMES).replace('"ts": 7.5', '"ts": NaN').replace('"dur": 1.25', '"dur": Infinity', 1)
    path = tmp_path / "t.json"
    path.write_text(text)
    assert read(path) == (NAMES, [])
    trace = load_trace(path)
    assert sum(len(c.start) for c in trace.threads.values()) == 58
    assert trace.problems == ["2 events have missing or impossible fields and are left out"]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("name", "readable"),
    [
        ("a\tb", True),
        ("C:\\path", True),
        ("line\nbreak", True),
        ('say "aloud"', False),
        ("bad \udce9 byte", True),
    ],
)
def test_unescaped_names_cost_at_most_their_event(tmp_path: Path, name: str, readable: bool) -> None:
    text = kineto_text(NAMES).replace('"op30"', f'"{name}"')
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    names, problems = read(path)
    assert [n for n in names if n in NAMES] == [n for n in NAMES if n != "op30"]
    assert len(names) == (60 if readable else 59)
    assert problems == ([] if readable else ["1 events could not be read and are left out"])


def test_what_is_no_text_can_be_reported_all_the_same(
    tmp_path: Path, trace_maker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of a surrogate pair in a kernel's name, and a byte that is no UTF-8 in the file's name."""
    t = trace_maker()
    for i in range(60):
        t.kernel(10 * i, 5, "half\ud83d")
    t.kernel(600, 5, "whole\U0001f600")
    path = t.write(tmp_path / "plain.json")
    assert b"\\ud83d" in path.read_bytes()
    path = path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/t\xe9.json"))
    for arguments in (["report"], ["report", "--json"], ["report", "--html", str(tmp_path / "r.html")]):
        assert main([*arguments, str(path)]) == 0
        out = capsys.readouterr().out
        assert "half\ufffd" in out or "half\\ufffd" in out
    assert "half\ufffd" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert main(["merge", str(path), "-o", str(tmp_path / "merged.json")]) == 0
    names = {e["name"] for e in json.loads((tmp_path / "merged.json").read_text())["traceEvents"]}
    assert {"half\ufffd", "whole\U0001f600"} <= names


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"   \n", 'holds no "traceEvents"'),
        (gzip.compress(b""), "the file is empty"),
        (gzip.compress(b"x" * 99)[:12], "holds no"),
        (b"\x00\x01\x02", 'holds no "traceEvents"'),
        (b'{"hello": 1}', 'holds no "traceEvents"'),
        (b'{"traceEvents": []}', "holds no events"),
        (b"[]", "holds no events"),
        (b'{"traceEvents": [1, 2, "three", null]}', "holds no events"),
        (b"<html>502 Bad Gateway</html>", 'holds no "traceEvents"'),
    ],
)
def test_files_that_are_no_traces_say_so(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(NotATrace, match=said) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


def test_fields_of_any_kind_cost_their_events_only(tmp_path: Path, trace_maker: Any) -> None:
    t = trace_maker()
    t.kernel(0, 10)
    t.events += [
        {"ph": "X", "cat": "kernel", "name": 5, "ts": 1, "dur": 1, "args": {}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "soon", "dur": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": -4},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"correlation": "x"}},
        # All events of a device of its own.
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "args": {"correlation": 2**63, "device": 7}},
        {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": ["a"], "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "x", "ts": 1, "dur": 1, "args": {"correlation": [1]}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1, "args": {"Input Dims": {"a": 1}}},
        {"cat": ["strange"], "ts": 1},
    ]
    path = t.write(tmp_path / "train_overall_rank0_dp0_tp0_pp0.1.pt.trace.json.gz")
    report = build_report([path])
    assert len(report.traces) == 1
    assert report.traces[0].breakdown.span == 10
    assert len(report.problems) == 1
    assert "events have missing or impossible fields" in report.problems[0]


def test_events_read_one_by_one_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage anywhere in a piece makes all of its events dictionaries; nothing else of them may change."""
    path = next((Path(__file__).parent / "data" / "train_trace").iterdir())
    fast = load_trace(path)

    def refuse(text: bytes) -> Any:
        raise ValueError("damaged")

    monkeypatch.setattr(load_module, "read_fields", refuse)
    slow = load_trace(path)
    assert (slow.names, slow.launches, slow.spans) == (fast.names, fast.launches, fast.spans)
    assert (slow.collectives, slow.flops, slow.allocated) == (fast.collectives, fast.flops, fast.allocated)
    assert (slow.processes, slow.problems, slow.meta) == (fast.processes, fast.problems, fast.meta)
    assert all((fast.flops, fast.collectives, fast.spans, fast.processes))
    for mine, other in ((slow.gpus, fast.gpus), (slow.threads, fast.threads)):
        assert {k: vars(v) for k, v in mine.items()} == {k: vars(v) for k, v in other.items()}


def event(fields: str) -> str:
    return '{"traceEvents": [EVENTS, {"ph": "X", "ts": 1, "dur": 1, ' + fields + "}]}"


DAMAGE = {
    "huge base time": '{"baseTimeNanoseconds": HUGE, "traceEvents": [EVENTS]}',
    "no number for a base time": '{"baseTimeNanoseconds": NaN, "traceEvents": [EVENTS]}',
    "types that are no list": event(
        '"cat": "cpu_op", "name": "aten::mm", "args": {"Input Dims": [[2, 2], [2, 2]], "Input type": {"a": 1}}'
    ),
    "huge shapes": event('"cat": "cpu_op", "name": "aten::mm", "args": {"Input Dims": [[1e300, 2], [2, 1e300]]}'),
    "huge batch": event('"cat": "user_annotation", "name": "step[DECODE bs=HUGE]"'),
    "batch of more digits than Python reads": event(
        '"cat": "user_annotation", "name": "step[DECODE bs=DIGITS toks=5]"'
    ),
    "huge memory": event(
        '"cat": "cpu_instant_event", "name": "[memory]", "args": {"Device Type": 1, "Device Id": 0, '
        '"Total Allocated": HUGE}'
    ),
    "huge time": '{"traceEvents": [EVENTS, {"ph": "X", "cat": "kernel", "name": "a\\q", "pid": 0, "ts": HUGE}]}',
    "deep lists behind a stray backslash": event('"name": "a\\q", "args": ' + "[" * 9000 + "]" * 9000),
    "lists too deep to be written": event('"cat": "cpu_op", "name": "k", "x": ' + "[" * 500 + "]" * 500),
    "integers too large to be written": event('"name": "a\\q", "x": HUGE'),
    "a name of no process": '{"traceEvents": [EVENTS, {"ph": "M", "name": "process_name", "args": {"name": "x"}}]}',
}


@pytest.mark.parametrize("filler", [" ", "x"])
def test_an_event_without_end_is_read_up_to_a_limit(
    tmp_path: Path, trace_maker: Any, monkeypatch: pytest.MonkeyPatch, filler: str
) -> None:
    """A small compressed file may unpack to more than the memory holds."""
    monkeypatch.setattr(reader_module, "_MAX_EVENT", 4 << 20)
    t = trace_maker()
    t.kernel(0, 10)
    events = ", ".join(json.dumps(e) for e in t.events)
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wt", compresslevel=1) as f:
        f.write('{"traceEvents": [' + events + ", ")
        for _ in range(16):
            f.write(filler * ((1 << 20) // len(filler)))
    names, problems = read(path)
    assert names[0] == "gemm"
    assert problems[-1] == "the list of events is cut off; read up to there"
    assert problems[0] == "an event is longer than 4 MiB"


def test_long_events_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    class Counting:
        def finditer(self, text: bytes, start: int = 0) -> Any:
            searched.append(len(text) - start)
            return between.finditer(text, start)

        def split(self, text: bytes) -> list[bytes]:
            return between.split(text)

    between = reader_module._BETWEEN
    monkeypatch.setattr(reader_module, "_BETWEEN", Counting())
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "a"}, {"name": "' + "x" * (3 << 20) + '"}, {"name": "c"}]}')
    names, problems = read(path)
    assert [n[:1] for n in names] == ["a", "x", "c"]
    assert problems == []
    assert sum(searched) < 4 * (3 << 20)


@pytest.mark.parametrize("damage", DAMAGE)
def test_numbers_and_lists_beyond_measure_cost_their_event_only(
    tmp_path: Path, trace_maker: Any, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    t = trace_maker()
    t.operator(-5, 2, "aten::add")
    t.kernel(0, 10)
    t.kernel(20, 10)
    events = ", ".join(json.dumps(e) for e in t.events)
    path = tmp_path / "engine0-1713780123-TP-0.trace.json"
    text = DAMAGE[damage].replace("HUGE", "1" + "0" * 400).replace("DIGITS", "9" * 5000)
    path.write_text(text.replace("EVENTS", events))
    for arguments in (["report"], ["report", "--json"], ["report", "--html", str(tmp_path / "r.html")]):
        assert main([*arguments, str(path)]) == 0
    assert "idle 33.3%" in capsys.readouterr().out
    assert main(["merge", str(path), "-o", str(tmp_path / "merged.json")]) == 0
    merged = orjson.loads((tmp_path / "merged.json").read_bytes())["traceEvents"]
    assert [e["name"] for e in merged if e.get("cat") == "kernel"][:2] == ["gemm", "gemm"]


def test_a_trace_without_length_is_reported(
    tmp_path: Path, trace_maker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    t = trace_maker()
    t.operator(5, 0, "aten::add")
    assert main(["report", str(t.write(tmp_path / "t.json"))]) == 0
    assert "idle 0.0%" in capsys.readouterr().out


def snapshot(**changed: Any) -> dict[str, Any]:
    block = {"size": 10, "state": "active_allocated", "frames": changed.get("frames", [])}
    segment = {"device": changed.get("device", 0), "total_size": changed.get("total_size", 10), "blocks": [block]}
    event = {"action": changed.get("action", "alloc"), "addr": 1, "size": changed.get("size", 5), "frames": []}
    return {
        "segments": [segment],
        "device_traces": [[{**event, "time_us": 1}, {**event, "time_us": changed.get("time_us", 2)}]],
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"time_us": 10**400},
        {"time_us": float("nan")},
        {"size": 10**400},
        {"size": float("inf"), "action": "oom"},
        {"total_size": 10**400},
        {"device": float("inf")},
        {"size": "5"},
    ],
)
def test_numbers_of_a_snapshot_that_cannot_be_meant(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot(**changed)))
    report = build_report([path])
    assert report.memory == []
    (problem,) = report.problems
    assert str(path) in problem
    assert "no number, or one too large" in problem


def test_frames_of_lists_in_lists_are_not_written_out(tmp_path: Path) -> None:
    """A few hundred bytes of pickle that are gigabytes as text."""
    many: Any = ["x"]
    for _ in range(12):
        many = [many] * 10
    frames = [{"filename": many, "name": many, "line": many}, {"filename": "a.py", "name": "f", "line": 3}]
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(snapshot(frames=frames)))
    (memory,) = build_report([path]).memory
    assert memory.devices[0].held[0].stack == ("? (?:0)", "f (a.py:3)")


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch " + str(Bomb.mark),)

    mark: Path


def test_a_pickle_with_code_runs_none(tmp_path: Path) -> None:
    Bomb.mark = tmp_path / "it-ran"
    for i, content in enumerate((Bomb(), {"segments": [Bomb()], "device_traces": []}, {"segments": [], "x": Path()})):
        path = tmp_path / f"{i}_snapshot.pickle"
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(NotASnapshot, match=f"{i}_snapshot.pickle: not read, because it asks for"):
            load_snapshot(path)
    assert not Bomb.mark.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the file is empty"),
        (b"\x80\x05", "cut off"),
        (b"hello", "s.pickle"),
        (pickle.dumps([1, 2]), "not of a memory snapshot"),
        (pickle.dumps({"segments": 3}), "not of a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": 7}), "not of a memory snapshot"),
        (pickle.dumps({"segments": [{}]}), "fields are missing"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]}), "fields are missing"),
        (pickle.dumps({"segments": ["x"]}), "fields are missing"),
        (b"\x80\x04\x8c\x05abcdeQ.", "refers to objects outside"),
        (b"(((((((((((((((((((.", "s.pickle"),
    ],
)
def test_pickles_that_are_no_snapshots_are_problems(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    report = build_report([path])
    assert report.memory == []
    (problem,) = report.problems
    assert said in problem
    assert str(path) in problem


def test_a_folder_of_mixed_runs_with_bad_files_among_them(recorded_run: Path, tmp_path: Path, trace_maker: Any) -> None:
    good = sorted((recorded_run / "train_trace").iterdir())[0].read_bytes()
    for run in ("first", "second"):
        folder = tmp_path / run / "train_trace"
        folder.mkdir(parents=True)
        (folder / "train_overall_rank0_dp0_tp0_pp0.1795957371.pt.trace.json.gz").write_bytes(good)
        (folder / "train_overall_rank1_dp1_tp0_pp0.1795957371.pt.trace.json.gz").write_bytes(good[:-9000])
        (folder / "train_overall_rank2_dp2_tp0_pp0.1795957371.pt.trace.json.gz").write_bytes(b"")
    (tmp_path / "first" / "memory_snapshot").mkdir()
    (tmp_path / "first" / "memory_snapshot" / "x_snapshot.pickle").write_bytes(b"")
    (tmp_path / "readme.txt").write_text("notes")
    report = build_report([tmp_path])
    assert [(Path(t.run).name, t.label[:5]) for t in report.traces] == [
        ("first", "rank0"),
        ("first", "rank1"),
        ("second", "rank0"),
        ("second", "rank1"),
    ]
    said = "\n".join(report.problems)
    assert said.count("rank2_dp2_tp0_pp0") == 2
    assert said.count("cut off") >= 2
    assert "x_snapshot.pickle: the file is empty" in said
    waits = [t.waits for t in report.traces]
    assert all(w is not None and w.waits == 0 for w in waits), "runs are compared within themselves only"


def test_a_trace_without_gpu_events_and_one_without_anything(tmp_path: Path, trace_maker: Any) -> None:
    host, nothing = trace_maker(), trace_maker()
    host.operator(0, 10, "aten::add")
    nothing.span(0, 10, "train_overall#0")
    host.write(tmp_path / "train_overall_rank0_dp0_tp0_pp0.1.pt.trace.json.gz")
    nothing.write(tmp_path / "train_overall_rank1_dp1_tp0_pp0.1.pt.trace.json.gz")
    report = build_report([tmp_path])
    assert [(t.device, t.breakdown.on_device) for t in report.traces] == [("CPU", False)]
    assert "rank1_dp1_tp0_pp0.1.pt.trace.json.gz: holds neither device activities nor operators" in report.problems[0]


def test_nothing_at_all(tmp_path: Path) -> None:
    report = build_report([tmp_path])
    assert report.problems == [f"no traces, no memory recordings and no runs under {tmp_path}"]


def test_what_is_no_file_is_named_and_the_others_are_read(tmp_path: Path, trace_maker: Any) -> None:
    t = trace_maker()
    t.kernel(0, 10)
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    paths = [Path("a" * 300), tmp_path / "pipe.json", tmp_path / "loop.json", t.write(tmp_path / "t.json")]
    report = build_report(paths)
    assert len(report.traces) == 1
    assert [p.split(": ")[1] for p in report.problems] == [
        "File name too long",
        "no regular file (a pipe, socket or device)",
        "there is no such file or folder",
    ]
