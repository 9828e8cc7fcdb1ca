"""Rows of a parquet file: row groups as units, decoded piece by piece, so that a large row group stays small."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from relax_data.errors import DataError
from relax_data.readers.base import Row
from relax_data.readers.cache import fingerprint

_BATCH_ROWS = 1024
_CURSORS = 8
"""Row groups that are read at the same time; more than the interleaving of the streaming shuffle asks for."""


class ParquetRows:
    """Random access by row, cheap when the rows of a row group are asked for in rising order.

    Each row group in use has a cursor that decodes forward in batches; memory is a few batches a cursor, whatever the
    size of the row group. Asking for a row before the cursor starts that row group again.
    """

    def __init__(self, path: str):
        self.name = path
        try:
            self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 18, memory_map=False)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} is no readable parquet file: {error}") from error
        meta = self._file.metadata
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self.count = int(meta.num_rows)
        if min(sizes, default=0) < 0 or sum(sizes) != self.count:
            self._file.close()
            raise DataError(
                f"{path} is damaged: its footer says {self.count} rows, its {len(sizes)} row groups {sum(sizes)}"
                + (f", one of them {min(sizes)}" if min(sizes, default=0) < 0 else "")
                + "; write it again"
            )
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self.units = np.unique(self._starts)
        self._cursors: dict[int, _Cursor] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Changes when the file does: its size, its first and its last bytes."""
        return fingerprint(self.name)

    def read(self, start: int, stop: int) -> "_ArrowBlock":
        """Rows ``start`` to ``stop``; reading on from the last call decodes nothing twice."""
        parts: list[pa.RecordBatch] = []
        first = start
        group = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._starts[group + 1]))
            if end > start:
                base = int(self._starts[group])
                parts += self._cursor(group, start - base).take(end - start)
                if end == self._starts[group + 1]:
                    del self._cursors[group]
            start, group = end, group + 1
        # One chunk a column: taking rows out of many chunks is slow.
        table = pa.Table.from_batches(parts, schema=self._file.schema_arrow).combine_chunks()
        return _ArrowBlock(table, self.name, first)

    def _cursor(self, group: int, row: int) -> "_Cursor":
        cursor = self._cursors.pop(group, None)
        if cursor is None or cursor.next > row:
            cursor = _Cursor(self._file, group, self.name)
        cursor.skip(row - cursor.next)
        self._cursors[group] = cursor
        if len(self._cursors) > _CURSORS:
            # Dictionaries keep the order of insertion: the first is the one unused for longest.
            del self._cursors[next(iter(self._cursors))]
        return cursor

    def close(self) -> None:
        """Closes the file and forgets where readers stood."""
        self._cursors.clear()
        self._file.close()


class _Cursor:
    """Reads one row group forward."""

    def __init__(self, file: pq.ParquetFile, group: int, name: str):
        self._batches: Iterator[pa.RecordBatch] = file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
        self._rest: pa.RecordBatch | None = None
        self._name = name
        self.next = 0

    def take(self, n: int) -> list[pa.RecordBatch]:
        parts = []
        while n > 0:
            batch = self._rest if self._rest is not None and len(self._rest) else self._read()
            parts.append(batch.slice(0, n))
            self._rest = batch.slice(n) if len(batch) > n else None
            n -= len(parts[-1])
            self.next += len(parts[-1])
        return parts

    def skip(self, n: int) -> None:
        while n > 0:
            n -= sum(len(b) for b in self.take(min(n, _BATCH_ROWS)))

    def _read(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except StopIteration:
            raise DataError(f"{self._name}: a row group has fewer rows than the file's footer says") from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._name}: damaged near row {self.next + 1} of a row group: {error}") from error


class _ArrowBlock:
    def __init__(self, table: pa.Table, name: str, first: int):
        self._table, self._name, self._first = table, name, first

    def rows(self, offsets: Sequence[int]) -> list[Row | DataError | None]:
        # A slice is a view and a take copies: ranges in order, the common case of a scan, stay views.
        first, n = offsets[0] if len(offsets) else 0, len(offsets)
        if n and offsets[-1] - first == n - 1 and all(b - a == 1 for a, b in pairwise(offsets)):
            table = self._table.slice(first, n)
        else:
            table = self._table.take(pa.array(offsets, type=pa.int64()))
        try:
            found: list[Row | DataError | None] = table.to_pylist()
            return found
        except (ValueError, OverflowError, pa.ArrowException):
            return [self._row(o) for o in offsets]

    def _row(self, offset: int) -> Row | DataError:
        """One row of a batch in which something cannot be converted: text that is no UTF-8, a time beyond Python's."""
        row = {}
        for column in self._table.column_names:
            try:
                row[column] = self._table.column(column)[offset].as_py()
            except (ValueError, OverflowError, pa.ArrowException) as error:
                return DataError(f"{self._name}:{self._first + offset + 1}: column {column!r} cannot be read: {error}")
        return row
