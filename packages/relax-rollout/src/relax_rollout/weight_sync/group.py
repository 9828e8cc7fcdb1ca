"""Weights over a process group for each engine: one rank of the trainer feeds it, by NCCL on GPUs and by gloo on CPU.

Engines are independent of each other: one that dies or refuses is left behind, and the others get the whole version.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence

import torch
from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.weight_sync.background import BackgroundLoop, Underway
from relax_rollout.weight_sync.base import PushReport, TransportSetup
from relax_rollout.weight_sync.feeders import choose_feeders, is_near
from relax_rollout.weight_sync.lane import Lane
from relax_rollout.weight_sync.outcome import conclude
from relax_rollout.weight_sync.pair_group import set_nccl_environment
from relax_rollout.weight_sync.push import in_words, let_go
from relax_rollout.weight_sync.ranks import OneRank, Ranks, TorchRanks

BUCKET_DEADLINE_S = 600.0
"""Longest time in which an engine has to load one bucket."""


def group_transport(setup: TransportSetup) -> "GroupTransport":
    """Builds this rank's end; collective. Each engine is fed by one rank, and a rank feeds some engines or none.

    The trainer's process has to call :func:`relax_rollout.weight_sync.pair_group.set_nccl_environment` before it uses
    NCCL; doing so here is in time only if it has not yet.
    """
    if setup.device == "cuda":
        set_nccl_environment()
    ranks: Ranks = OneRank() if setup.world_size == 1 else TorchRanks([])
    feeders = choose_feeders(ranks.everyones([is_near(address.url) for address in setup.engines]))
    return GroupTransport(setup, ranks, feeders)


class GroupTransport:
    """This rank's end, with the groups of the engines that it feeds."""

    def __init__(
        self, setup: TransportSetup, ranks: Ranks, feeders: Sequence[int], *, deadline_s: float = BUCKET_DEADLINE_S
    ) -> None:
        """Joins nothing yet: that is part of the first push to an engine.

        Args:
            setup: what every transport is built from.
            ranks: the trainer's ranks.
            feeders: for each engine the rank that feeds it.
            deadline_s: longest time in which an engine has to load one bucket.
        """
        self.ranks, self._device = ranks, setup.device
        self._names = tuple(address.name for address in setup.engines)
        self._lanes = [
            Lane(address, setup.connect, device=setup.device, deadline_s=deadline_s)
            for address, feeder in zip(setup.engines, feeders, strict=True)
            if feeder == setup.rank
        ]

    @property
    def feeds(self) -> list[str]:
        """Names of the engines that this rank feeds."""
        return [lane.name for lane in self._lanes]

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """See :class:`relax_rollout.weight_sync.base.WeightTransport`.

        While a bucket is sent the next one is made, and no third one before the first is gone.
        """
        names = [name for name in self._names if engines is None or name in engines]
        part = _Part([lane for lane in self._lanes if lane.name in names], version)
        report, failure = PushReport(), None
        with BackgroundLoop() as loop:
            try:
                report = self._send_all(loop, part, buckets)
                begin = time.perf_counter()
                loop.submit(part.each(lambda lane: lane.end(version))).result()
                seconds = {**report.seconds, "end": time.perf_counter() - begin}
                report = dataclasses.replace(report, seconds=seconds)
            except Exception as error:
                failure = in_words(error)
                let_go(error)
                loop.submit(part.abandon(failure or "")).result()
            except BaseException:
                loop.submit(part.abandon("the push was interrupted")).result()
                raise
            finally:
                if isinstance(buckets, Generator):
                    buckets.close()  # after a failure it still holds its bucket
                loop.submit(part.rest()).result()
        return conclude(self.ranks, version, engines=names, report=report, failed=part.failed, failure=failure)

    def _send_all(self, loop: BackgroundLoop, part: "_Part", buckets: Iterable[Bucket]) -> PushReport:
        """Takes all buckets, whatever becomes of the engines: other ranks take part in making them."""
        stream = torch.cuda.current_stream() if self._device == "cuda" else None
        report, start, begun = PushReport(), time.perf_counter(), 0.0
        underway = Underway(loop, part.each(lambda lane: lane.begin(part.version)))
        try:
            iterator = iter(buckets)
            while (bucket := next(iterator, None)) is not None:
                underway.wait()  # an engine takes part in one broadcast at a time
                begun = begun or time.perf_counter()
                underway.start(functools.partial(part.send, report.buckets + 1, bucket, stream))
                report = PushReport(report.buckets + 1, report.tensors + len(bucket), report.bytes + bucket.nbytes)
            underway.wait()
        except BaseException:
            underway.cancel()
            raise
        if report.buckets == 0:
            raise ValueError("no weights were given")
        return dataclasses.replace(report, seconds={"begin": begun - start, "send": time.perf_counter() - begun})

    def close(self) -> None:
        """Ends the groups on both sides."""
        if self._lanes:
            with BackgroundLoop() as loop:
                for ending in [loop.submit(lane.close()) for lane in self._lanes]:
                    ending.result()


class _Part:
    """The part of this rank in one push: the engines that are still with it, and why others are not."""

    def __init__(self, lanes: Sequence[Lane], version: WeightVersion) -> None:
        self._all, self._live, self.version = list(lanes), list(lanes), version
        self.failed: dict[str, str] = {}

    async def each(self, step: Callable[[Lane], Awaitable[None]]) -> None:
        """Takes a step with every engine at the same time; those with which it fails are given up."""
        await asyncio.gather(*(self._one(lane, step) for lane in list(self._live)))

    async def send(self, number: int, bucket: Bucket, stream: "torch.cuda.Stream | None") -> None:
        """Sends a bucket; see :meth:`relax_rollout.weight_sync.lane.Lane.send`."""
        await self.each(lambda lane: lane.send(number, bucket, stream))

    async def abandon(self, why: str) -> None:
        """Gives up all engines that are left."""
        left, self._live = self._live, []
        self.failed.update({lane.name: why for lane in left})
        await asyncio.gather(*(lane.give_up(self.version) for lane in left))

    async def rest(self) -> None:
        """Closes the clients of all engines."""
        await asyncio.gather(*(lane.rest() for lane in self._all))

    async def _one(self, lane: Lane, step: Callable[[Lane], Awaitable[None]]) -> None:
        try:
            await step(lane)
        except Exception as error:
            self.failed[lane.name] = in_words(error) or ""
            let_go(error)
            self._live.remove(lane)
            await lane.give_up(self.version)
