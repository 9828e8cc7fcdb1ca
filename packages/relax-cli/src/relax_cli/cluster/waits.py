"""Waits of the driver: each says what it waits for, ends at a deadline, and gives way to a signal."""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from relax_cli.cluster.actors import Ref

R = TypeVar("R")

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 24 * 3600.0
"""No generation or training step of ours lasts a day; a wait this long is a hang."""
ALOUD_EVERY_S = 10.0
"""How often a wait for engines says what it waits for: a push of weights takes seconds."""
SETUP_DEADLINE_S = 1800.0
"""Each part of a start but the engines, which have their own."""


class StopRequested(Exception):
    """The user asked the run to end (SIGINT or SIGTERM) and the current wait was given up."""


@dataclasses.dataclass
class StopFlag:
    """Set by a signal handler or by whoever sees that Ray is lost; looked at by every wait of the driver."""

    grace_s: float = 6.0
    """How long the step in progress may still take after the signal."""
    total_s: float = 8.0
    """When the last actor is to be told to go; ending Ray itself takes another second or two."""
    stepping: bool = False
    """The start is over: there is a step that may be worth finishing."""
    signal_number: int | None = None
    at: float = 0.0
    broken: Exception | None = None
    """Why no wait can end well any more."""

    def set(self, signal_number: int) -> None:
        """Notes the first signal and its time; later ones change nothing."""
        if self.signal_number is None:
            self.signal_number, self.at = signal_number, time.monotonic()

    def raise_broken(self) -> None:
        """Ends a wait that cannot end well."""
        if self.broken is not None:
            raise self.broken

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number is not None

    @property
    def expired(self) -> bool:
        """True when nothing is to be finished any more."""
        return self.requested and (not self.stepping or time.monotonic() - self.at > self.grace_s)

    def left(self, seconds: float) -> float:
        """``seconds``, or what a requested stop leaves of them; never less than one."""
        return min(seconds, max(1.0, self.at + self.total_s - time.monotonic())) if self.requested else seconds


class Heartbeat:
    """Speaks up when a start has been silent for too long.

    One for the whole start: two waits of 7 s after each other are 14 s of silence.
    """

    def __init__(
        self, note: Callable[[str], None], *, every_s: float = 8.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts to count the silence.

        Args:
            note: takes a line for the user.
            every_s: seconds of silence after which :meth:`waiting` says something.
            clock: seconds, of any beginning.
        """
        self._note, self._every_s, self._clock = note, every_s, clock
        self._told = clock()

    def note(self, message: str) -> None:
        """Says something, which ends a silence."""
        self._note(message)
        self._told = self._clock()

    def waiting(self, what: str, status: Callable[[], str] | None = None) -> None:
        """Tells it what is waited for now; call it often. The user is told when the silence has become too long.

        Args:
            what: completes "waiting for ...".
            status: details, asked for only when something is said; it must answer within 2 s.
        """
        if self._clock() - self._told >= self._every_s:
            details = status() if status is not None else ""
            self.note(f"waiting for {what}: {details}" if details else f"waiting for {what}")


@overload
def wait_for(
    refs: list[Ref[R]],
    what: str,
    *,
    stop: StopFlag | None = ...,
    deadline_s: float,
    remind_s: float = ...,
    status: Callable[[], str] | None = ...,
    heartbeat: Heartbeat | None = ...,
    meanwhile: Callable[[], object] | None = ...,
) -> list[R]: ...


@overload
def wait_for(
    refs: Ref[R],
    what: str,
    *,
    stop: StopFlag | None = ...,
    deadline_s: float,
    remind_s: float = ...,
    status: Callable[[], str] | None = ...,
    heartbeat: Heartbeat | None = ...,
    meanwhile: Callable[[], object] | None = ...,
) -> R: ...


def wait_for(  # noqa: PLR0913  # what a wait does meanwhile, by name
    refs: Any,
    what: str,
    *,
    stop: StopFlag | None = None,
    deadline_s: float,
    remind_s: float = 60.0,
    status: Callable[[], str] | None = None,
    heartbeat: Heartbeat | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Any:
    """``ray.get`` that says what it waits for, ends at a deadline and gives way to a stop request.

    Args:
        refs: one object reference or a list of them.
        what: completes "waiting for ..." in messages.
        deadline_s: seconds after which the wait is an error.
        remind_s: seconds between two messages of a long wait.
        status: asked for the details of such a message.
        heartbeat: of a start; it tells the user what is waited for, instead of the messages in the log.
        meanwhile: called about four times a second; what it raises ends the wait.

    Raises:
        TimeoutError: the deadline passed.
        StopRequested: a stop was requested and its grace time is over.
        RayLost: Ray cannot go on.
    """
    import ray

    many = isinstance(refs, list)
    pending = list(refs) if many else [refs]
    start = time.monotonic()
    reminded = start
    values: dict[Any, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.25)
        if stop is not None:
            stop.raise_broken()
        for ref in done:
            try:
                values[ref] = ray.get(ref)  # raises at once what one of many raised, instead of waiting for the others
            except ray.exceptions.RayActorError as error:  # it says which process died, not what it was doing
                error.add_note(f"The run was waiting for {what}.")
                raise
        if not pending:
            break
        if meanwhile is not None:
            meanwhile()
        now = time.monotonic()
        if stop is not None and stop.expired:
            raise StopRequested(what)
        if now - start > deadline_s:
            raise TimeoutError(f"waited {now - start:.0f} s for {what}: giving up")
        if heartbeat is not None:
            heartbeat.waiting(what, status)
        elif now - reminded >= remind_s:
            details = f": {status()}" if status is not None else ""
            log.warning("still waiting for %s (%.0f s)%s", what, now - start, details)
            reminded = now
    return [values[ref] for ref in refs] if many else values[refs]
