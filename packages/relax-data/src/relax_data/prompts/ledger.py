"""Where every prompt is: out, buffered, partial, trained, or dropped with a reason. Never in two places, never nowhere.

The ledger is saved with the model of a training step, so that both roll back together: what was trained after the last
checkpoint is open again after a crash, and is trained by the model that has not seen it.
"""

import collections
import dataclasses
import enum
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from relax_data.errors import DataError
from relax_data.serialization import from_plain, to_plain
from relax_data.types import Prompt


class PromptState(enum.StrEnum):
    """What a prompt is doing."""

    OUT = "out"
    """Handed to the rollout; its responses are being generated."""
    PARTIAL = "partial"
    """Interrupted; its tokens so far are in the buffer, and the next rollout goes on with it."""
    BUFFERED = "buffered"
    """Its group is complete and waits for a training step."""
    TRAINED = "trained"
    """A training step has consumed it."""
    DROPPED = "dropped"
    """It will not be trained, for a reason that was counted."""

    @property
    def open(self) -> bool:
        """True while something is still to be done with it."""
        return self in (PromptState.OUT, PromptState.PARTIAL, PromptState.BUFFERED)


class LedgerError(RuntimeError):
    """A prompt was about to be lost or used twice."""


@dataclasses.dataclass(slots=True)
class _Entry:
    prompt: Prompt
    state: PromptState


