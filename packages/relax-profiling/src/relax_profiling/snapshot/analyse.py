"""Analyses a torch memory snapshot: the peak and who holds it, what is held at the end, what an OOM met."""

import dataclasses
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

Frames = tuple[str, ...]

# Frames of the libraries say how memory is allocated, not for what.
_LIBRARIES = ("/torch/", "/site-packages/torch", "<frozen", "/lib/python3")
_SHOWN_FRAMES = 12
_LONGEST_NAME = 400
# Bytes and microseconds beyond this are damage, and may be too large to compute with.
_MOST = 1 << 60
# Autograd's backward runs on a thread without Python.
NO_FRAME = "(no Python frame: autograd's backward, or a library's own thread)"
BEFORE = "(allocated before the recording began)"


@dataclasses.dataclass(frozen=True)
class Holder:
    """Memory that was allocated at one place: bytes, number of blocks, and the call stack, innermost first."""

    bytes: int
    blocks: int
    stack: Frames

    @property
    def place(self) -> str:
        """The innermost frame of the user's own code, else the innermost of all."""
        for frame in self.stack:
            if not any(library in frame for library in _LIBRARIES):
                return frame
        return self.stack[0] if self.stack else NO_FRAME


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """One out-of-memory error, in bytes: what was asked for, what the device had left, and what the allocator held."""

    asked: int
    device_free: int
    allocated: int
    reserved: int
    largest_free_block: int
    stack: Frames


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device, in bytes.

    Attributes:
        times: seconds since the first event, one for each change of the curve.
        curve: allocated bytes after each.
        peak: largest value of the curve; ``peak_time`` is when, ``peak_holders`` who held it.
        held: who holds memory at the end.
        reserved: taken from the device by the allocator, at the end.
        oom: the errors in the recording.
    """

    device: int
    times: list[float]
    curve: list[int]
    peak: int
    peak_time: float
    peak_holders: list[Holder]
    held: list[Holder]
    allocated: int
    reserved: int
    largest_free_block: int
    oom: list[OutOfMemory]
    truncated: bool = False


@dataclasses.dataclass(frozen=True)
class _Block:
    size: int
    frames: Any


def analyse_snapshot(snapshot: dict[str, Any]) -> list[DeviceMemory]:
    """One entry a device that has segments or events.

    Raises:
        ValueError: when the fields are not those of a snapshot.
    """
    try:
        segments, traces = _without_repetition(snapshot)
        _check_numbers(segments, traces)
        devices: dict[int, list[dict[str, Any]]] = {}
        for segment in segments:
            devices.setdefault(int(segment.get("device", 0)), []).append(segment)
        for i, events in enumerate(traces):
            # An error on the first allocation leaves no other trace: another process holds the memory.
            if any(e.get("action") in ("alloc", "oom") for e in events):
                devices.setdefault(i, [])
        return [_device(i, segments, traces[i] if i < len(traces) else []) for i, segments in sorted(devices.items())]
    except (KeyError, TypeError, AttributeError, IndexError) as e:
        raise ValueError(f"fields are missing or of the wrong kind ({type(e).__name__}: {e})") from e


def _without_repetition(snapshot: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The segments and the events of each device, where a list that stands at several places is taken once.

    A pickle names a list a second time in two bytes, so a small file could hold more events than can be gone through.
    No allocator writes such a file.
    """
    seen: set[int] = set()

    def is_new(part: Any) -> bool:
        new = id(part) not in seen
        seen.add(id(part))
        return new

    segments = []
    for segment in filter(is_new, snapshot["segments"]):
        blocks = segment.get("blocks") or []
        segments.append({**segment, "blocks": blocks if is_new(blocks) else []})
    return segments, [events if is_new(events) else [] for events in snapshot.get("device_traces") or []]


def _check_numbers(segments: list[dict[str, Any]], traces: list[list[dict[str, Any]]]) -> None:
    """Raises ``ValueError`` for sizes and times that nothing can be computed with."""
    for segment in segments:
        _check(segment, "device", "total_size")
        for block in segment["blocks"]:
            _check(block, "size", "requested_size")
    for events in traces:
        for event in events:
            _check(event, "size", "time_us", "device_free")


def _check(record: dict[str, Any], *keys: str) -> None:
    for key in keys:
        value = record.get(key, 0)
        if not (isinstance(value, (int, float)) and -_MOST < value < _MOST):
            raise ValueError(f"a {key} is no number, or one too large to be meant")


def _device(device: int, segments: list[dict[str, Any]], events: list[dict[str, Any]]) -> DeviceMemory:
    held: dict[int, _Block] = {}
    largest_free = 0
    reserved = 0
    for segment in segments:
        reserved += segment["total_size"]
        address = segment.get("address", 0)
        for block in segment.get("blocks", ()):
            at = block.get("address", address)
            if block["state"] == "active_allocated":
                held[at] = _Block(block.get("requested_size", block["size"]) or block["size"], block.get("frames"))
            elif block["state"] == "inactive":
                largest_free = max(largest_free, block["size"])
            address = at + block["size"]
    allocated = sum(b.size for b in held.values())
    before = _held_before(held, events)
    held.update((address, block) for address, block in before.items() if address in held)
    start = sum(b.size for b in before.values())
    times, curve, peak_index = _curve(events, start, before)
    peak_holders = group_by_stack(_live_at(events, before, peak_index).values())
    first = events[0].get("time_us", 0) if events else 0
    peak_at = events[peak_index].get("time_us", 0) if 0 <= peak_index < len(events) else first
    peak = max([*curve, start])
    ooms = [
        OutOfMemory(
            int(e.get("size", 0)),
            int(e.get("device_free", e.get("addr", 0))),
            allocated,
            reserved,
            largest_free,
            frames_text(e.get("frames")),
        )
        for e in events
        if e.get("action") == "oom"
    ]
    return DeviceMemory(
        device=device,
        times=times,
        curve=curve,
        peak=peak,
        peak_time=(peak_at - first) / 1e6,
        peak_holders=peak_holders,
        held=group_by_stack(held.values()),
        allocated=allocated,
        reserved=reserved,
        largest_free_block=largest_free,
        oom=ooms,
        truncated=bool(before) and bool(events),
    )


