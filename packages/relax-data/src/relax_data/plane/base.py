"""The exchange between rollout and trainers: rows with columns that become ready at different times.

A producer puts rows with some columns, others add columns later, and a consumer takes rows once the columns it asks for
are there. Each row goes to each consumer once; all ranks of one consumer share its name. A row stays until it is
cleared: taking is a promise to work on it, clearing says that it was done.

There are two planes behind one protocol: :class:`relax_data.plane.local.LocalPlane` in one process (colocate), and
:class:`relax_data.plane.transferqueue.TransferQueuePlane` over TransferQueue (fully async). Calls block; an asyncio
caller wraps them in ``asyncio.to_thread``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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

    def fetch(self, ids: Sequence[int], columns: Sequence[str]) -> Rows:
        """The rows of these ids, in that order. Nobody is booked as having them: they may be fetched and taken again.

        Raises:
            PlaneError: a row is not there, or lacks one of ``columns``.
            PlaneFailed: :meth:`fail` was called, or the plane broke.
        """
        ...

    def check(self) -> None:
        """Asks every part of the plane for a sign of life.

        Raises:
            PlaneFailed: :meth:`fail` was called, or a part has died or is silent; the message names it.
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
    """The message of a ``take`` that timed out."""
    return (
        f"consumer {consumer!r} waited {timeout:.0f} s for {n} rows with columns {', '.join(columns)}: "
        f"{ready} are ready, {lacking} more lack some of these columns"
    )


def not_there(ids: Sequence[int]) -> str:
    """The message about rows that are asked for and that the plane does not have."""
    return f"rows {list(ids[:5])} are not there: they were cleared or never put"
