"""How new weights travel from the trainer's ranks to the engines that share their GPUs."""

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import Any

Bucket = list[tuple[str, Any]]


@dataclasses.dataclass
class WeightLink:
    """This rank's end: the engines it posts to, and how it acts together with the other ranks."""

    engine_info: list[dict[str, Any]]
    """Of the engines that this rank posts to: ``{"name", "url", "log_path"}``."""
    ranks: Any
    """A :class:`relax_rollout.weight_sync.push.Ranks`."""

    @classmethod
    def of(
        cls, engine_info: list[dict[str, Any]], *, rank: int, world_size: int, device: str, gpus_per_engine: int
    ) -> "WeightLink":
        """Builds the link. Collective: every rank of the trainer calls it.

        On GPUs engine ``i`` lies on the GPUs of ranks ``[i * gpus_per_engine, (i + 1) * gpus_per_engine)``, which hand
        it their copies as IPC handles. On CPU rank 0 posts to all engines.
        """
        from relax_rollout.weight_sync.push import OneRank, TorchRanks

        if world_size == 1:
            return cls(engine_info, OneRank())
        if device == "cpu":
            return cls(engine_info if rank == 0 else [], TorchRanks([[0]]))
        shares = [[i * gpus_per_engine + k for k in range(gpus_per_engine)] for i in range(len(engine_info))]
        ranks = TorchRanks(shares)
        return cls([engine_info[rank // gpus_per_engine]] if ranks.posts else [], ranks)

    def push(self, buckets: Iterable[Bucket], version: int) -> int:
        """Makes every engine serve ``version``; collective.

        Returns:
            bytes that this rank sent.

        Raises:
            WeightPushFailed: on every rank when it failed on any; the engines refuse to generate until a whole push.
        """
        from relax_rollout.engines.sglang.client import SGLangEngine
        from relax_rollout.weight_sync.push import push_weights

        async def go() -> int:
            # The client lives as long as the event loop of one push.
            engines = [SGLangEngine(i["url"], name=i["name"], log_path=i["log_path"]) for i in self.engine_info]
            try:
                return (await push_weights(engines, buckets, version, ranks=self.ranks)).bytes
            finally:
                for engine in engines:
                    await engine.close()

        return asyncio.run(go())