class PromptLedger:
    """Keeps account of the prompts of a run by their id.

    Open prompts are held whole, so that after a crash those that were out can be generated again although the data
    cursor is past them; closed ones take no memory once all before them are closed. Not thread-safe: one owner.

    Attributes:
        step: training steps whose prompts it has booked as trained.
        trained: number of prompts trained.
        dropped: number of prompts dropped, by reason.
    """

    def __init__(self) -> None:
        self.step = 0
        self.trained = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._open: dict[int, _Entry] = {}
        self._closed_below = 0
        self._closed: set[int] = set()

    def hand_out(self, prompts: Iterable[Prompt]) -> None:
        """New prompts of the source go to the rollout.

        Raises:
            LedgerError: one was handed out before. Nothing is booked then.
        """
        new = list(prompts)
        seen: set[int] = set()
        for prompt in new:
            if prompt.prompt_id in seen or prompt.prompt_id in self._open or self._is_closed(prompt.prompt_id):
                raise LedgerError(f"{_name(prompt)} is handed out twice")
            seen.add(prompt.prompt_id)
        for prompt in new:
            self._open[prompt.prompt_id] = _Entry(prompt, PromptState.OUT)

    def interrupt(self, prompt_ids: Iterable[int]) -> None:
        """Out -> partial: generation stopped, what there is was kept."""
        self._move(prompt_ids, (PromptState.OUT,), PromptState.PARTIAL)

    def buffer(self, prompt_ids: Iterable[int]) -> None:
        """Out -> buffered: the group is complete and waits."""
        self._move(prompt_ids, (PromptState.OUT,), PromptState.BUFFERED)

    def take_back(self, prompt_ids: Iterable[int]) -> None:
        """Partial or buffered -> out: the next rollout goes on with it."""
        self._move(prompt_ids, (PromptState.PARTIAL, PromptState.BUFFERED), PromptState.OUT)

    def train(self, prompt_ids: Iterable[int]) -> None:
        """Out or buffered -> trained, for all prompts of one training step; ``step`` goes up by one."""
        closed = self._move(prompt_ids, (PromptState.OUT, PromptState.BUFFERED), PromptState.TRAINED)
        self.trained += closed
        self.step += 1

    def drop(self, prompt_ids: Iterable[int], reason: str) -> None:
        """Open -> dropped, counted under ``reason`` (short, the same for all prompts of a kind)."""
        if not reason:
            raise ValueError("a prompt is dropped for a reason: say which")
        opened = (PromptState.OUT, PromptState.PARTIAL, PromptState.BUFFERED)
        self.dropped[reason] += self._move(prompt_ids, opened, PromptState.DROPPED)

    def state_of(self, prompt_id: int) -> PromptState | None:
        """State of an open prompt, None for one that was never handed out or is closed."""
        entry = self._open.get(prompt_id)
        return None if entry is None else entry.state

    def open(self, *states: PromptState) -> list[Prompt]:
        """The open prompts in these states (all when none is named), by id."""
        return [e.prompt for _, e in sorted(self._open.items()) if not states or e.state in states]

    def recover(self, held: Iterable[int] = ()) -> list[Prompt]:
        """After loading: the prompts to be generated again, because nobody has anything of them any more.

        Args:
            held: prompt_ids whose samples were restored from the checkpoint's buffer.

        Returns:
            The open prompts that are not held. They are out from now on: generate them first.

        Raises:
            LedgerError: a held prompt is not open: buffer and ledger are of different steps.
        """
        kept = set(held)
        if strangers := sorted(kept - self._open.keys()):
            raise LedgerError(f"the buffer holds prompt {strangers[0]}, which the ledger of step {self.step} closed")
        lost = [e for _, e in sorted(self._open.items()) if e.prompt.prompt_id not in kept]
        for entry in lost:
            entry.state = PromptState.OUT
        return [e.prompt for e in lost]

    def counts(self) -> dict[str, int]:
        """Number of prompts by state, dropped ones by reason too (``dropped/REASON``), for logs."""
        by_state = collections.Counter(e.state.value for e in self._open.values())
        return {
            **{s.value: by_state[s.value] for s in PromptState if s.open},
            "trained": self.trained,
            "dropped": self.dropped.total(),
            **{f"dropped/{reason}": n for reason, n in sorted(self.dropped.items())},
        }

    def check(self, handed_out: int) -> None:
        """Raises :class:`LedgerError` unless each of the first ``handed_out`` prompts is open, trained or dropped."""
        booked = len(self._open) + self.trained + self.dropped.total()
        if booked != handed_out:
            raise LedgerError(f"{handed_out} prompts were handed out and {booked} are accounted for: {self.counts()}")

    def state_dict(self) -> dict[str, Any]:
        """All of it; JSON-able when the rows were, else :func:`relax_data.serialization.to_plain` makes it so."""
        return {
            "step": self.step,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "open": [{**dataclasses.asdict(e.prompt), "state": e.state.value} for _, e in sorted(self._open.items())],
            "closed_below": self._closed_below,
            "closed": _ranges(sorted(self._closed)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes the ledger that ``state`` was taken of. Call :meth:`recover` next."""
        entries = {}
        for saved in state["open"]:
            fields = dict(saved)
            entry_state = PromptState(fields.pop("state"))
            entries[saved["prompt_id"]] = _Entry(Prompt(**fields), entry_state)
        self._open = entries
        self.step, self.trained = state["step"], state["trained"]
        self.dropped = collections.Counter(state["dropped"])
        self._closed_below = state["closed_below"]
        self._closed = {i for first, end in state["closed"] for i in range(first, end)}

    def save(self, path: str | Path) -> None:
        """Writes the ledger; the file is either the old one or the new one, whole, at any moment.

        Put it into the checkpoint folder before the checkpoint is declared complete.
        """
        path = Path(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(to_plain(self.state_dict(), "the prompt ledger", objects=True), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | Path, *, step: int | None = None) -> "PromptLedger":
        """Reads a ledger.

        Args:
            path: what :meth:`save` wrote.
            step: training steps of the model it is loaded with.

        Raises:
            DataError: it cannot be read, or it belongs to another step than the model.
        """
        ledger = cls()
        try:
            with open(path) as file:
                ledger.load_state_dict(from_plain(json.load(file)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no readable prompt ledger: {error}") from error
        if step is not None and ledger.step != step:
            raise DataError(
                f"{path} is the ledger after {ledger.step} training steps and the model has {step}: "
                "load both from the same checkpoint"
            )
        return ledger

    def _move(self, prompt_ids: Iterable[int], allowed: Sequence[PromptState], to: PromptState) -> int:
        moved = list(prompt_ids)
        if len(set(moved)) != len(moved):
            raise LedgerError(f"a prompt is named twice for {to}: {sorted(moved)}")
        for i in moved:
            entry = self._open.get(i)
            if entry is None:
                known = "closed already" if self._is_closed(i) else "never handed out"
                raise LedgerError(f"prompt {i} cannot become {to}: it was {known}")
            if entry.state not in allowed:
                raise LedgerError(f"{_name(entry.prompt)} cannot become {to}: it is {entry.state}")
        for i in moved:
            if to.open:
                self._open[i].state = to
            else:
                del self._open[i]
                self._closed.add(i)
        while self._closed_below in self._closed:
            self._closed.remove(self._closed_below)
            self._closed_below += 1
        return len(moved)

    def _is_closed(self, prompt_id: int) -> bool:
        return prompt_id < self._closed_below or prompt_id in self._closed


def _name(prompt: Prompt) -> str:
    return f"prompt {prompt.prompt_id} ({prompt.source})"


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """``[1, 2, 3, 7]`` -> ``[[1, 4], [7, 8]]``."""
    if not numbers:
        return []
    cuts = [i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1]
    return [[numbers[i], numbers[j - 1] + 1] for i, j in pairwise([0, *cuts, len(numbers)])]
