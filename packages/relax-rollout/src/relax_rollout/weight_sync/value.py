"""Weights to engines on CPU: the values travel inside the request, so that no file or socket has to be shared."""

from collections.abc import Sequence

from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine
from relax_rollout.weight_sync.base import TransportSetup
from relax_rollout.weight_sync.push import EngineTransport
from relax_rollout.weight_sync.ranks import OneRank, Ranks, TorchRanks


def value_transport(setup: TransportSetup) -> EngineTransport:
    """Builds this rank's end; collective. Rank 0 posts to all engines, the others only help to gather the buckets."""
    ranks = OneRank() if setup.world_size == 1 else TorchRanks([])
    return EngineTransport(setup.engines if setup.rank == 0 else (), ranks, SendValues(), setup.connect)


class SendValues:
    """Has one engine after the other load a bucket; see :class:`relax_rollout.weight_sync.push.Send`.

    Not all at once, nor while the next bucket is made: each request has a copy of the bucket, and two are the limit.
    """

    ahead = 0

    def prepare(self, bucket: Bucket | None, ranks: Ranks) -> None:
        """Needs nothing of other ranks."""

    async def load(self, engines: Sequence[Engine], bucket: Bucket, prepared: None) -> None:
        """See :meth:`relax_rollout.weight_sync.push.Send.load`."""
        for engine in engines:
            await engine.load(bucket)
