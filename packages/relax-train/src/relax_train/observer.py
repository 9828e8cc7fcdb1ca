"""Protocol of an observer of the training: profilers and memory recorders. Needs no torch."""

import contextlib
from contextlib import AbstractContextManager
from typing import Literal, Protocol

Phase = Literal["train_overall", "train_log_probs", "train_actor"]


class StepObserver(Protocol):
    """Called by the trainer on each rank.

    ``offset`` counts the training steps of this launch from 0, whatever was resumed. ``train_overall`` is the whole
    step (log-probs, advantages, forward, backward, optimizer); the other phases lie inside it.
    """

    def before_model(self) -> None:
        """Before the first parameter is allocated."""
        ...

    def phase(self, name: Phase, offset: int) -> AbstractContextManager[None]:
        """Surrounds a phase; an exception passes through it unchanged."""
        ...

    def write_traces(self, *, last: bool = False) -> None:
        """At a moment when nothing waits for this rank; ``last``: no step follows."""
        ...

    def close(self) -> None:
        """At the end of the run, also of a failed one; may be called twice."""
        ...


class NullObserver:
    """Observes nothing."""

    def before_model(self) -> None:
        """Does nothing."""
        pass

    def phase(self, name: Phase, offset: int) -> AbstractContextManager[None]:
        """Surrounds nothing."""
        return contextlib.nullcontext()

    def write_traces(self, *, last: bool = False) -> None:
        """Does nothing."""
        pass

    def close(self) -> None:
        """Does nothing."""
        pass
