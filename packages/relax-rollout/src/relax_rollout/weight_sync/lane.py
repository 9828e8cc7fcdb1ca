"""One engine that a rank of the trainer feeds: its process group, and its part in a push."""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, EngineAddress, GroupEngine
from relax_rollout.weight_sync.background import both, in_thread, within
from relax_rollout.weight_sync.feeders import meeting_host
from relax_rollout.weight_sync.pair_group import PairGroup

JOIN_DEADLINE_S = 120.0
_HEAR_S = 5.0
"""Seconds for the engine's answer after its group broke: a dead one is known as such after about one."""
_GIVE_UP_S = 10.0
"""Seconds for each call to an engine that is given up."""
_POLL_S = 0.0005


class Lane:
    """The way to one engine. The group stays between pushes, until something fails or the engine is another process."""

    def __init__(
        self,
        address: EngineAddress,
        connect: Callable[[EngineAddress], Engine],
        *,
        device: str,
        deadline_s: float,
    ) -> None:
        """Stores them; nothing is sent yet.

        Args:
            address: of the engine.
            connect: makes its client.
            device: ``cpu`` or ``cuda``: where the buckets lie.
            deadline_s: longest time of one bucket.
        """
        self.address, self._connect = address, connect
        self._device, self._deadline_s = device, deadline_s
        self._engine: Any = None
        self._group: PairGroup | None = None
        self._launch = ""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.address.name

    async def begin(self, version: WeightVersion) -> None:
        """Joins the engine's group if there is none, and has the engine pause and refuse to generate.

        Raises:
            ValueError: the engine cannot take weights over a process group.
            TimeoutError: they did not meet in time.
        """
        self._engine = self._connect(self.address)
        if not isinstance(self._engine, GroupEngine):
            raise ValueError(f"{self.name} cannot take weights over a process group; take another transport")
        async with within(JOIN_DEADLINE_S, f"{self.name} did not join its process group"):
            launch = await self._engine.launch()
            if self._group is not None and launch != self._launch:
                # A server that is asked for a group that it does not know ends itself.
                await self._drop_group()
            if self._group is None:
                await self._join()
                self._launch = launch
        await self._engine.begin_update(version)

    async def _join(self) -> None:
        group = PairGroup(
            f"relax-{self.name}-{uuid.uuid4().hex[:12]}",
            host=meeting_host(self.address.url),
            engine_ranks=await self._engine.tp_size(),
            device=self._device,
            deadline_s=max(JOIN_DEADLINE_S, self._deadline_s) if self._device == "cuda" else self._deadline_s,
        )
        await both(self._engine.join_group(group.address), in_thread(group.join), hear_s=_HEAR_S)
        self._group = group

    async def send(self, number: int, bucket: Bucket, stream: "torch.cuda.Stream | None") -> None:
        """Has the engine load a bucket; returns when neither side needs its memory any more.

        Args:
            number: of the bucket, from 1, for messages.
            bucket: stays as it is meanwhile.
            stream: on which its values are computed, on a GPU.

        Raises:
            TimeoutError: the engine took too long.
            RuntimeError: the engine refused it, or the broadcast failed.
            EngineDied: the engine is gone.
        """
        assert self._group is not None, "a push begins before it sends"
        what = f"bucket {number} ({len(bucket)} tensors, {bucket.nbytes / 2**20:.1f} MiB)"
        async with within(self._deadline_s, f"{self.name} did not load {what}"):
            asked = self._engine.load_from_group(bucket, self._group.address.name)
            await both(asked, self._broadcast(self._group, bucket.flat, stream, what), hear_s=_HEAR_S)

    async def _broadcast(
        self, group: PairGroup, flat: torch.Tensor, stream: "torch.cuda.Stream | None", what: str
    ) -> None:
        try:
            # The first over NCCL sets up the connection, which takes as long as the engine needs to come there.
            await in_thread(functools.partial(group.broadcast, flat, stream))
            while not group.sent():
                await asyncio.sleep(_POLL_S)
        except RuntimeError as error:
            hint = (
                "; has this process set_nccl_environment() called before it used NCCL?"
                if "invalid argument" in str(error).lower()
                else ""
            )
            raise RuntimeError(f"the broadcast of {what} to {self.name} failed: {error}{hint}") from error

    async def end(self, version: WeightVersion) -> None:
        """Has the engine serve the version."""
        await self._engine.end_update(version)

    async def give_up(self, version: WeightVersion) -> None:
        """Leaves an engine that failed: it is marked as broken if it still answers, and its group is ended."""
        if self._engine is not None:
            await asyncio.gather(self._drop_group(), _try(self._engine.end_update(version, whole=False)))

    async def _drop_group(self, *, left: bool = False) -> None:
        """Ends the group on both sides, as far as they answer; the next push has one of another name."""
        group, self._group = self._group, None
        if group is not None:
            steps = [_try(in_thread(group.abort))]
            if not left:
                steps.append(_try(self._engine.leave_group(group.address.name)))
            await asyncio.gather(*steps)

    async def rest(self) -> None:
        """Closes the engine's client after a push; the group stays."""
        if self._engine is not None:
            await _try(self._engine.close())
            self._engine = None

    async def close(self) -> None:
        """Ends the group, if there is one."""
        if self._group is not None:
            self._engine = self._connect(self.address)
            # First the engine: its library may still want to say good-bye to this side.
            await _try(self._engine.leave_group(self._group.address.name))
            await self._drop_group(left=True)
            await self.rest()


async def _try(step: Coroutine[Any, Any, None]) -> None:
    """Does what is good to do but may fail, for a while."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_GIVE_UP_S):
            await step
