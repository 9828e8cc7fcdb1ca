"""Rows of a jsonl file, by an index of byte offsets."""

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from relax_data.errors import DataError
from relax_data.readers.base import Row
from relax_data.readers.cache import SparseIndex, fingerprint, jsonl_index, unpacked


class JsonlRows:
    """Rows of a jsonl file through an index of byte offsets and ``pread``.

    The index has one entry for every 64 lines or 1 MB and is kept in the cache, so that a second start does not scan
    the file. Compressed files are unpacked into the cache once: neither gzip nor zstd can be read from the middle.
    """

    def __init__(self, path: str):
        self.name = path
        self._data = unpacked(path)
        self._index: SparseIndex = jsonl_index(self._data)
        self.count = int(self._index.rows[-1])
        self.units = self._index.rows
        self._file = open(self._data, "rb", buffering=0)  # noqa: SIM115 (closed by close)

    def fingerprint(self) -> dict[str, Any]:
        """Changes when the file does: its size, its first and its last bytes."""
        return fingerprint(self.name)

    def read(self, start: int, stop: int) -> "_JsonlBlock":
        """Rows ``start`` to ``stop``, as one read of the file."""
        first = int(np.searchsorted(self.units, start, side="right")) - 1
        last = int(np.searchsorted(self.units, stop, side="left"))
        begin, end = int(self._index.offsets[first]), int(self._index.offsets[last])
        data = _pread(self._file.fileno(), end - begin, begin)
        if len(data) != end - begin:
            raise DataError(f"{self.name} became shorter while it was read: do not change it during a run")
        lines = data.split(b"\n")
        skip = start - int(self.units[first])
        return _JsonlBlock(self.name, start, lines[skip : skip + stop - start])

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _pread(fd: int, size: int, offset: int) -> bytes:
    """``os.pread`` that goes on where the system returns less than asked (it stops at 2 GB)."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    parts = [data]
    read = len(data)
    while read < size and (more := os.pread(fd, size - read, offset + read)):
        parts.append(more)
        read += len(more)
    return b"".join(parts)


def decoded(path: str, first: int, lines: list[bytes]) -> list[Row | DataError | None]:
    """The rows in lines of a file, of which the first has the number ``first`` (0-based)."""
    return _JsonlBlock(path, first, lines).rows(range(len(lines)))


class _JsonlBlock:
    def __init__(self, name: str, first: int, lines: list[bytes]):
        self._name, self._first, self._lines = name, first, lines

    def rows(self, offsets: Sequence[int]) -> list[Row | DataError | None]:
        out: list[Row | DataError | None] = []
        for o in offsets:
            line = self._lines[o]
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                row = None if not line.strip() else self._python_json(o, line, error)
            else:
                if type(row) is not dict:
                    row = self._no_object(o, row)
            out.append(row)
        return out

    def _python_json(self, offset: int, line: bytes, error: ValueError) -> Row | DataError:
        """A row with NaN or Infinity, which are no JSON but Python writes them; else what is wrong with it."""
        try:
            row = json.loads(line)
            # Half of a surrogate pair can be written as an escape, but is no text: no tokenizer and no file takes it.
            json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as problem:
            reason = "half of a surrogate pair" if isinstance(problem, UnicodeEncodeError) else error
            shown = line[:60].decode("utf-8", "replace") + ("..." if len(line) > 60 else "")
            return DataError(f"{self._name}:{self._first + offset + 1}: not valid JSON ({reason}): {shown}")
        return row if type(row) is dict else self._no_object(offset, row)

    def _no_object(self, offset: int, row: Any) -> DataError:
        kind = "null" if row is None else type(row).__name__
        return DataError(f"{self._name}:{self._first + offset + 1}: a row must be a JSON object, not {kind}")
