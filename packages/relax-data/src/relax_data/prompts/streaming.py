"""Rows as they are needed: memory that does not grow with the files, and resume at any row."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from relax_data.errors import DataError
from relax_data.prompts.row_stream import RowStream
from relax_data.prompts.source import check_kind, check_same_order, nothing_left
from relax_data.prompts.template import Drops, PromptBuilder, SourcedRow
from relax_data.readers.base import Row
from relax_data.readers.files import FileSlice, resolve_files
from relax_data.settings import DataSettings
from relax_data.types import Prompt

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class StreamedRow:
    """One row of the stream.

    Attributes:
        prompt: its value under the input key.
        row: the whole row.
        source: ``file:line``, 1-based.
        epoch: 0-based.
    """

    prompt: Any
    row: Row
    source: str
    epoch: int


class StreamingDataset:
    """Rows of jsonl and parquet files, in file order or through a seeded shuffle buffer, without end.

    Iterating gives the rows up to the end of the current epoch; iterating again goes on where that stopped, with the
    next epoch in an order of its own. With ``world_size`` readers, reader ``rank`` gets every ``world_size``-th row of
    the one global order.

    The state of any moment, loaded into a dataset over the same files, goes on with exactly the rows that an
    uninterrupted run would have given. The number of readers may be another one then: readers that took equally many
    rows have one state between them, and otherwise ``load_state_dict`` takes the list of all their states.

    Args:
        paths: files, folders, globs, slices and ``hf://`` addresses, as ``--prompt-data`` takes them.
        buffer_size: rows of the shuffle buffer; the only thing, with the length of a row, that memory depends on.
        shuffle: False is file order.
        seed: of the shuffle.
        rank, world_size: which of how many readers this is.
        input_key: key of ``StreamedRow.prompt``. None takes ``input``, or ``prompt`` where a row has no ``input``.
        skip_bad_rows: counts unreadable rows in ``drops`` instead of raising.

    Raises:
        DataError: a file is missing, empty or damaged.
    """

    def __init__(  # noqa: PLR0913  # the options of a dataset, each with a default
        self,
        paths: str | Sequence[str] | Sequence[FileSlice],
        *,
        buffer_size: int = 10000,
        shuffle: bool = True,
        seed: int = 42,
        rank: int = 0,
        world_size: int = 1,
        input_key: str | None = None,
        skip_bad_rows: bool = False,
    ):
        if buffer_size < 1:
            raise ValueError(f"buffer_size is {buffer_size}: must be at least 1")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} readers: must be 0 to {world_size - 1}")
        files = _slices(paths)
        self._rows = RowStream(files, buffer_size, shuffle=shuffle, seed=seed)
        self._paths = [f.path for f in files]
        self._turns = _Turns(rank=rank, world_size=world_size)
        self._input_key, self._skip_bad_rows = input_key, skip_bad_rows
        self.drops = Drops()
        self._unusable = 0  # rows in a row, over epochs

    @property
    def rows_per_epoch(self) -> int:
        """Rows of all readers together, blank lines included."""
        return self._rows.count

    @property
    def epoch(self) -> int:
        """0-based epoch of the next row."""
        return self._turns.next() // self._rows.count

    def __iter__(self) -> Iterator[StreamedRow]:
        count = self._rows.count
        position = self._turns.next()
        end = (position // count + 1) * count
        while (position := self._turns.next()) < end:
            sourced = self._rows.at(position)
            # Taken before it is handed out: a state saved while the caller works on the row does not repeat it.
            self._turns.take()
            self._unusable += 1
            if sourced is None:
                continue
            row = sourced.row if isinstance(sourced.row, DataError) else self._item(sourced, position)
            if isinstance(row, StreamedRow):
                self._unusable = 0
                yield row
            elif self._skip_bad_rows:
                self.drops.add("unusable row (skip_bad_rows)", str(row))
            else:
                raise row
        if self._unusable >= count:
            # Who loops over epochs would do so for ever. One of several readers has read its share of as many epochs.
            raise DataError(nothing_left(self._paths, self.drops, count))

    def _item(self, sourced: SourcedRow, position: int) -> StreamedRow | DataError:
        row = sourced.row
        assert isinstance(row, dict)
        key = self._input_key
        if key is None:
            key = "input" if "input" in row else "prompt"
        if key not in row:
            names = ", ".join(map(repr, row)) or "no key"
            return DataError(f"{sourced.source}: key {key!r} is missing (the row has {names}); input_key names it")
        return StreamedRow(row[key], row, sourced.source, position // self._rows.count)

    def state_dict(self) -> dict[str, Any]:
        """Position, JSON-able and small: a few numbers, and one fingerprint a file for up to 64 files."""
        return {"kind": "stream", **self._rows.state(), "turns": self._turns.state()}

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Goes on where ``state`` was taken; a list holds the states of all readers of then, in any order.

        Raises:
            DataError: a file has changed since (size, first or last bytes), or order or buffer are others.
        """
        states = [state] if isinstance(state, dict) else list(state)
        for s in states:
            check_kind(s, "stream")
            self._rows.check(s)
        self._turns.load([s["turns"] for s in states])

    def close(self) -> None:
        """Closes the files."""
        self._rows.close()


