"""The engines of a run over its whole life: which serve, which were lost and come back, which are out for good.

An engine is in one of four states::

    SERVING --exclude--> LOST --replace--> JOINING --include--> SERVING
                         LOST --lost more often than it may come back--> OUT

Who restarts the engine's process and gives it the current weights is somebody else
(:mod:`relax_cli.controllers.engine_recovery` in a run). Here is what requests need to know, and the only count of
restarts.

While weights are pushed to engines that generate, the whole pool is held: :meth:`EnginePool.hold`, then each router
lands what it has in flight (:meth:`relax_rollout.engines.router.EngineRouter.land`), the push, :meth:`EnginePool.open`.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from relax_rollout.engines.base import Engine, EngineDied
from relax_rollout.engines.usage import EngineUsage

T = TypeVar("T")

RESTARTS = 3
"""Times that an engine of a run comes back; one that dies again is not worth the GPUs that it holds."""
PATIENCE_S = 2400.0
"""Seconds without any engine in which none changes its state, after which nobody waits any more. More than a server may
take to start."""


class EngineState(enum.Enum):
    """What an engine is good for now."""

    SERVING = "serving"
    """It gets requests."""
    LOST = "lost"
    """It died or fell silent, and is to be restarted."""
    JOINING = "joining"
    """It was restarted and is healthy, but does not have the current weights yet."""
    OUT = "out"
    """It was lost too often."""


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """Account of one engine, for another process.

    Attributes:
        name: ``engine0``, ...
        losses: times that it was lost; one less than that, or as many, it was restarted.
        error: why it was lost the last time, with its last words; empty when it never was.
    """

    name: str
    state: EngineState
    losses: int
    error: str


@dataclasses.dataclass(eq=False)
class _Member:
    engine: Engine
    state: EngineState = EngineState.SERVING
    losses: int = 0
    error: EngineDied | None = None

    @property
    def well(self) -> bool:
        return self.state in (EngineState.SERVING, EngineState.JOINING)


class EnginePool:
    """All engines of a run, in order. One object for one event loop.

    Attributes:
        usage: what the engines do with their time.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        restarts: int | None = RESTARTS,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All of them serve.

        Args:
            engines: clients, each with a name of its own.
            restarts: times that each may come back. None: nobody restarts engines, so that the first loss is an error.
            patience_s: see :data:`PATIENCE_S`.
            clock: seconds, for :attr:`usage`.
        """
        self.usage = EngineUsage((engine.name for engine in engines), clock)
        self._held = False
        self._members = {engine.name: _Member(engine) for engine in engines}
        self._restarts, self._patience_s = restarts, patience_s
        self._changed = time.monotonic()
        self._listeners: collections.Counter[Callable[[], None]] = collections.Counter()

    def __len__(self) -> int:
        return len(self._members)

    @property
    def serving(self) -> list[Engine]:
        """The engines that requests may go to, in order."""
        return [m.engine for m in self._members.values() if m.state is EngineState.SERVING]

    @property
    def in_use(self) -> list[Engine]:
        """The engines whose processes are well: those that serve and those that wait for weights."""
        return [m.engine for m in self._members.values() if m.well]

    def serves(self, engine: Engine) -> bool:
        """Whether requests may be at this very engine; not so for the client of a server that was replaced."""
        return any(e is engine for e in self.serving)

    def reports(self) -> list[EngineReport]:
        """One for each engine, in order."""
        return [
            EngineReport(name, m.state, m.losses, "" if m.error is None else str(m.error))
            for name, m in self._members.items()
        ]

    # ------------------------------------------------------------------ pushes of weights

    @property
    def held(self) -> bool:
        """True while requests wait for a push of weights to end."""
        return self._held

    def hold(self) -> None:
        """Lets no request go to an engine until :meth:`open`; those that are there are not touched."""
        self._held = True
        self.usage.pause(True)

    def open(self) -> None:
        """Lets requests go on that waited."""
        self._held = False
        self.usage.pause(False)
        self._tell()

    # ------------------------------------------------------------------ changes

    def exclude(self, engine: Engine, error: EngineDied) -> None:
        """Takes an engine out that died or fell silent; without effect for one that is out already, or was replaced.

        Raises:
            EngineDied: the error, with the engine's name, when nobody restarts engines.
        """
        member = self._members.get(engine.name)
        if (
            member is not None
            and member.engine is engine
            and member.state in (EngineState.SERVING, EngineState.JOINING)
        ):
            self._lose(member, error)
        if self._restarts is None:
            raise _named(engine.name, error)

    def restart_failed(self, name: str, error: EngineDied) -> None:
        """Notes that a lost engine could not be started: that was one of its restarts."""
        member = self._members[name]
        if member.state is EngineState.LOST:
            self._lose(member, error)

    def replace(self, engine: Engine) -> Engine:
        """Puts the client of a restarted server where the one of that name was; it has to be included to serve.

        Returns:
            the old client, to be closed.
        """
        member = self._members[engine.name]
        assert member.state is EngineState.LOST, f"{engine.name} is {member.state.value}, not lost"
        old, member.engine, member.state = member.engine, engine, EngineState.JOINING
        self._tell()
        return old

    def include(self, name: str) -> None:
        """Lets an engine serve that has the current weights; without effect for one that serves, or died meanwhile."""
        member = self._members[name]
        if member.state is EngineState.JOINING:
            member.state = EngineState.SERVING
            self._tell()

    def _lose(self, member: _Member, error: EngineDied) -> None:
        member.losses += 1
        member.error = _named(member.engine.name, error)
        member.state = EngineState.OUT if member.losses > (self._restarts or 0) else EngineState.LOST
        self._tell()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Calls ``listener`` inside whenever the state of an engine has changed; once, however often it was given."""
        self._listeners[listener] += 1
        try:
            yield
        finally:
            self._listeners[listener] -= 1
            if not self._listeners[listener]:
                del self._listeners[listener]

    def _tell(self) -> None:
        self._changed = time.monotonic()
        for listener in list(self._listeners):
            listener()

    # ------------------------------------------------------------------ while no engine serves

    @property
    def waiting_for(self) -> str:
        """What has to happen before an engine serves; empty while one does."""
        if self.serving:
            return ""
        words = {EngineState.LOST: "restart ({} of {})", EngineState.JOINING: "get the current weights"}
        return " or ".join(
            f"{name} to {words[m.state].format(m.losses, self._restarts)}"
            for name, m in self._members.items()
            if m.state in words
        )

    def check_hope(self) -> None:
        """Returns while an engine serves or may serve again.

        Raises:
            EngineDied: none ever will; the message has the last words of the engine that was lost last.
        """
        if self.serving:
            return
        errors = [m.error for m in self._members.values() if m.error is not None]
        if not (waiting := self.waiting_for):
            assert errors, "a pool without engines is refused before"
            restarted = f" after {self._restarts} restarts each" if self._restarts else ""
            raise EngineDied(f"no engine is left{restarted}. {errors[-1]}") from errors[-1]
        if (waited := time.monotonic() - self._changed) > self._patience_s:
            raise EngineDied(f"no engine served for {waited:.0f} s, waiting for {waiting}: giving up. {errors[-1]}")

    # ------------------------------------------------------------------ all engines at once

    async def silent(self, within_s: float) -> list[str]:
        """Names of the engines in use that do not answer within that time; nothing is booked."""

        async def answers(engine: Engine) -> bool:
            try:
                async with asyncio.timeout(within_s):
                    await engine.weight_version()
            except TimeoutError:
                return False
            except Exception:  # who asks it for something hears of it
                return True
            return True

        engines = self.in_use
        answered = await asyncio.gather(*(answers(engine) for engine in engines))
        return [engine.name for engine, answer in zip(engines, answered, strict=True) if not answer]

    async def on_each(
        self, action: Callable[[Engine], Awaitable[T]], engines: Sequence[Engine] | None = None
    ) -> dict[str, T]:
        """Does something with every engine in use, all at once; one that turns out to be dead is excluded.

        Returns:
            what came out, by the names of the engines that live.

        Raises:
            Exception: the first other error.
        """

        async def one(engine: Engine) -> list[tuple[str, T]]:
            try:
                return [(engine.name, await action(engine))]
            except EngineDied as error:
                self.exclude(engine, error)
                return []

        done = await asyncio.gather(*(one(e) for e in (self.in_use if engines is None else engines)))
        return dict(pair for found in done for pair in found)

    async def close(self) -> None:
        """Closes the clients; the engines themselves go on."""
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))


def _named(name: str, error: EngineDied) -> EngineDied:
    """The error, or one of its kind that names the engine."""
    if name in str(error):
        return error
    named = type(error)(f"{name}: {error}")
    named.__cause__ = error
    return named


def as_pool(engines: Sequence[Engine] | EnginePool) -> EnginePool:
    """The pool; or one of engines that nobody restarts, so that the first loss ends what asks them."""
    return engines if isinstance(engines, EnginePool) else EnginePool(engines, restarts=None)
