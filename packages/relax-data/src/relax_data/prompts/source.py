"""Prompts for the rollout: epoch after epoch, shuffled, resumable."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from relax_data.errors import DataError
from relax_data.prompts.order import permutation
from relax_data.prompts.picture_digests import PictureDigests
from relax_data.prompts.template import Drops, PromptBuilder, SourcedRow
from relax_data.readers.base import RowFile
from relax_data.readers.files import FileSlice, warn_of_repeats
from relax_data.readers.open import open_rows
from relax_data.settings import DataSettings
from relax_data.types import Prompt

logger = logging.getLogger(__name__)

_READ_ROWS = 1024
_PICTURED_ROWS = 16
"""Rows that are read at a time where rows may have pictures: the tensors of all of them are in memory together."""
_MOST_PICTURE_BYTES = 8 << 30
"""Most bytes of the tensors of all pictures that are kept in memory."""


_MOST_NAMED = 5
"""Rows that a message names."""


class PromptSource(Protocol):
    """Gives the rollout its prompts, in an order that can be resumed."""

    @property
    def drops(self) -> Drops:
        """Rows that became no prompt, with reasons."""
        ...

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, over the ends of epochs; fewer only when ``num_epoch`` epochs are used up."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Position, as a small JSON-able dictionary."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where ``state`` was taken.

        Raises:
            DataError: the data, the seed or the filter is another one than then.
        """
        ...

    def restore(self, prompt: Prompt) -> None:
        """Gives a prompt of a checkpoint what is not saved with it: the tensors of its pictures.

        Raises:
            DataError: a picture cannot be read any more, or is another than it was.
        """
        ...

    def __len__(self) -> int:
        """Prompts of an epoch, after filters. A source that cannot know it before its end raises ``TypeError``."""
        ...


@dataclasses.dataclass(slots=True)
class _Stored:
    """A prompt with compact tokens: a list of Python integers would take ten times the memory."""

    prompt: Prompt
    ids: np.ndarray


