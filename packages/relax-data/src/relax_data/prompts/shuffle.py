"""The order of a streaming epoch as a function: position -> row, without a pass over the data.

An epoch is a stream of pieces, cut into windows of ``buffer_size`` rows, each window in random order. Pieces are short
runs of neighbouring rows (a few lines of jsonl, a part of a parquet row group). Which piece comes when is random over
the whole data, and the parts of :data:`LANES` large row groups are interleaved, so a window is a mix from everywhere.
All of it follows from seed, epoch and position: the content of the shuffle buffer is never stored, it is read again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from relax_data.prompts.order import permutation

LANES = 4
"""Units larger than ``buffer_size / LANES`` are cut into such parts, and so many units are read side by side."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of file ``file``, at stream rows ``first`` and on."""

    file: int
    start: int
    stop: int
    first: int


class EpochPlan:
    """Order of the rows of one epoch.

    Args:
        units: for each file int64 ``[k + 1]``: the ends of its cheaply readable ranges, within its slice.
        buffer_size: rows of a window.
        shuffle: False is file order.
        seed, epoch: decide the order.
    """

    def __init__(self, units: Sequence[np.ndarray], buffer_size: int, *, shuffle: bool, seed: int, epoch: int):
        self._buffer_size = buffer_size
        self._shuffle, self._key = shuffle, (seed, epoch)
        files = np.repeat(np.arange(len(units)), [max(0, len(u) - 1) for u in units])
        starts = np.concatenate([u[:-1] for u in units]) if units else np.zeros(0, dtype=np.int64)
        stops = np.concatenate([u[1:] for u in units]) if units else np.zeros(0, dtype=np.int64)
        if shuffle:
            order = permutation(len(starts), *self._key)
            files, starts, stops = files[order], starts[order], stops[order]
            largest = max(1, -(-buffer_size // LANES))
            if len(starts) and int((stops - starts).max()) > largest:
                files, starts, stops = _interleave(files, starts, stops, largest)
        self._files, self._starts, self._stops = files, starts, stops
        self._firsts = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int64)
        self.count = int(self._firsts[-1])

    def window_of(self, position: int) -> int:
        """Number of the window that ``position`` lies in."""
        return position // self._buffer_size

    def bounds(self, window: int) -> tuple[int, int]:
        """First position of a window, and the one after its last."""
        return window * self._buffer_size, min((window + 1) * self._buffer_size, self.count)

    def pieces(self, window: int) -> list[Piece]:
        """The reads that a window needs: its stream rows, piece by piece, ``first`` counted from its start."""
        begin, end = self.bounds(window)
        at = int(np.searchsorted(self._firsts, begin, side="right")) - 1
        found = []
        while at < len(self._starts) and (first := int(self._firsts[at])) < end:
            start = int(self._starts[at]) + max(0, begin - first)
            stop = min(int(self._stops[at]), int(self._starts[at]) + end - first)
            if stop > start:
                found.append(Piece(int(self._files[at]), start, stop, max(first, begin) - begin))
            at += 1
        return found

    def order(self, window: int) -> np.ndarray:
        """For each position of the window the stream row it takes, counted from the window's start."""
        begin, end = self.bounds(window)
        if not self._shuffle:
            return np.arange(end - begin)
        return permutation(end - begin, *self._key, window + 1)


def _interleave(
    files: np.ndarray, starts: np.ndarray, stops: np.ndarray, largest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cuts units into parts of at most ``largest`` rows; ``LANES`` units take turns, each with its next part."""
    out: list[tuple[int, int, int]] = []
    waiting = iter(zip(files.tolist(), starts.tolist(), stops.tolist(), strict=True))
    lanes = [unit for _, unit in zip(range(LANES), waiting, strict=False)]
    while lanes:
        kept = []
        for file, start, stop in lanes:
            end = min(start + largest, stop)
            out.append((file, start, end))
            if end < stop:
                kept.append((file, end, stop))
            elif (unit := next(waiting, None)) is not None:
                kept.append(unit)
        lanes = kept
    parts = np.array(out, dtype=np.int64)
    return parts[:, 0], parts[:, 1], parts[:, 2]
