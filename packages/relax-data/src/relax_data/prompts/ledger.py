"""The one book of prompts: where each is and what it has so far. Never in two places, never nowhere.

    unread -> OUT <-> PARTIAL          interrupted, or a sample of it starts again
               |         ^
               v         |
            BUFFERED ----+             whole, scored and kept: waits for a training step
               |
               v
            ASSIGNED -> TRAINED        given to a training step; also straight from OUT

    every state before TRAINED -> DROPPED, with a reason

What waits, what runs and what is ready are views of this book (:meth:`PromptLedger.groups`): no other list is kept that
would have to agree with it. It is saved with the model of a training step, so that both roll back together: what was
trained after the last checkpoint is open again after a crash, and is trained by the model that has not seen it.
"""

import collections
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

from relax_data.errors import DataError
from relax_data.prompts.saved_groups import groups_from_state, groups_to_state
from relax_data.types import Prompt, SampleGroup


class PromptState(enum.StrEnum):
    """State of a prompt."""

    OUT = "out"
    """With the rollout that runs: its responses are generated, scored and judged."""
    PARTIAL = "partial"
    """At rest, with responses still to be generated: the next rollout goes on with it, before any new prompt."""
    BUFFERED = "buffered"
    """Its group is whole, scored and kept by the filter, and waits for a training step."""
    ASSIGNED = "assigned"
    """Its group was given to a training step that is not booked as done yet."""
    TRAINED = "trained"
    """A training step has consumed it."""
    DROPPED = "dropped"
    """It will not be trained, for a reason that was counted."""

    @property
    def open(self) -> bool:
        """True while something is still to be done with it."""
        return self not in (PromptState.TRAINED, PromptState.DROPPED)


_AT_REST = {PromptState.OUT: PromptState.PARTIAL, PromptState.ASSIGNED: PromptState.BUFFERED}
"""In what state a prompt is saved: after a load no rollout and no training step runs that could have it."""

_WHOLE = (PromptState.BUFFERED, PromptState.ASSIGNED)


class LedgerError(RuntimeError):
    """A prompt was about to be lost or used twice."""


@dataclasses.dataclass(slots=True)
class _Entry:
    group: SampleGroup
    state: PromptState


