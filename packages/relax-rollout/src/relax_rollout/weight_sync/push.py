"""The steps of a push that transports share: begin, bucket after bucket, end, each by all ranks together.

A transport that reaches engines by their own calls gives one thing, a :class:`Send`, which brings buckets to them. The
thread that calls makes the buckets and speaks with the other ranks; engines are called in a loop beside it:

    this thread   make 1 | make 2 | wait for 1, make 3 | wait for 2, make 4 | ...
    the loop      begin  | load 1          | load 2             | load 3    | ...       end
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, EngineAddress, PauseMode
from relax_rollout.weight_sync.background import BackgroundLoop, Underway
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_rollout.weight_sync.ranks import Ranks


class Send(Protocol):
    """Brings buckets to the engines that this rank posts to."""

    @property
    def ahead(self) -> int:
        """Buckets that may be under way while the next one is made: 1, or 0 when sending takes a copy of one.

        A push holds two buckets, copies counted.
        """
        ...

    def prepare(self, bucket: Bucket | None, ranks: Ranks) -> Any:
        """What :meth:`load` needs beside the bucket; collective, on the thread that made it.

        The bucket is None on a rank that has no further one, or could not make it: the exchanges with other ranks take
        place all the same.
        """
        ...

    async def load(self, engines: Sequence[Engine], bucket: Bucket, prepared: Any) -> None:
        """Has the engines load a bucket; returns when they need its memory no more, and keeps neither it nor a copy."""
        ...


class EngineTransport:
    """A transport that reaches engines by their own calls."""

    def __init__(
        self, engines: Sequence[EngineAddress], ranks: Ranks, send: Send, connect: Callable[[EngineAddress], Engine]
    ) -> None:
        """Stores them.

        Args:
            engines: those that this rank posts to; none on ranks that only take part.
            ranks: how this rank acts together with the others.
            send: brings a bucket to them.
            connect: makes the client of an engine, in the first push to it: what it learns of the engine stays.
        """
        self.engines, self.ranks = tuple(engines), ranks
        self._send, self._connect = send, connect
        self._clients: dict[str, Engine] = {}

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """See :class:`relax_rollout.weight_sync.base.WeightTransport`."""
        wanted = [self._client(a) for a in self.engines if engines is None or a.name in engines]
        return push_weights(wanted, buckets, version, send=self.send_for(engines), ranks=self.ranks)

    def _client(self, address: EngineAddress) -> Engine:
        if address.name not in self._clients:
            self._clients[address.name] = self._connect(address)
        return self._clients[address.name]

    def send_for(self, engines: Collection[str] | None) -> Send:
        """How this rank sends a bucket in a push to these engines."""
        return self._send

    def close(self) -> None:
        """Holds no connection between pushes."""


def push_weights(
    engines: Sequence[Engine],
    buckets: Iterable[Bucket],
    version: WeightVersion,
    *,
    send: Send,
    ranks: Ranks,
    mode: PauseMode = "abort",
) -> PushReport:
    """Makes engines serve a new version.

    Every rank of the trainer calls it with the same number of buckets; ranks that post to no engine pass none.

    Args:
        engines: the engines that this rank posts to. Their connections are closed afterwards.
        buckets: the whole model; read one at a time, and a bucket is let go before the next but one is asked for.
        version: number of the new weights.
        send: brings a bucket to the engines.
        ranks: the trainer's ranks.
        mode: what happens to requests that are running; see :meth:`relax_rollout.engines.base.Engine.pause`.

    Returns:
        what this rank sent, with the seconds of ``begin`` (until the first bucket is sent), ``make`` (all buckets),
        ``send`` (from there until all are loaded, beside what is made meanwhile) and ``end``.

    Raises:
        WeightPushFailed: on every rank, when it failed on any. Engines it began with are marked broken: they generate
            again only after a whole push.
    """
    report, failure, whole = PushReport(), None, False
    iterator = iter(buckets)
    with BackgroundLoop() as loop:
        push = _Push(loop, engines, send, ranks, _each(engines, lambda engine: engine.begin_update(version, mode)))
        try:
            report = push.send_all(iterator)
            begin = time.perf_counter()
            loop.submit(_each(engines, lambda engine: engine.end_update(version))).result()
            report = dataclasses.replace(report, seconds={**report.seconds, "end": time.perf_counter() - begin})
            whole = True
        except Exception as error:
            failure = error
            for other in push.underway.rest():
                let_go(other)
        except BaseException:
            push.underway.cancel()
            raise
        finally:
            push.kept.clear()
            if isinstance(iterator, Generator):
                iterator.close()  # after a failure it still holds its bucket
            loop.submit(_leave(engines, version, whole=whole)).result()
    let_go(failure)
    told = ranks.agree(in_words(failure))
    if told is not None:
        raise WeightPushFailed(
            f"weights of version {version} did not reach every engine, which refuse to generate until they are pushed "
            f"again as a whole. {told}"
        ) from failure
    return report


class _Push:
    """The buckets of one push, on this rank."""

    def __init__(
        self,
        loop: BackgroundLoop,
        engines: Sequence[Engine],
        send: Send,
        ranks: Ranks,
        begin: Coroutine[Any, Any, None],
    ) -> None:
        self._engines, self._send, self._ranks = engines, send, ranks
        self._start, self._begun, self._made = time.perf_counter(), 0.0, 0.0
        self.underway = Underway(loop, begin)
        self.kept: collections.deque[Bucket] = collections.deque()
        """Those that an engine may still read. Only the rank that posts hears from it, but the engine reads all."""

    def send_all(self, buckets: Iterator[Bucket]) -> PushReport:
        """Takes all buckets; returns when they are loaded.

        Raises:
            Exception: this rank's own error, or a RuntimeError with another rank's.
        """
        tensors, sizes = 0, list[int]()
        while (bucket := self._next(buckets)) is not None:
            tensors += len(bucket)
            sizes.append(bucket.nbytes)
            del bucket  # when the next one is made, only `kept` has it
        if not sizes:
            raise ValueError("no weights were given")
        sent = time.perf_counter() - self._begun
        seconds = {"begin": self._begun - self._start, "make": self._made, "send": sent}
        return PushReport(len(sizes), tensors, sum(sizes), seconds=seconds)

    def _next(self, buckets: Iterator[Bucket]) -> Bucket | None:
        """Makes a bucket and begins to send it; returns when all may go on, with None when there is none."""
        begin = time.perf_counter()
        bucket, failure = None, None
        try:
            bucket = next(buckets, None)
        except Exception as error:  # the other ranks wait in prepare: go there first
            failure = error
        self._made += time.perf_counter() - begin
        _together(self._ranks, functools.partial(self._start_sending, bucket, failure))
        left = 0 if bucket is None else self._send.ahead
        while len(self.kept) > left:
            self.kept.popleft()
        return bucket

    def _start_sending(self, bucket: Bucket | None, failure: Exception | None) -> None:
        try:
            prepared = self._send.prepare(bucket, self._ranks)
            if failure is not None:
                raise failure
        except Exception:
            # The others let their copies go as soon as they hear of it, and the engine may still read those.
            for other in self.underway.rest():
                let_go(other)
            raise
        if bucket is None:
            self.underway.wait()
            return
        self.kept.append(bucket)
        self.underway.start(functools.partial(self._send.load, self._engines, bucket, prepared))
        self._begun = self._begun or time.perf_counter()
        self.underway.wait(self._send.ahead)


async def _each(engines: Sequence[Engine], step: Callable[[Engine], Awaitable[None]]) -> None:
    """Takes a step with every engine at the same time, and returns or raises when all are through."""
    for outcome in await asyncio.gather(*(step(engine) for engine in engines), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _leave(engines: Sequence[Engine], version: WeightVersion, *, whole: bool) -> None:
    """Marks engines whose update has not ended, and closes the connections."""

    async def leave(engine: Engine) -> None:
        if not whole:
            with contextlib.suppress(Exception):
                await engine.end_update(version, whole=False)
        with contextlib.suppress(Exception):  # the push is over, well or badly
            await engine.close()

    await _each(engines, leave)


def _together(ranks: Ranks, action: Callable[[], None]) -> None:
    """Does this rank's part, then waits for all ranks.

    Raises:
        Exception: this rank's own error, or a RuntimeError with another rank's.
    """
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    told = ranks.agree(in_words(failure))
    if failure is not None:
        raise failure
    if told is not None:
        raise RuntimeError(told)


def in_words(error: Exception | None) -> str | None:
    """Kind and text of an error."""
    return None if error is None else f"{type(error).__name__}: {error}"


def let_go(error: BaseException | None) -> None:
    """Empties the frames that an error and its causes remember: they hold the bucket that was being sent, and it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
