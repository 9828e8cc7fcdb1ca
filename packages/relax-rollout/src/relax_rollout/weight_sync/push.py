"""The steps of a push that transports share: begin, bucket after bucket, end, each by all ranks together.

A transport that reaches engines by their own calls gives one function, :data:`Send`, which brings a bucket to them.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Sequence

from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, EngineAddress, PauseMode, updating
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_rollout.weight_sync.ranks import Ranks

Send = Callable[[Sequence[Engine], Bucket | None, Ranks], Awaitable[None]]
"""Brings a bucket to the engines that this rank posts to, and returns when they have loaded it; collective.

The bucket is None on a rank that has no further one, or could not make it: the exchanges with other ranks take place
all the same. It keeps neither the bucket nor a copy.
"""


class EngineTransport:
    """A transport that reaches engines by their own calls; a new client for each push, as each has its event loop."""

    def __init__(
        self, engines: Sequence[EngineAddress], ranks: Ranks, send: Send, connect: Callable[[EngineAddress], Engine]
    ) -> None:
        """Stores them.

        Args:
            engines: those that this rank posts to; none on ranks that only take part.
            ranks: how this rank acts together with the others.
            send: brings a bucket to them.
            connect: makes the client of an engine.
        """
        self.engines, self.ranks = tuple(engines), ranks
        self._send, self._connect = send, connect

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """See :class:`relax_rollout.weight_sync.base.WeightTransport`."""

        async def go() -> PushReport:
            wanted = [a for a in self.engines if engines is None or a.name in engines]
            clients = [self._connect(address) for address in wanted]
            try:
                return await push_weights(clients, buckets, version, send=self.send_for(engines), ranks=self.ranks)
            finally:
                for client in clients:
                    await client.close()

        return asyncio.run(go())

    def send_for(self, engines: Collection[str] | None) -> Send:
        """How this rank sends a bucket in a push to these engines."""
        return self._send

    def close(self) -> None:
        """Holds nothing between pushes."""


async def push_weights(
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
        engines: the engines that this rank posts to.
        buckets: the whole model; read one at a time, and a bucket is let go before the next one is asked for.
        version: number of the new weights.
        send: brings a bucket to the engines.
        ranks: the trainer's ranks.
        mode: what happens to requests that are running; see :meth:`relax_rollout.engines.base.Engine.pause`.

    Returns:
        what this rank sent.

    Raises:
        WeightPushFailed: on every rank, when it failed on any. Engines it began with are marked broken: they generate
            again only after a whole push.
    """
    report, failure = PushReport(), None
    iterator = iter(buckets)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _together(ranks, _begin(stack, engines, version, mode))
            while (sent := await _push_next(engines, iterator, send, ranks)) is not None:
                report = PushReport(report.buckets + 1, report.tensors + sent[0], report.bytes + sent[1])
            if report.buckets == 0:
                raise ValueError("no weights were given")
    except Exception as error:
        failure = error
    if isinstance(iterator, Generator):
        iterator.close()  # after a failure it still holds its bucket
    let_go(failure)
    told = ranks.agree(in_words(failure))
    if told is not None:
        raise WeightPushFailed(
            f"weights of version {version} did not reach every engine, which refuse to generate until they are pushed "
            f"again as a whole. {told}"
        ) from failure
    return report


async def _begin(
    stack: contextlib.AsyncExitStack, engines: Sequence[Engine], version: WeightVersion, mode: PauseMode
) -> None:
    for engine in engines:
        await stack.enter_async_context(updating(engine, version, mode))


async def _push_next(
    engines: Sequence[Engine], buckets: Iterator[Bucket], send: Send, ranks: Ranks
) -> tuple[int, int] | None:
    """Sends the next bucket: (tensors, bytes), or None when there is none.

    The bucket is local here, so it is gone when the next one is made.
    """
    bucket: Bucket | None = None
    failure: Exception | None = None
    try:
        bucket = next(buckets, None)
    except Exception as error:  # the other ranks wait in send: go there first
        failure = error

    await _together(ranks, _send_or_raise(send, engines, bucket, ranks, failure))
    return None if bucket is None else (len(bucket), bucket.nbytes)


async def _send_or_raise(
    send: Send, engines: Sequence[Engine], bucket: Bucket | None, ranks: Ranks, failure: Exception | None
) -> None:
    await send(engines, bucket, ranks)
    if failure is not None:
        raise failure


async def _together(ranks: Ranks, action: Awaitable[None]) -> None:
    """Awaits this rank's part, then waits for all ranks.

    Raises:
        Exception: this rank's own error, or a RuntimeError with another rank's.
    """
    failure: Exception | None = None
    try:
        await action
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