class PromptLedger:
    """Keeps account of the prompts of a run by their id, and holds the group of each open one.

    Ids number the prompts of the whole run (0, 1, 2, ...), so a prompt that was handed out and is not open is closed;
    closed prompts take no memory. Not thread-safe: one owner.

    Attributes:
        step: training steps whose prompts it has booked as trained.
        handed_out: number of prompts handed out so far; the id of the next one.
        trained: number of prompts trained.
        dropped: number of prompts dropped, by reason.
    """

    def __init__(self) -> None:
        self.step = 0
        self.handed_out = 0
        self.trained = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._open: dict[int, _Entry] = {}  # by id, ascending: prompts are handed out in this order and never re-enter

    # ------------------------------------------------------------------ transitions

    def hand_out(self, groups: Iterable[SampleGroup]) -> None:
        """Books new prompts of the source as out: unread -> out.

        Raises:
            LedgerError: one was handed out before, or one before it was left out. Nothing is booked then.
        """
        new = list(groups)
        for expected, group in enumerate(new, start=self.handed_out):
            prompt = group.prompt
            if prompt.prompt_id < expected:
                raise LedgerError(
                    f"{_name(prompt)} is handed out twice: prompt {expected} is the next one; ids number the prompts "
                    "of the whole run"
                )
            if prompt.prompt_id > expected:
                raise LedgerError(
                    f"{_name(prompt)} is handed out where prompt {expected} is the next one: that one would be lost; "
                    "ids number the prompts of the whole run"
                )
        for group in new:
            self._open[group.prompt.prompt_id] = _Entry(group, PromptState.OUT)
        self.handed_out += len(new)

    def take_back(self, prompt_ids: Iterable[int]) -> None:
        """Partial -> out: a rollout goes on with them."""
        self._move(prompt_ids, (PromptState.PARTIAL,), PromptState.OUT)

    def interrupt(self, prompt_ids: Iterable[int]) -> None:
        """Out or buffered -> partial: generation stopped, or samples of a whole group start again."""
        self._move(prompt_ids, (PromptState.OUT, PromptState.BUFFERED), PromptState.PARTIAL)

    def buffer(self, prompt_ids: Iterable[int]) -> None:
        """Out -> buffered: the groups are whole, scored and kept."""
        self._move(prompt_ids, (PromptState.OUT,), PromptState.BUFFERED)

    def assign(self, prompt_ids: Iterable[int]) -> None:
        """Out or buffered -> assigned: a training step gets the groups, which are whole and scored."""
        self._move(prompt_ids, (PromptState.OUT, PromptState.BUFFERED), PromptState.ASSIGNED)

    def train(self, prompt_ids: Iterable[int]) -> None:
        """Assigned -> trained, for all prompts of one training step; ``step`` goes up by one."""
        self.trained += self._move(prompt_ids, (PromptState.ASSIGNED,), PromptState.TRAINED)
        self.step += 1

    def drop(self, prompt_ids: Iterable[int], reason: str) -> None:
        """Open -> dropped, counted under ``reason`` (short, the same for all prompts of a kind)."""
        if not reason:
            raise ValueError("a prompt is dropped for a reason: say which")
        opened = [state for state in PromptState if state.open]
        self.dropped[reason] += self._move(prompt_ids, opened, PromptState.DROPPED)

    def _move(self, prompt_ids: Iterable[int], allowed: Sequence[PromptState], to: PromptState) -> int:
        """Moves all of them or none; returns how many."""
        moved = list(prompt_ids)
        if len(set(moved)) != len(moved):
            raise LedgerError(f"a prompt is named twice for {to}: {sorted(moved)}")
        for i in moved:
            entry = self._open.get(i)
            if entry is None:
                known = "closed already" if 0 <= i < self.handed_out else "never handed out"
                raise LedgerError(f"prompt {i} cannot become {to}: it was {known}")
            if entry.state not in allowed:
                raise LedgerError(f"{_name(entry.group.prompt)} cannot become {to}: it is {entry.state}")
            if to in _WHOLE and not entry.group.scored:
                raise LedgerError(f"{_name(entry.group.prompt)} cannot become {to}: its group is not whole and scored")
        for i in moved:
            if to.open:
                self._open[i].state = to
            else:
                del self._open[i]
        return len(moved)

    # ------------------------------------------------------------------ views

    def groups(self, *states: PromptState) -> list[SampleGroup]:
        """The open groups in these states (all when none is named), in the order of the prompts."""
        return [e.group for e in self._open.values() if not states or e.state in states]

    @property
    def ready(self) -> list[SampleGroup]:
        """Buffered groups: whole, scored and kept."""
        return self.groups(PromptState.BUFFERED)

    @property
    def waiting(self) -> list[SampleGroup]:
        """Partial groups: the next to be generated."""
        return self.groups(PromptState.PARTIAL)

    @property
    def active(self) -> list[SampleGroup]:
        """Groups that are out: the rollout that runs works on them."""
        return self.groups(PromptState.OUT)

    @property
    def assigned(self) -> list[SampleGroup]:
        """Groups that a training step was given and that are not booked as trained yet."""
        return self.groups(PromptState.ASSIGNED)

    def group(self, prompt_id: int) -> SampleGroup | None:
        """The group of an open prompt, None for one that was never handed out or is closed."""
        entry = self._open.get(prompt_id)
        return None if entry is None else entry.group

    def state_of(self, prompt_id: int) -> PromptState | None:
        """State of an open prompt, None for one that was never handed out or is closed."""
        entry = self._open.get(prompt_id)
        return None if entry is None else entry.state

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

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self, *, keep_partial: bool = False) -> dict[str, Any]:
        """All of it, as if all were at rest now: out is saved as partial, assigned as buffered.

        Args:
            keep_partial: unfinished samples keep the tokens that they have; otherwise they are written empty.

        Returns:
            JSON values, and under ``samples`` the numbers of all open samples as one binary file
            (:mod:`relax_data.prompts.saved_groups`).
        """
        groups, samples = groups_to_state([e.group for e in self._open.values()], keep_partial=keep_partial)
        states = [_AT_REST.get(e.state, e.state).value for e in self._open.values()]
        return {
            "step": self.step,
            "handed_out": self.handed_out,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "open": [{"state": state, **group} for state, group in zip(states, groups, strict=True)],
            "samples": samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Becomes the ledger that ``state`` was taken of.

        Raises:
            DataError: the saved book is damaged; the message names the prompts. Nothing is changed then.
        """
        loaded = PromptLedger()
        try:
            loaded.step, loaded.handed_out = int(state["step"]), int(state["handed_out"])
            loaded.trained, loaded.dropped = int(state["trained"]), collections.Counter(state["dropped"])
            loaded._open = _entries(state["open"], state["samples"], loaded.handed_out)
            loaded.check(loaded.handed_out)
        except (LedgerError, LookupError, TypeError, ValueError, AttributeError) as error:
            what = str(error) if isinstance(error, LedgerError | ValueError) else repr(error)
            raise DataError(f"the checkpoint's prompt ledger is damaged: {what}; load another checkpoint") from error
        vars(self).update(vars(loaded))


def _entries(saved: Sequence[dict[str, Any]], samples: bytes, handed_out: int) -> dict[int, _Entry]:
    """The open prompts of a saved ledger by id, ascending.

    Raises:
        LedgerError: a prompt is there twice, was never handed out, or is in a state it cannot be in.
        ValueError, LookupError, TypeError: as :func:`relax_data.prompts.saved_groups.groups_from_state`.
    """
    entries: dict[int, _Entry] = {}
    wrong: dict[str, list[int]] = collections.defaultdict(list)
    for fields, group in zip(saved, groups_from_state(saved, samples), strict=True):
        i, state = group.prompt.prompt_id, fields["state"]
        if i in entries:
            wrong["twice in it"].append(i)
        if not 0 <= i < handed_out:
            wrong[f"not among the {handed_out} that were handed out"].append(i)
        if state not in (PromptState.PARTIAL, PromptState.BUFFERED):
            wrong[f"in state {state!r}, which no saved prompt has"].append(i)
            continue
        if state in _WHOLE and not group.scored:
            wrong[f"{state}, but their groups are not whole and scored"].append(i)
        entries[i] = _Entry(group, PromptState(state))
    if wrong:
        raise LedgerError("; ".join(f"prompts {ids[:5]} are {what}" for what, ids in wrong.items()))
    return dict(sorted(entries.items()))


def _name(prompt: Prompt) -> str:
    return f"prompt {prompt.prompt_id} ({prompt.source})"
