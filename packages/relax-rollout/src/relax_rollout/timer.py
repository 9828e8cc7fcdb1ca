"""Splits the wall time of a rollout into generation and reward."""

import contextlib
import copy
import time
from collections.abc import Iterator


class PhaseTimer:
    """Counts each moment once: as generation while a request runs, else as reward while a sample is being scored."""

    def __init__(self) -> None:
        self._requests = 0
        self._rewards = 0
        self._since = self.started = time.monotonic()
        self.generate_s = 0.0
        self.reward_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Counts one request as running inside."""
        self._tick()
        self._requests += 1
        try:
            yield
        finally:
            self._tick()
            self._requests -= 1

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Counts one reward as running inside."""
        self._tick()
        self._rewards += 1
        try:
            yield
        finally:
            self._tick()
            self._rewards -= 1

    def lap(self) -> "PhaseTimer":
        """The times so far, as a timer of its own; this one begins again at zero, with what runs now."""
        self._tick()
        done = copy.copy(self)
        self.generate_s = self.reward_s = 0.0
        self.started = self._since
        return done

    def _tick(self) -> None:
        now = time.monotonic()
        if self._requests:
            self.generate_s += now - self._since
        elif self._rewards:
            self.reward_s += now - self._since
        self._since = now
