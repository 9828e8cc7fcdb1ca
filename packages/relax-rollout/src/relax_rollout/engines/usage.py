"""What the engines of a run do with their time: busy, idle or paused, added up over everything that happened."""

import dataclasses
import time
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class UsageShares:
    """Shares of a stretch of time; ``busy``, ``idle`` and ``paused`` add up to 1.

    Attributes:
        busy: at least one request was there.
        idle: no request was there, and one could have come.
        paused: requests were held back for a push of weights, those included that ended meanwhile.
        running: mean number of requests at the engine.
    """

    busy: float
    idle: float
    paused: float
    running: float


@dataclasses.dataclass
class _Account:
    requests: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    paused_s: float = 0.0
    request_s: float = 0.0


class EngineUsage:
    """Keeps the time of each engine by its name. Every change is told before it counts, so nothing is sampled."""

    def __init__(self, names: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Starts to count; all engines are idle.

        Args:
            clock: seconds, of any beginning.
        """
        self._clock, self._since = clock, clock()
        self._accounts = {name: _Account() for name in names}
        self._paused = False

    def began(self, name: str) -> None:
        """A request goes to an engine."""
        self._tick()
        self._accounts[name].requests += 1

    def ended(self, name: str) -> None:
        """A request has left an engine."""
        self._tick()
        self._accounts[name].requests -= 1

    def pause(self, paused: bool) -> None:
        """Requests are held back from now on, or not any more."""
        self._tick()
        self._paused = paused

    def take(self) -> dict[str, UsageShares]:
        """The shares of each engine since this was called last; nothing when no time has passed."""
        self._tick()
        shares = {}
        for name, account in self._accounts.items():
            total = account.busy_s + account.idle_s + account.paused_s
            if total > 0:
                shares[name] = UsageShares(
                    account.busy_s / total, account.idle_s / total, account.paused_s / total, account.request_s / total
                )
            self._accounts[name] = _Account(account.requests)
        return shares

    def _tick(self) -> None:
        now = self._clock()
        seconds, self._since = now - self._since, now
        for account in self._accounts.values():
            account.request_s += account.requests * seconds
            if self._paused:
                account.paused_s += seconds
            elif account.requests:
                account.busy_s += seconds
            else:
                account.idle_s += seconds
