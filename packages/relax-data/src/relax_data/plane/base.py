"""What rollout and trainers exchange: rows with columns that become ready at different times.

A producer puts rows with some columns, others add columns later, and a consumer takes rows once the columns it asks for
are there. Each row goes to each consumer once; all ranks of one consumer share its name. A row stays until it is
cleared: taking is a promise to work on it, clearing says that it was done.

There are two planes behind one protocol: :class:`LocalPlane` in one process (colocate), and
:class:`relax_data.plane.transferqueue.TransferQueuePlane` over TransferQueue (fully async). Calls block; an asyncio
caller wraps them in ``asyncio.to_thread``.
"""

import contextlib
import dataclasses
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Columns = Mapping[str, Sequence[Any]]
"""Column name to one value a row: numpy arrays of any shape, numbers, strings, or anything that pickles."""


class PlaneError(RuntimeError):
    """The plane cannot do what was asked; the message says why."""


class PlaneClosed(PlaneError):
    """No row is left for this consumer, and none will come."""


class PlaneFailed(PlaneError):
    """A producer, or the plane itself, died; the message says who and of what."""


@dataclasses.dataclass(slots=True)
class Rows:
    """Rows that were taken: their ids, and for each column one value a row."""

    ids: list[int]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.ids)


class DataPlane(Protocol):
    """Rows from producers to consumers. Every method may be called from any thread, and any process of the plane."""

    def put(self, columns: Columns) -> list[int]:
        """Adds rows; returns their ids.

        Raises:
            ValueError: there is no column, or columns differ in length.
            PlaneClosed: the plane was closed.
        """
        ...

    def add(self, ids: Sequence[int], columns: Columns) -> None:
        """Adds columns to rows that are there, also after :meth:`close`. A column that exists is replaced.

        Raises:
            PlaneError: a row is not there; nothing is added then.
        """
        ...

    def take(self, consumer: str, columns: Sequence[str], n: int, *, timeout: float) -> Rows:
        """The next ``n`` rows, oldest first, that have all of ``columns`` and that ``consumer`` has not had.

        After :meth:`close` the last call gives fewer when fewer are left.

        Raises:
            TimeoutError: after ``timeout`` seconds; the message says how many rows are ready and what others lack.
            PlaneClosed: nothing is left and nothing will come.
            PlaneFailed: :meth:`fail` was called, or the plane broke.
        """
        ...

    def clear(self, ids: Sequence[int]) -> None:
        """Forgets rows and frees their memory; ids that are not there are passed over."""
        ...

    def close(self) -> None:
        """No more rows will be put. Consumers take what is left."""
        ...

    def fail(self, reason: str) -> None:
        """Wakes every waiting consumer with :class:`PlaneFailed`.

        Whoever supervises a producer calls it at the producer's death.
        """
        ...

    def save(self, path: str | Path) -> None:
        """Writes all rows to ``path``; it is either the old state or the new one, whole, at any moment."""
        ...

    def load(self, path: str | Path) -> None:
        """Restores the rows of :meth:`save`. Those that were taken but not cleared then are given out again."""
        ...

    def __len__(self) -> int:
        """Rows that are there, taken or not."""
        ...


def row_count(columns: Columns) -> int:
    """Number of rows of ``columns``.

    Raises:
        ValueError: there is no column, or they differ in length.
    """
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"columns must be equally long and at least one: {lengths}")
    return next(iter(lengths.values()))


def check_take(columns: Sequence[str], n: int, timeout: float) -> None:
    """Raises ``ValueError`` for arguments of ``take`` that mean nothing."""
    if n < 1 or timeout <= 0 or not columns:
        raise ValueError(f"take needs n >= 1, timeout > 0 and a column: n {n}, timeout {timeout}, columns {columns}")


def waiting_for(consumer: str, columns: Sequence[str], n: int, timeout: float, ready: int, lacking: int) -> str:
    """What the timeout of a ``take`` says."""
    return (
        f"consumer {consumer!r} waited {timeout:.0f} s for {n} rows with columns {', '.join(columns)}: "
        f"{ready} are ready, {lacking} more lack some of these columns"
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
        if row_count(columns) != len(ids):
            raise ValueError(f"{len(ids)} ids but {row_count(columns)} values a column")
        with self._changed:
            self._check_failure()
            if missing := [i for i in ids if i not in self._rows]:
                raise PlaneError(f"rows {missing[:5]} are not there: they were cleared or never put")
            for k, i in enumerate(ids):
                self._rows[i].update({name: values[k] for name, values in columns.items()})
            self._changed.notify_all()

    def take(self, consumer: str, columns: Sequence[str], n: int, *, timeout: float) -> Rows:
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

    def clear(self, ids: Sequence[int]) -> None:
        with self._changed:
            for i in ids:
                self._rows.pop(i, None)
                for taken in self._taken.values():
                    taken.discard(i)
            # A closed plane may have become empty: its consumers must hear of it.
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def save(self, path: str | Path) -> None:
        with self._changed:
            state = {"rows": self._rows, "next_id": self._next_id, "closed": self._closed}
            data = pickle.dumps(state, protocol=5)
        with _replacing(Path(path)) as temporary:
            temporary.write_bytes(data)

    def load(self, path: str | Path) -> None:
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