def _held_before(held: dict[int, _Block], events: list[dict[str, Any]]) -> dict[int, _Block]:
    """The blocks that were there before the first event: freed or still held without having been allocated in it."""
    before: dict[int, _Block] = {}
    seen: set[int] = set()
    for e in events:
        action = e.get("action")
        if action == "alloc":
            seen.add(e["addr"])
        elif action == "free_completed" and e["addr"] not in seen:
            before[e["addr"]] = _Block(e["size"], BEFORE)
            seen.add(e["addr"])
    for address, block in held.items():
        if address not in seen:
            # Its frames, if any, were recorded by an earlier recording, or their event left the ring buffer.
            before[address] = block if block.frames else _Block(block.size, BEFORE)
    return before


def _curve(events: list[dict[str, Any]], start: int, before: dict[int, _Block]) -> tuple[list[float], list[int], int]:
    """The allocated bytes after every event that changes them, and the index of the event at the peak (-1: before)."""
    now = peak = start
    peak_index = -1
    times: list[float] = []
    curve: list[int] = []
    first = events[0].get("time_us", 0) if events else 0
    live = {address: b.size for address, b in before.items()}
    for i, e in enumerate(events):
        action = e.get("action")
        if action == "alloc":
            live[e["addr"]] = e["size"]
            now += e["size"]
        elif action == "free_completed":
            now -= live.pop(e["addr"], 0)
        else:
            continue
        times.append((e.get("time_us", 0) - first) / 1e6)
        curve.append(now)
        if now > peak:
            peak, peak_index = now, i
    return times, curve, peak_index


def _live_at(events: list[dict[str, Any]], before: dict[int, _Block], index: int) -> dict[int, _Block]:
    live = dict(before)
    for e in events[: index + 1]:
        if e.get("action") == "alloc":
            live[e["addr"]] = _Block(e["size"], e.get("frames"))
        elif e.get("action") == "free_completed":
            live.pop(e["addr"], None)
    return live


def group_by_stack(blocks: Iterable[_Block]) -> list[Holder]:
    """Blocks summed by call stack, the largest first."""
    sums: dict[Frames, list[int]] = {}
    # Blocks of one place share their frames, and stacks share the frames of their callers: each becomes text once.
    stacks: dict[int, Frames] = {}
    texts: dict[int, str | None] = {}
    for block in blocks:
        stack = stacks.get(id(block.frames))
        if stack is None:
            stack = stacks[id(block.frames)] = frames_text(block.frames, texts)
        entry = sums.setdefault(stack, [0, 0])
        entry[0] += block.size
        entry[1] += 1
    holders = [Holder(size, count, stack) for stack, (size, count) in sums.items()]
    return sorted(holders, key=lambda h: -h.bytes)


def frames_text(frames: Any, texts: dict[int, str | None] | None = None) -> Frames:
    """``function (folder/file.py:12)`` for each frame, innermost first, without the frames of torch's C++.

    Args:
        texts: identity of a frame -> its text, of frames that stay in memory; filled here.
    """
    if isinstance(frames, str):
        return (frames,)
    if not isinstance(frames, list):
        return (NO_FRAME,)
    texts = {} if texts is None else texts
    shown: list[str] = []
    for frame in frames:
        if id(frame) not in texts:
            texts[id(frame)] = _frame_text(frame)
        text = texts[id(frame)]
        if text is not None:
            shown.append(text)
            if len(shown) == _SHOWN_FRAMES:
                break
    return tuple(shown) or (NO_FRAME,)


def _frame_text(frame: dict[str, Any]) -> str | None:
    # Text and numbers only: what else stands there may be lists in lists that are longer than any memory as text.
    file, name, line = (frame.get(key) for key in ("filename", "name", "line"))
    file = file[-_LONGEST_NAME:] if isinstance(file, str) else "?"
    if not file or file == "??":
        return None
    # The last folders name the library; the full path is the reader's own disk.
    short = "/".join(PurePath(file).parts[-4:]) if "site-packages" in file else file
    function = name[:_LONGEST_NAME] if isinstance(name, str) else "?"
    number = line if isinstance(line, int) and 0 <= line < _MOST else 0
    return f"{function} ({'/' if short != file else ''}{short}:{number})"


@dataclasses.dataclass(frozen=True)
class Growth:
    """Memory that one place holds in a later snapshot beyond an earlier one, in bytes."""

    grown: int
    now: int
    stack: Frames


def growth(earlier: DeviceMemory, later: DeviceMemory) -> list[Growth]:
    """The places that hold more in the later snapshot, the largest growth first."""
    was = {h.stack: h.bytes for h in earlier.held}
    grown = [Growth(h.bytes - was.get(h.stack, 0), h.bytes, h.stack) for h in later.held]
    return sorted((g for g in grown if g.grown > 0), key=lambda g: -g.grown)