class MemoryPromptSource:
    """All prompts in memory, tokenised once. Made by :func:`relax_data.prompts.open.open_prompts`."""

    def __init__(
        self,
        files: Sequence[FileSlice],
        builder: PromptBuilder,
        settings: DataSettings,
        *,
        num_epoch: int | None = None,
    ):
        self._settings = settings
        self._num_epoch = num_epoch
        self._builder = builder
        self._prompts: list[_Stored] = []
        self._rows_read = self._picture_bytes = 0
        self._pictures = PictureDigests()
        prints, counts = [], []
        for file in files:
            rows = open_rows(file.path)
            try:
                counts.append(rows.count)
                prints.append({**rows.fingerprint(), "slice": [file.start, file.stop]})
                self._load(rows, file)
            finally:
                rows.close()
        warn_of_repeats(files, counts)
        self._files = FileSet(prints)
        for line in self.drops.lines():
            logger.warning("prompt data: %s", line)
        if not self._prompts:
            raise DataError(nothing_left([f.path for f in files], self.drops, self._rows_read))
        self._epoch = self._position = self._prompt_id = 0
        self._order_of: tuple[int, np.ndarray] | None = None

    def _load(self, rows: RowFile, file: FileSlice) -> None:
        start, stop = file.bounds(rows.count)
        self._rows_read += stop - start
        for batch in _batches(rows, start, stop, _PICTURED_ROWS if self._settings.multimodal_keys else _READ_ROWS):
            for prompt in self._builder.build(batch):
                if prompt is not None:
                    self._prompts.append(_Stored(prompt, np.array(prompt.input_ids, dtype=np.int32)))
                    prompt.input_ids = []
                    self._pictures.add(prompt)
                    self._picture_bytes += sum(array.nbytes for array in prompt.features.values())
            if self._picture_bytes > _MOST_PICTURE_BYTES:
                size = f"{self._picture_bytes / 2**30:.1f} GiB"
                raise DataError(
                    f"the tensors of the pictures of the first {len(self._prompts)} prompts take {size}: add "
                    "--use-streaming-dataset, which makes them as they are needed"
                )

    @property
    def drops(self) -> Drops:
        """Rows that became no prompt, with reasons."""
        return self._builder.drops

    def __len__(self) -> int:
        return len(self._prompts)

    def next(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; fewer only at the end of the last epoch."""
        taken: list[Prompt] = []
        while len(taken) < n and (self._num_epoch is None or self._epoch < self._num_epoch):
            stored = self._prompts[self._order()[self._position]]
            taken.append(
                dataclasses.replace(
                    stored.prompt, prompt_id=self._prompt_id, epoch=self._epoch, input_ids=stored.ids.tolist()
                )
            )
            self._prompt_id += 1
            self._position += 1
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
        return taken

    def restore(self, prompt: Prompt) -> None:
        """Makes the tensors of a prompt's pictures anew; :class:`DataError` when they are not as they were."""
        self._builder.restore(prompt)

    def _order(self) -> np.ndarray:
        if self._order_of is None or self._order_of[0] != self._epoch:
            n = len(self._prompts)
            if self._settings.rollout_shuffle:
                order = permutation(n, self._settings.rollout_seed, self._epoch)
            else:
                order = np.arange(n)
            self._order_of = (self._epoch, order)
        return self._order_of[1]

    def state_dict(self) -> dict[str, Any]:
        """The place in the order, and what the order depends on."""
        return {
            "kind": "memory",
            "files": self._files.state(),
            "rendering": self._builder.rendering(),
            "pictures": self._pictures.state(),
            "prompts": len(self._prompts),
            "shuffle": self._settings.rollout_shuffle,
            "seed": self._settings.rollout_seed,
            "epoch": self._epoch,
            "position": self._position,
            "prompt_id": self._prompt_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of :meth:`state_dict`; :class:`DataError` when data or order differ."""
        check_kind(state, "memory")
        self._files.check(state["files"])
        check_same_order(state, self._settings)
        self._builder.check_rendering(state)
        if state["prompts"] != len(self._prompts):
            gone = self._pictures.among_changed(state.get("pictures"), self.drops.unusable_rows())
            raise DataError(
                f"the checkpoint has {state['prompts']} prompts an epoch, now there are {len(self._prompts)}: "
                + (
                    f"put the pictures back, --skip-bad-rows leaves out {'; '.join(gone[:_MOST_NAMED])}"
                    if gone
                    else "--rollout-max-prompt-len, --skip-bad-rows, the keys or the tokenizer must be as they were"
                )
            )
        self._pictures.check(state.get("pictures"))
        self._epoch, self._position, self._prompt_id = state["epoch"], state["position"], state["prompt_id"]


class FileSet:
    """The state of the data files, to tell on resume that one has changed.

    Args:
        prints: fingerprint of each file, with ``name``.
    """

    _NAMED = 64
    """Up to so many files are kept one by one, to name the changed one; above that only a hash of all."""

    def __init__(self, prints: Sequence[dict[str, Any]]):
        self._prints = list(prints)

    def state(self) -> dict[str, Any]:
        """Number and hash of the fingerprints, and each of them where they are few."""
        text = json.dumps(self._prints, sort_keys=True)
        return {
            "count": len(self._prints),
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "each": self._prints if len(self._prints) <= self._NAMED else None,
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Raises :class:`DataError` when the files are not those of ``saved``."""
        if saved["hash"] == self.state()["hash"]:
            return
        for old, new in zip(saved["each"] or [], self._prints, strict=False):
            if old["name"] != new["name"]:
                raise DataError(f"the checkpoint has read {old['name']} where --prompt-data now names {new['name']}")
            if old["size"] != new["size"]:
                what = f"has {new['size']} bytes, at the checkpoint it had {old['size']}"
            elif old["ends"] != new["ends"]:
                what = "begins or ends differently than at the checkpoint"
            elif old != new:
                what = "is sliced differently than at the checkpoint"
            else:
                continue
            raise DataError(
                f"{new['name']} {what}: an exact resume needs the same data; put it back, or start a new run from "
                "the saved weights (--hf-checkpoint instead of --load)"
            )
        raise DataError(
            f"--prompt-data names {len(self._prints)} files that differ from the {saved['count']} of the checkpoint: "
            "an exact resume needs the same data"
        )


def check_kind(state: dict[str, Any], kind: str) -> None:
    """Raises :class:`DataError` when ``state`` was taken from another kind of source."""
    if state.get("kind") != kind:
        now = "with" if kind == "stream" else "without"
        raise DataError(
            f"the checkpoint's data position is of kind {state.get('kind')!r} and this run reads {now} "
            "--use-streaming-dataset: use the flag as it was"
        )


def check_same_order(state: dict[str, Any], settings: DataSettings) -> None:
    """Raises :class:`DataError` when shuffling is not as it was."""
    if state["shuffle"] != settings.rollout_shuffle:
        raise DataError(f"--rollout-shuffle was {state['shuffle']} at the checkpoint: an exact resume needs it so")
    if settings.rollout_shuffle and state["seed"] != settings.rollout_seed:
        raise DataError(
            f"--rollout-seed is {settings.rollout_seed} and was {state['seed']} at the checkpoint: "
            "an exact resume needs the same order"
        )


def _batches(rows: RowFile, start: int, stop: int, size: int) -> Iterator[list[SourcedRow]]:
    for begin in range(start, stop, size):
        end = min(begin + size, stop)
        found = rows.read(begin, end).rows(range(end - begin))
        yield [SourcedRow(f"{rows.name}:{begin + i + 1}", row) for i, row in enumerate(found) if row is not None]


def nothing_left(paths: Sequence[str], drops: Drops, rows: int) -> str:
    """Message for data without a usable row: what was dropped and why, and how many of ``rows`` are blank lines."""
    shown = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    reasons = drops.lines() or ([f"all {rows} lines are blank"] if rows else ["there are no rows"])
    return f"no prompt in {shown}: " + "; ".join(reasons) + ". Mend the rows or what drops them"