class StreamingPromptSource:
    """A :class:`relax_data.prompts.source.PromptSource` over files of any size. Made by ``open_prompts``."""

    def __init__(
        self,
        files: Sequence[FileSlice],
        builder: PromptBuilder,
        settings: DataSettings,
        *,
        num_epoch: int | None = None,
    ):
        self._settings, self._builder, self._num_epoch = settings, builder, num_epoch
        self._rows = RowStream(
            files, settings.streaming_buffer_size, shuffle=settings.rollout_shuffle, seed=settings.rollout_seed
        )
        self._files = files
        self._position = self._prompt_id = 0
        self._found_in_epoch = 0
        if not settings.skip_bad_rows and (first := self._rows.at(0)) is not None:
            # A wrong --input-key is wrong in the first row already: better said before engines and trainers start.
            builder.check(first)

    @property
    def drops(self) -> Drops:
        """Rows that became no prompt, with reasons."""
        return self._builder.drops

    def __len__(self) -> int:
        raise TypeError("a streaming source knows how many prompts pass its filters only after an epoch")

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; fewer only at the end of the last epoch. One that raises takes none."""
        before = (self._position, self._prompt_id, self._found_in_epoch)
        try:
            return self._next(n)
        except DataError:
            # Whoever goes on after the error asks for the same prompts again: none of this call is lost.
            self._position, self._prompt_id, self._found_in_epoch = before
            raise

    def restore(self, prompt: Prompt) -> None:
        """Makes the tensors of a prompt's pictures anew; :class:`DataError` when they are not as they were."""
        self._builder.restore(prompt)

    def _next(self, n: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < n and not self._exhausted:
            # Never more rows than prompts are missing: a row that was read has been handed out or dropped.
            batch = self._take(n - len(taken))
            epochs = [epoch for epoch, _ in batch]
            for epoch, prompt in zip(epochs, self._builder.build(r for _, r in batch), strict=True):
                if prompt is not None:
                    prompt.prompt_id, prompt.epoch = self._prompt_id, epoch
                    self._prompt_id += 1
                    self._found_in_epoch += 1
                    taken.append(prompt)
            self._check_not_barren()
        return taken

    @property
    def _exhausted(self) -> bool:
        return self._num_epoch is not None and self._position >= self._num_epoch * self._rows.count

    def _take(self, n: int) -> list[tuple[int, SourcedRow]]:
        """Up to ``n`` rows with their epochs, at most to the end of the epoch; blank lines are passed over."""
        count = self._rows.count
        batch: list[tuple[int, SourcedRow]] = []
        while len(batch) < n and not self._exhausted:
            row = self._rows.at(self._position)
            if row is not None:
                batch.append((self._position // count, row))
            self._position += 1
            if self._position % count == 0:
                break
        return batch

    def _check_not_barren(self) -> None:
        """An epoch without a single prompt would be followed by another such one, for ever."""
        if self._position % self._rows.count == 0:
            for line in self.drops.lines():
                logger.warning("prompt data, after epoch %d: %s", self._position // self._rows.count, line)
            if not self._found_in_epoch:
                raise DataError(nothing_left([f.path for f in self._files], self.drops, self._rows.count))
            self._found_in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, and what the order depends on."""
        return {
            "kind": "stream",
            **self._rows.state(),
            "rendering": self._builder.rendering(),
            "position": self._position,
            "prompt_id": self._prompt_id,
            "found_in_epoch": self._found_in_epoch,
            "drops": dict(self.drops.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position of :meth:`state_dict`; :class:`DataError` when data or order differ."""
        check_kind(state, "stream")
        check_same_order(state, self._settings)
        self._builder.check_rendering(state)
        self._rows.check(state)
        self._position, self._prompt_id = state["position"], state["prompt_id"]
        self._found_in_epoch = state["found_in_epoch"]
        self.drops.restore(state["drops"])


def _slices(paths: str | Sequence[str] | Sequence[FileSlice]) -> list[FileSlice]:
    if isinstance(paths, str):
        return resolve_files(paths)
    files: list[FileSlice] = []
    for path in paths:
        files += [path] if isinstance(path, FileSlice) else resolve_files(path)
    return files


class _Turns:
    """The positions of the stream that are this reader's, and how far it has come.

    The positions that are left when a run starts or resumes, ``start`` and all after it but those in ``done``, are
    dealt round-robin to the readers. ``done`` is empty unless readers stopped after unequal numbers of rows.
    """

    def __init__(self, *, rank: int, world_size: int):
        self._rank, self._world = rank, world_size
        self._start, self._done = 0, np.zeros(0, dtype=np.int64)
        self._taken = 0

    def next(self) -> int:
        """Position of this reader's next row."""
        return _left(self._start, self._done, self._taken * self._world + self._rank)

    def take(self) -> None:
        self._taken += 1

    def state(self) -> dict[str, Any]:
        return {
            "start": self._start,
            "done": self._done.tolist(),
            "world": self._world,
            "rank": self._rank,
            "taken": self._taken,
        }

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        first = states[0]
        world, start, done = first["world"], first["start"], np.array(first["done"], dtype=np.int64)
        if len(states) == 1:
            # One state speaks for all readers of its run, which then took equally many.
            counts = [first["taken"]] * world
        else:
            if {(s["world"], s["start"], len(s["done"])) for s in states} != {(world, start, len(done))} or sorted(
                s["rank"] for s in states
            ) != list(range(world)):
                raise DataError(f"states of {len(states)} readers that are not the {world} of one run")
            counts = [s["taken"] for s in sorted(states, key=lambda s: s["rank"])]
        least = min(counts)
        ahead = [k * world + r for r, n in enumerate(counts) for k in range(least, n)]
        positions = sorted(_left(start, done, i) for i in ahead)
        self._start = _left(start, done, least * world)
        late = {*done.tolist(), *positions}
        # The new start may itself have been taken already by a reader that was ahead.
        while self._start in late:
            self._start += 1
        self._done = np.array(sorted(p for p in late if p > self._start), dtype=np.int64)
        self._taken = 0


def _left(start: int, done: np.ndarray, i: int) -> int:
    """The ``i``-th position from ``start`` on that is not in ``done`` (rising, all above ``start``)."""
    position = start + i
    while len(done):
        passed = int(np.searchsorted(done, position, side="right"))
        if start + i + passed == position:
            return position
        position = start + i + passed
    return position
