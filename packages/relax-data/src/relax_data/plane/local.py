"""The data plane of one process."""

import contextlib
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_data.plane.base import (
    Columns,
    PlaneClosed,
    PlaneError,
    PlaneFailed,
    Rows,
    check_take,
    not_there,
    row_count,
    waiting_for,
)


class LocalPlane:
    """The data plane inside one process. Values are handed over as they are, not copied."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: dict[int, dict[str, Any]] = {}
        self._taken: dict[str, set[int]] = {}
        self._next_id = 0
        self._closed = False
        self._failure: str | None = None

    def put(self, columns: Columns) -> list[int]:
        """Adds rows under the lock; returns their ids, which rise."""
        n = row_count(columns)
        with self._changed:
            self._check_failure()
            if self._closed:
                raise PlaneClosed("the plane was closed: no more rows can be put")
            ids = list(range(self._next_id, self._next_id + n))
            self._next_id += n
            for k, i in enumerate(ids):
                self._rows[i] = {name: values[k] for name, values in columns.items()}
            self._changed.notify_all()
        return ids

    def add(self, ids: Sequence[int], columns: Columns) -> None:
        """Adds columns to rows that are there."""
        if row_count(columns) != len(ids):
            raise ValueError(f"{len(ids)} ids but {row_count(columns)} values a column")
        with self._changed:
            self._check_failure()
            if missing := [i for i in ids if i not in self._rows]:
                raise PlaneError(not_there(missing))
            for k, i in enumerate(ids):
                self._rows[i].update({name: values[k] for name, values in columns.items()})
            self._changed.notify_all()

    def take(self, consumer: str, columns: Sequence[str], n: int, *, timeout: float) -> Rows:
        """Waits until enough rows have all of ``columns``; see :meth:`relax_data.plane.base.DataPlane.take`."""
        check_take(columns, n, timeout)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self._check_failure()
                taken = self._taken.setdefault(consumer, set())
                left = [i for i in self._rows if i not in taken]
                ready = [i for i in left if all(c in self._rows[i] for c in columns)]
                if self._closed and not left:
                    raise PlaneClosed(f"no row is left for consumer {consumer!r}")
                if len(ready) >= n or (self._closed and len(ready) == len(left)):
                    ids = ready[:n]
                    taken.update(ids)
                    return Rows(ids, {c: [self._rows[i][c] for i in ids] for c in columns})
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(waiting_for(consumer, columns, n, timeout, len(ready), len(left) - len(ready)))
                self._changed.wait(remaining)

    def fetch(self, ids: Sequence[int], columns: Sequence[str]) -> Rows:
        """The rows of these ids, not copied; see :meth:`relax_data.plane.base.DataPlane.fetch`."""
        with self._changed:
            self._check_failure()
            if missing := [i for i in ids if i not in self._rows]:
                raise PlaneError(not_there(missing))
            if lacking := [(i, c) for i in ids for c in columns if c not in self._rows[i]]:
                raise PlaneError(f"row {lacking[0][0]} has no column {lacking[0][1]!r} yet")
            return Rows(list(ids), {c: [self._rows[i][c] for i in ids] for c in columns})

    def check(self) -> None:
        """Raises what :meth:`fail` was told."""
        with self._changed:
            self._check_failure()

    def clear(self, ids: Sequence[int]) -> None:
        """Forgets rows, and that they were taken."""
        with self._changed:
            for i in ids:
                self._rows.pop(i, None)
                for taken in self._taken.values():
                    taken.discard(i)
            # A closed plane may have become empty: its consumers must hear of it.
            self._changed.notify_all()

    def close(self) -> None:
        """Refuses further rows and wakes all consumers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Keeps the first reason and wakes all consumers with it."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def save(self, path: str | Path) -> None:
        """Writes all rows with pickle, to a temporary file that is then renamed."""
        with self._changed:
            state = {"rows": self._rows, "next_id": self._next_id, "closed": self._closed}
            data = pickle.dumps(state, protocol=5)
        with _replacing(Path(path)) as temporary:
            temporary.write_bytes(data)

    def load(self, path: str | Path) -> None:
        """Replaces all rows by those of :meth:`save`, none of them taken.

        Rows hold anything, so that the file is a pickle: reading it runs what it holds. Read only what you wrote.
        """
        state = pickle.loads(Path(path).read_bytes())
        with self._changed:
            self._rows, self._next_id, self._closed = state["rows"], state["next_id"], state["closed"]
            self._taken, self._failure = {}, None
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._rows)

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise PlaneFailed(self._failure)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of ``path`` when the block ends well."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
