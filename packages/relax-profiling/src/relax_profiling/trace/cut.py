"""Cuts a trace to the phases of one target."""

import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import orjson

from relax_profiling.trace.reader import Event, TraceReader, event_text


class Writable(Protocol):
    """A file or a compressor, open for bytes."""

    def write(self, data: bytes, /) -> int:
        """Writes all of ``data``."""
        ...


_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})


def cut_to_spans(source: Path, out: Writable, names: set[str]) -> None:
    """Writes the part of a trace that lies within the annotations ``names``.

    Kept are the host's events inside these spans, and the device's events that were launched inside them, whenever the
    device got to them.

    Args:
        out: receives the JSON text.
    """
    spans: list[tuple[float, float]] = []
    launched: dict[Any, float] = {}
    for events in TraceReader(source).chunks():
        for e in events:
            category = e.get("cat")
            if category == "user_annotation" and e.get("name") in names:
                spans.append((e["ts"], e["ts"] + e.get("dur", 0)))
            elif category in _LAUNCHES and "correlation" in e.get("args", ()):
                launched[e["args"]["correlation"]] = e["ts"]
    spans.sort()
    starts = [s for s, _ in spans]

    def inside(ts: float) -> bool:
        i = bisect.bisect_right(starts, ts) - 1
        return i >= 0 and ts <= spans[i][1]

    reader = TraceReader(source)
    out.write(b'{"traceEvents":[\n')
    first = True
    for events in reader.chunks():
        belonging = (event_text(e) for e in events if _belongs(e, inside, launched, names))
        kept = [text for text in belonging if text is not None]
        if kept:
            out.write((b"" if first else b",\n") + b",\n".join(kept))
            first = False
    out.write(b"\n]")
    for key, value in reader.meta.items():
        out.write(b",\n" + orjson.dumps(key) + b":" + orjson.dumps(value))
    out.write(b"}\n")


def _belongs(e: Event, inside: Callable[[Any], bool], launched: dict[Any, float], names: set[str]) -> bool:
    if e.get("ph") == "M":
        return True
    arguments = e.get("args") or {}
    if e.get("cat") == "gpu_user_annotation":
        return e.get("name") in names or inside(e.get("ts", -1))
    if e.get("cat") == "ac2g":
        # The arrow from a launch to its kernel carries the correlation as its id.
        return inside(launched.get(e.get("id"), e.get("ts", -1)))
    ts = launched.get(arguments.get("correlation"), e.get("ts", -1))
    return isinstance(ts, (int, float)) and inside(ts)
