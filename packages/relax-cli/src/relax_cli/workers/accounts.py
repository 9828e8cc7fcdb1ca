"""Books the fate of every prompt of a run: the ledger between the prompt source and the rollout loop."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from relax_data.prompts.ledger import PromptLedger, PromptState
from relax_data.types import Prompt

if TYPE_CHECKING:
    from relax_data.prompts.source import PromptSource
    from relax_data.prompts.template import Drops
    from relax_rollout.loop.rollout_loop import RolloutResult


class BookedSource:
    """A prompt source whose prompts are booked as handed out, and the books of what became of them.

    What a rollout returns is trained before the next one starts and before a checkpoint is taken, so it is booked as
    trained then (:meth:`settle`).
    """

    def __init__(self, source: "PromptSource", *, trains: bool = True) -> None:
        """Takes over a source.

        Args:
            trains: False when the samples of this run train nothing: they are booked as dropped.
        """
        self.ledger = PromptLedger()
        self._source, self._trains = source, trains
        self._returned: list[int] = []

    @property
    def drops(self) -> "Drops":
        return self._source.drops

    def __len__(self) -> int:
        return len(self._source)

    def next(self, n: int) -> list[Prompt]:
        prompts = self._source.next(n)
        self.ledger.hand_out(prompts)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)

    def settle(self) -> None:
        """Books what the last rollout returned: by now the trainer has it."""
        returned, self._returned = self._returned, []
        if returned and self._trains:
            self.ledger.train(returned)
        elif returned:
            self.ledger.drop(returned, "generated only")

    def book(self, result: "RolloutResult") -> dict[str, float]:
        """Books a rollout: what it dropped, what it returned, and the rest as waiting for the next one.

        Returns:
            Number of prompts of the run so far by state, as metrics; what the rollout returned is still ``out``.
        """
        for dropped in result.dropped:
            self.ledger.drop([dropped.prompt_id], dropped.reason)
        self._returned = [group.prompt.prompt_id for group in result.groups]
        returned = set(self._returned)
        self.ledger.take_back([prompt.prompt_id for prompt in self.ledger.open(PromptState.BUFFERED)])
        out = [prompt.prompt_id for prompt in self.ledger.open(PromptState.OUT)]
        self.ledger.buffer([prompt_id for prompt_id in out if prompt_id not in returned])
        counts = self.ledger.counts()
        return {f"prompts/{state}": float(counts[state]) for state in ("out", "buffered", "trained", "dropped")}

    def ledger_state(self) -> dict[str, Any]:
        """The books for a checkpoint, after :meth:`settle`, as JSON values."""
        from relax_rollout.errors import to_plain

        self.settle()
        return to_plain(self.ledger.state_dict(), "the prompt ledger", objects=True)

    def load_ledger(self, state: dict[str, Any], held: Iterable[int]) -> None:
        """Goes on with the books of a checkpoint.

        Args:
            held: prompt_ids of the prompts that the loop has from the same checkpoint.

        Raises:
            ValueError: books and loop disagree about what is still to be done.
        """
        from relax_rollout.errors import from_plain

        self._returned = []
        self.ledger.load_state_dict(from_plain(state))
        opened = {prompt.prompt_id for prompt in self.ledger.open()}
        if differing := sorted(opened ^ set(held)):
            raise ValueError(
                f"the checkpoint is damaged: its ledger and its rollout buffer disagree about prompts {differing[:5]}; "
                "load another one"
            )
