"""Reads the events of a trace file piece by piece.

The traces of a real run are hundreds of megabytes of JSON, and some are damaged: cut off by a full disk or a kill, with
``NaN`` for a number, with unescaped characters in names. The reader holds one piece at a time and gives every event
that can be read; what could not be read is counted in :attr:`TraceReader.problems`.
"""

import contextlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson

Event = dict[str, Any]
Typed = TypeVar("Typed")

_CHUNK = 1 << 20
_COMPRESSED_PIECE = 64 << 10
# How much of a buffer's end is searched for the boundary between two events, and how many boundaries are tried.
_BOUNDARY_WINDOW = 16 << 10
_BOUNDARY_TRIES = 40
# The longest run of pieces that is tried as one event when an event holds something that looks like a boundary.
_MAX_JOIN = 8
_MAX_HEAD = 64 << 20
# No event is that long: it is damage, or a small file that unpacks to more than the memory holds.
_MAX_EVENT = 4 << 20
# After this many damaged events they are no longer mended, and after this many in a row nothing more is read.
_MOST_MENDED = 50_000
_MOST_IN_A_ROW = 200_000
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_LAST = re.compile(rb"\}\s*\]")
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
# Half of a surrogate pair is no character: nothing could print it or write it again.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrtu])')
# Where none of these is, the text is not JSON that is a little wrong, but no JSON.
_MENDABLE = re.compile(rb"[\x00-\x1f\x80-\xff\\]|NaN|Infinity")
# A list of fields begins after the events, or the file ends.
_AFTER_EVENTS = re.compile(rb'\s*(,\s*"[^"]{0,200}"\s*:|\}\s*$|$)')


class NotATrace(ValueError):
    """The file holds no trace at all; the message names it and says what it looks like."""


