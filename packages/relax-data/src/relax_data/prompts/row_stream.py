"""Rows of files at positions of one endless stream, in file order or through a seeded shuffle buffer."""

import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_data.errors import DataError
from relax_data.prompts.shuffle import EpochPlan
from relax_data.prompts.source import FileSet, nothing_left
from relax_data.prompts.template import Drops, SourcedRow
from relax_data.readers.base import Block
from relax_data.readers.files import FileSlice, warn_of_repeats
from relax_data.readers.open import open_rows

_DECODE_ROWS = 1024


class RowStream:
    """Row at a position of the endless stream, cheap when positions rise.

    Attributes:
        count: rows of an epoch, blank lines included.
    """

    def __init__(self, files: Sequence[FileSlice], buffer_size: int, *, shuffle: bool, seed: int):
        """Opens the files.

        Args:
            files: in their order.
            buffer_size: rows of the shuffle buffer.
            shuffle: False is file order.
            seed: of the shuffle.

        Raises:
            DataError: a file cannot be read, or there is no row at all.
        """
        self._readers = [open_rows(f.path) for f in files]
        warn_of_repeats(files, [r.count for r in self._readers])
        self._buffer_size, self._shuffle, self._seed = buffer_size, shuffle, seed
        self._units = [_units_within(r.units, *f.bounds(r.count)) for r, f in zip(self._readers, files, strict=True)]
        self._files = FileSet(
            [{**r.fingerprint(), "slice": [f.start, f.stop]} for r, f in zip(self._readers, files, strict=True)]
        )
        self.count = sum(int(u[-1] - u[0]) for u in self._units if len(u))
        if self.count == 0:
            raise DataError(nothing_left([f.path for f in files], Drops(), 0))
        self._epoch, self._plan = -1, EpochPlan([], buffer_size, shuffle=shuffle, seed=seed, epoch=0)
        self._window: _Window | None = None

    def state(self) -> dict[str, Any]:
        """JSON values: the files, and what the order depends on."""
        return {
            "files": self._files.state(),
            "rows": self.count,
            "buffer_size": self._buffer_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Holds that files and order are those of ``state``.

        Raises:
            DataError: they are not; the message names the file, or the flag.
        """
        self._files.check(state["files"])
        for key, flag in (
            ("shuffle", "--rollout-shuffle"),
            ("seed", "--rollout-seed"),
            ("buffer_size", "--streaming-buffer-size"),
        ):
            now = self.state()[key]
            # File order depends on neither seed nor buffer.
            if state[key] != now and (key == "shuffle" or self._shuffle):
                raise DataError(
                    f"{flag} is {now} and was {state[key]} at the checkpoint: an exact resume needs the same order"
                )

    def at(self, position: int) -> SourcedRow | None:
        """The row at ``position``, or None for a blank line."""
        epoch, within = divmod(position, self.count)
        if epoch != self._epoch:
            self._plan = EpochPlan(self._units, self._buffer_size, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
            self._epoch, self._window = epoch, None
        if self._window is None or not self._window.first <= within < self._window.end:
            # The old window goes before the new one is read: two would double the memory.
            self._window = None
            self._window = self._read(self._plan.window_of(within))
        return self._window.row(within - self._window.first)

    def _read(self, number: int) -> "_Window":
        pieces = self._plan.pieces(number)
        blocks = [self._readers[p.file].read(p.start, p.stop) for p in pieces]
        names = [(self._readers[p.file].name, p.start) for p in pieces]
        return _Window(self._plan.bounds(number), [p.first for p in pieces], blocks, names, self._plan.order(number))

    def close(self) -> None:
        """Closes the files."""
        for reader in self._readers:
            reader.close()


def _units_within(units: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The ends of ranges between ``start`` and ``stop``, these two included; empty when there is nothing between."""
    if stop <= start:
        return np.zeros(0, dtype=np.int64)
    inside = units[(units > start) & (units < stop)]
    return np.concatenate([[start], inside, [stop]]).astype(np.int64)


class _Window:
    """Rows of one window in memory, decoded a few at a time."""

    def __init__(
        self,
        bounds: tuple[int, int],
        firsts: list[int],
        blocks: list[Block],
        names: list[tuple[str, int]],
        order: np.ndarray,
    ):
        self.first, self.end = bounds
        self._firsts, self._blocks, self._names, self._order = firsts, blocks, names, order
        self._decoded: list[SourcedRow | None] = []
        self._decoded_from = 0

    def row(self, i: int) -> SourcedRow | None:
        if not self._decoded_from <= i < self._decoded_from + len(self._decoded):
            self._decode(i)
        return self._decoded[i - self._decoded_from]

    def _decode(self, i: int) -> None:
        wanted = self._order[i : i + _DECODE_ROWS].tolist()
        by_block: dict[int, list[tuple[int, int]]] = {}
        for place, stream_row in enumerate(wanted):
            block = bisect.bisect_right(self._firsts, stream_row) - 1
            by_block.setdefault(block, []).append((place, stream_row - self._firsts[block]))
        out: list[SourcedRow | None] = [None] * len(wanted)
        for block, places in by_block.items():
            name, start = self._names[block]
            found = self._blocks[block].rows([offset for _, offset in places])
            for (place, offset), row in zip(places, found, strict=True):
                out[place] = None if row is None else SourcedRow(f"{name}:{start + offset + 1}", row)
        self._decoded, self._decoded_from = out, i
