"""Rows of one file: cheap random access, bounded memory, errors with file and line."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from relax_data.errors import DataError

Row = dict[str, Any]


class Block(Protocol):
    """Some rows of a file, in memory, not yet decoded."""

    def rows(self, offsets: Sequence[int]) -> list[Row | DataError | None]:
        """The rows at ``offsets``: decoded, or the error of an unreadable one, or None for a blank line."""
        ...


class RowFile(Protocol):
    """Random access to the rows of one file.

    Attributes:
        name: what messages call it.
        count: number of rows; for jsonl of physical lines, blank ones too, so that numbers match an editor's.
        units: int64 ``[k + 1]``, increasing row numbers: a range between two neighbours is cheap to read.
    """

    name: str
    count: int
    units: np.ndarray

    def read(self, start: int, stop: int) -> Block:
        """Rows ``start`` to ``stop`` (0-based, ``stop`` not included)."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """Changes when the file changes: ``{"name", "size", "ends"}``."""
        ...

    def close(self) -> None:
        """Closes the file; nothing is read afterwards."""
        ...