class TraceReader:
    """The events of one trace file, plain or gzip.

    Attributes:
        path: the file.
        meta: the fields beside the events (device properties, base time, ...); complete after the last chunk.
        problems: in words, what could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.problems: list[str] = []
        self._unreadable = 0
        self._in_a_row = 0
        self._tries = _BOUNDARY_TRIES

    def chunks(self) -> Iterator[list[Event]]:
        """Lists of events, in the order of the file.

        Raises:
            NotATrace: for a file without trace events.
            OSError: when the file cannot be opened.
        """
        return self.typed_chunks(lambda text: _only_events(orjson.loads(text)))

    def typed_chunks(self, read: Callable[[bytes], list[Typed]]) -> Iterator[list[Typed] | list[Event]]:
        """As :meth:`chunks`, with a reader of one's own for the text of a list of events.

        Args:
            read: may raise ``ValueError``; the events of that text then come as dictionaries.
        """
        pieces = self._bytes()
        buffer = self._head(pieces)
        searched = 0  # no boundary begins before: a long event is not searched again with every piece
        for piece in pieces:
            buffer += piece
            if len(buffer) >= _CHUNK:
                events, used = self._split(buffer, read, searched)
                if events:
                    yield events
                del buffer[:used]
                searched = 0 if used else max(0, len(buffer) - _BOUNDARY_WINDOW)
                if len(buffer) > _MAX_EVENT or self._in_a_row > _MOST_IN_A_ROW:
                    self.problems.append(
                        f"an event is longer than {_MAX_EVENT >> 20} MiB"
                        if len(buffer) > _MAX_EVENT
                        else f"{self._in_a_row} events in a row could not be read"
                    )
                    del buffer[_CHUNK:]
                    break
        events = self._tail(bytes(buffer))
        if events:
            yield events
        if self._unreadable:
            self.problems.append(f"{self._unreadable} events could not be read and are left out")

    def _bytes(self) -> Iterator[bytes]:
        """The decompressed content; a damaged end is a problem, not an error."""
        with self.path.open("rb") as f:
            first = f.read(_COMPRESSED_PIECE)
            if first[:2] != b"\x1f\x8b":
                while first:
                    yield first
                    first = f.read(_COMPRESSED_PIECE)
                return
            inflate = zlib.decompressobj(wbits=31)
            while first:
                try:
                    data = inflate.decompress(first, _CHUNK)  # in pieces: a few bytes may be a thousand times as many
                except zlib.error as e:
                    self.problems.append(f"compressed data is damaged ({e}); read up to there")
                    return
                if data:
                    yield data
                if inflate.eof:  # a gzip file may be several in a row
                    first = inflate.unused_data.lstrip(b"\0") or f.read(_COMPRESSED_PIECE)
                    if first:
                        inflate = zlib.decompressobj(wbits=31)
                else:
                    first = inflate.unconsumed_tail or f.read(_COMPRESSED_PIECE)
            if not inflate.eof:
                self.problems.append("compressed data is cut off; read up to there")

    def _head(self, pieces: Iterator[bytes]) -> bytearray:
        """Consumes the fields before the events; returns the bytes after the opening bracket."""
        buffer = bytearray()
        searched = 0
        for piece in pieces:
            buffer += piece
            start = bytes(buffer[:64]).lstrip()
            if start[:1] == b"[":  # the other form of the format: a bare list of events
                del buffer[: buffer.index(b"[") + 1]
                return buffer
            if start and start[:1] != b"{":
                break
            found = _EVENTS_KEY.search(buffer, max(0, searched - 64))
            if found:
                self._add_meta(bytes(buffer[: found.start()]).rstrip().rstrip(b",") + b"}")
                del buffer[: found.end()]
                return buffer
            searched = len(buffer)
            if searched > _MAX_HEAD:
                break
        if not buffer:
            cause = self.problems.pop() if self.problems else "the file is empty"
            raise NotATrace(f"{self.path}: {cause}")
        cause = f" ({self.problems.pop()})" if self.problems else ""
        raise NotATrace(f'{self.path}: holds no "traceEvents"{cause}')

    def _add_meta(self, text: bytes) -> None:
        try:
            fields = _loads(text)
        except ValueError:
            self.problems.append("the fields beside the events could not be read")
            return
        if isinstance(fields, dict):
            self.meta.update(fields)

    def _split(
        self, buffer: bytearray, read: Callable[[bytes], list[Typed]], searched: int
    ) -> tuple[list[Typed] | list[Event], int]:
        """The events before the last boundary in the buffer, and how many bytes they and the boundary take."""
        window = max(searched, len(buffer) - _BOUNDARY_WINDOW)
        boundaries = list(_BETWEEN.finditer(buffer, window))
        if not boundaries:
            boundaries = list(_BETWEEN.finditer(buffer, searched))
        for boundary in reversed(boundaries[-self._tries :]):
            text = b"[" + bytes(buffer[: boundary.start() + 1]) + b"]"
            with contextlib.suppress(ValueError):
                events = read(text)
                self._read()
                return events, boundary.end()
            try:
                found = _only_events(orjson.loads(text))
                self._read()
                return found, boundary.end()
            except orjson.JSONDecodeError as e:
                if e.pos < window:  # the damage is inside, not at the boundary that we chose
                    break
        if not boundaries:
            # One event of megabytes, or no JSON: keep collecting.
            return [], 0
        self._tries = max(1, self._tries // 2)  # each costs a look at the whole buffer
        end = boundaries[-1]
        return self._one_by_one(bytes(buffer[: end.start() + 1])), end.end()

    def _read(self) -> None:
        """Notes that events could be read: what comes next deserves all care again."""
        self._in_a_row, self._tries = 0, _BOUNDARY_TRIES

    def _tail(self, buffer: bytes) -> list[Event]:
        """The last events and the fields after them."""
        if not buffer.strip():
            self.problems.append("the list of events is cut off; read up to there")
            return []
        if buffer.lstrip()[:1] == b"]":
            self._add_tail(buffer.lstrip()[1:])
            return []
        ends = [e for e in _LAST.finditer(buffer) if _AFTER_EVENTS.match(buffer, e.end())]
        for end in reversed(ends[-_BOUNDARY_TRIES:]):
            try:
                events = _only_events(orjson.loads(b"[" + buffer[: end.start() + 1] + b"]"))
            except orjson.JSONDecodeError:
                continue
            self._add_tail(buffer[end.end() :])
            return events
        # An event is damaged. The fields are what is whole from the end of a list to the end of the file; if they hold
        # lists of their own, there are several such ends, and the first is the one of the events.
        whole = (e for e in ends[-_BOUNDARY_TRIES:] if _tail_fields(buffer[e.end() :]) is not None)
        chosen = next(whole, ends[-1] if ends else None)
        if chosen is not None:
            self._add_tail(buffer[chosen.end() :])
            return self._one_by_one(buffer[: chosen.start() + 1])
        self.problems.append("the list of events is cut off; read up to there")
        # The text after the last complete event is what was cut; it is no unreadable event.
        boundaries = list(_BETWEEN.finditer(buffer))
        events = self._one_by_one(buffer[: boundaries[-1].start() + 1]) if boundaries else []
        rest = buffer[boundaries[-1].end() if boundaries else 0 :].rstrip().rstrip(b",]")
        with contextlib.suppress(ValueError):
            events += _only_events([_loads(rest)])
        return events

    def _add_tail(self, text: bytes) -> None:
        fields = _tail_fields(text)
        if fields is None:
            self.problems.append("the fields beside the events could not be read")
        else:
            self.meta.update(fields)

    def _one_by_one(self, text: bytes) -> list[Event]:
        """Events that cannot be read together: each alone, so that only the damaged ones are lost."""
        events: list[Event] = []
        pieces = _BETWEEN.split(text)
        pieces = [p + b"}" for p in pieces[:-1]] + pieces[-1:]
        i = 0
        while i < len(pieces):
            width, event = self._first_event(pieces[i : i + _MAX_JOIN])
            if width:
                events += _only_events([event])
                self._in_a_row = 0
            else:
                self._unreadable += 1
                self._in_a_row += 1
            i += max(1, width)
        return events

    def _first_event(self, pieces: list[bytes]) -> tuple[int, Any]:
        """How many of the pieces are the first event, 0 when it is damaged, and the event."""
        load = _loads if self._unreadable < _MOST_MENDED else orjson.loads
        with contextlib.suppress(ValueError):
            return 1, load(pieces[0])
        depth = quotes = 0
        for width, piece in enumerate(pieces, 1):
            depth += piece.count(b"{") - piece.count(b"}")
            quotes += piece.count(b'"') - piece.count(b'\\"')
            if depth <= 0 and quotes % 2 == 0:  # it is closed here: more pieces are no part of it
                if width > 1:
                    with contextlib.suppress(ValueError):
                        return width, load(b",".join(pieces[:width]))
                break
        return 0, None


def _loads(text: bytes) -> Any:
    """JSON as it should be, else what is often met instead.

    That is NaN, control characters, stray backslashes, bad UTF-8, half characters.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if not _MENDABLE.search(text):
            raise
        text = _LONE_SURROGATE.sub(rb"\\ufffd", text)
    try:
        try:
            return json.loads(text.decode("utf-8", "replace"), strict=False)
        except ValueError:
            repaired = _BAD_ESCAPE.sub(rb"\\\\", text)
            return json.loads(repaired.decode("utf-8", "replace"), strict=False)
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def _tail_fields(text: bytes) -> dict[str, Any] | None:
    """The fields in the text after the list of events; None when it is not what ends a file."""
    text = text.strip().removeprefix(b",").strip()
    if text in (b"", b"}"):
        return {}
    try:
        fields = _loads(b"{" + text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _only_events(items: list[Any]) -> list[Event]:
    return [e for e in items if isinstance(e, dict)]


def event_text(event: Event) -> bytes | None:
    """An event as JSON; None for one that can be read but not written: integers above 64 bits, deep lists."""
    try:
        return orjson.dumps(event)
    except orjson.JSONEncodeError:
        return None
