"""Memory snapshots that ask for more than they hold, and what a snapshot says of errors and of older blocks."""

import gzip
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.report.build import build_report
from relax_profiling.snapshot.analyse import BEFORE, NO_FRAME, analyse_snapshot
from relax_profiling.snapshot.unpickle import NotASnapshot, load_snapshot

DATA = Path(__file__).parent / "data" / "memory_snapshot"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_snapshots_of_torch_pass_the_look_at_their_opcodes(tmp_path: Path, protocol: int) -> None:
    for packed in DATA.glob("*.gz"):
        snapshot = load_snapshot(packed)
        assert analyse_snapshot(snapshot)[0].peak > 0
        path = tmp_path / "s.pickle"
        path.write_bytes(pickle.dumps(snapshot, protocol))
        assert load_snapshot(path) == snapshot


NESTED = b"(t" + b"\x85" * 1_000_000
SHARED = b"]q\x00" + b"".join(b"(h%ch%ct" % (i, i) + b"q%c" % (i + 1) for i in range(100))
SMALL_AND_EXPENSIVE = {
    "an entry of the memo far away": (b"\x80\x04}r\xff\xff\xff\x7f.", "entry 2147483647 of its memo"),
    "and in text": (b"}p2147483647\n.", "entry 2147483647 of its memo"),
    "a frame beyond the file": (b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"}.", "cut off"),
    "a text beyond the file": (b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"}.", "cut off"),
    "a number beyond the file": (b"\x80\x04\x8b" + (1 << 30).to_bytes(4, "little") + b"}.", "cut off"),
    "lists of nothing": (b"(" + b"]" * 1_000_000 + b"l.", "empty lists"),
    "a deep key": (b"\x80\x04}" + NESTED + b"Ns.", "tuple of something else"),
    "a key that is shared in itself": (b"\x80\x04}" + SHARED + b"Ns.", "tuple of something else"),
    "copies": (b"\x80\x04](" + b"}2" * 100 + b"e.", "none of a memory snapshot"),
}


@pytest.mark.parametrize("name", SMALL_AND_EXPENSIVE)
def test_a_small_pickle_never_costs_much_memory(tmp_path: Path, name: str) -> None:
    content, said = SMALL_AND_EXPENSIVE[name]
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(NotASnapshot, match=said):
            load_snapshot(path)
        assert tracemalloc.get_traced_memory()[1] < (4 << 20) + 100 * len(content)
    finally:
        tracemalloc.stop()


def test_a_compressed_snapshot_is_read_and_one_that_is_cut_is_named(recorded_run: Path, tmp_path: Path) -> None:
    packed = sorted(DATA.glob("*.gz"))
    report = build_report(packed)
    assert report.problems == []
    plain = build_report(sorted((recorded_run / "memory_snapshot").iterdir()))
    assert [m.devices for m in report.memory] == [m.devices for m in plain.memory]
    assert [m.label for m in report.memory] == [m.label for m in plain.memory]
    content = packed[0].read_bytes()
    for name, damaged in (("cut", content[:-2000]), ("bomb", gzip.compress(b"\0" * (1 << 25)))):
        path = tmp_path / f"{name}_snapshot.pickle.gz"
        path.write_bytes(damaged)
        (problem,) = build_report([path]).problems
        assert problem.startswith(f"{path}: ")


def event(action: str, address: int, size: int, frames: Any = (), **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": 1, "frames": list(frames), **more}


class Counted(list[Any]):
    """A list that counts how often it is gone through."""

    rounds = 0

    def __iter__(self) -> Any:
        self.rounds += 1
        return super().__iter__()


def test_lists_that_stand_in_many_places_are_counted_once() -> None:
    frames = Counted([{"filename": "??", "name": "x", "line": 0}] * 1000)
    blocks = Counted({"size": 8, "state": "active_allocated", "address": 8 * i, "frames": frames} for i in range(1000))
    segment = {"device": 0, "total_size": 8000, "address": 0, "blocks": blocks}
    events = Counted(event("alloc", 8 * i, 8) for i in range(1000))
    shared = {"segments": [segment] * 500 + [dict(segment) for _ in range(500)], "device_traces": [events] * 1000}
    (device,) = analyse_snapshot(shared)[:1]
    assert (device.allocated, device.held[0].blocks) == (8000, 1000)
    assert max(frames.rounds, blocks.rounds, events.rounds) < 10


def test_an_error_without_any_segment_is_reported() -> None:
    """Another process holds the device: the first allocation fails."""
    frames = [{"filename": "/app/train.py", "name": "main", "line": 3}]
    snapshot = {"segments": [], "device_traces": [[], [event("oom", 0, 10**10, frames, device_free=10**9)]]}
    (device,) = analyse_snapshot(snapshot)
    (error,) = device.oom
    assert (device.device, error.asked, error.device_free) == (1, 10**10, 10**9)
    assert error.stack == ("main (/app/train.py:3)",)


def test_a_block_of_before_the_recording_is_called_so() -> None:
    old = {"size": 64, "requested_size": 64, "address": 1000, "state": "active_allocated", "frames": []}
    kept = {**old, "address": 2000, "size": 32, "requested_size": 32}
    named = {**old, "address": 3000, "frames": [{"filename": "/app/train.py", "name": "f", "line": 1}]}
    snapshot = {
        "segments": [{"device": 0, "address": 1000, "total_size": 3000, "blocks": [old, kept, named]}],
        "device_traces": [[event("alloc", 2000, 32), event("alloc", 5000, 8), event("free_completed", 5000, 8)]],
    }
    (device,) = analyse_snapshot(snapshot)
    places = {h.place: h.bytes for h in device.held}
    assert places == {BEFORE: 64, "f (/app/train.py:1)": 64, NO_FRAME: 32}
    assert {h.place for h in device.peak_holders} == set(places)
