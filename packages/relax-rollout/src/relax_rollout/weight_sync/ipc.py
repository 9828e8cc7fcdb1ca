"""Weights to engines on the trainer's own GPUs: a handle travels, and the engine copies from the trainer's memory."""

import asyncio
from collections.abc import Collection, Iterable, Sequence

import torch
from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, IpcHandle
from relax_rollout.weight_sync.base import PushReport, TransportSetup
from relax_rollout.weight_sync.push import EngineTransport, Send
from relax_rollout.weight_sync.ranks import OneRank, Ranks, TorchRanks


class IpcTransport(EngineTransport):
    """This rank's end; gives the memory back that engines have finished reading.

    Attributes:
        shares_with: names of the engines that read this rank's copy: one, or none.
    """

    shares_with: tuple[str, ...] = ()

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """See :class:`relax_rollout.weight_sync.base.WeightTransport`."""
        try:
            return super().push(buckets, version, engines)
        finally:
            if torch.cuda.is_initialized():
                # Frees the blocks whose handles the engines have closed.
                torch.cuda.ipc_collect()

    def send_for(self, engines: Collection[str] | None) -> Send:
        """A rank whose engine is left out shares nothing: memory with a handle that nobody opens is never freed."""
        left_out = engines is not None and not set(self.shares_with) & set(engines)
        return SendNothing() if left_out else super().send_for(engines)


def ipc_transport(setup: TransportSetup) -> IpcTransport:
    """Builds this rank's end; collective.

    Engine ``i`` lies on the GPUs of ranks ``[i * gpus_per_engine, (i + 1) * gpus_per_engine)``, each of which hands it
    its own copy of a bucket.
    """
    size = setup.gpus_per_engine
    if setup.world_size == 1:
        alone = IpcTransport(setup.engines, OneRank(), SendHandles(), setup.connect)
        alone.shares_with = tuple(address.name for address in setup.engines)
        return alone
    ranks = TorchRanks([range(i * size, (i + 1) * size) for i in range(len(setup.engines))])
    engine = setup.engines[setup.rank // size] if ranks.shares_gpu else None
    transport = IpcTransport([engine] if engine and ranks.posts else [], ranks, SendHandles(), setup.connect)
    transport.shares_with = (engine.name,) if engine else ()
    return transport


class SendHandles:
    """Has an engine read the copies of all ranks that share its GPUs; see :class:`relax_rollout.weight_sync.push.Send`.

    A bucket is offered as soon as it is made, also while the engine loads the one before: its server reads the call
    meanwhile, and the engine goes on at once.
    """

    ahead = 1

    def prepare(self, bucket: Bucket | None, ranks: Ranks) -> list[IpcHandle | None] | None:
        """The handles of all ranks of the engine, on the rank that posts; collective.

        None of them shares its copy before all have one: memory with a handle that nobody opens is never freed.

        Raises:
            ValueError: this rank could not share its copy.
        """
        handle: IpcHandle | None = None
        failure: Exception | None = None
        if ranks.shares_gpu and ranks.all_of_engine(bucket is not None):
            assert bucket is not None, "this rank is one of them"
            try:
                handle = share(bucket.flat)
            except Exception as error:  # the other ranks wait in gather: go there first
                failure = error
        handles = ranks.gather(handle)
        if failure is not None:
            raise failure
        return handles

    async def load(self, engines: Sequence[Engine], bucket: Bucket, prepared: list[IpcHandle | None] | None) -> None:
        """See :meth:`relax_rollout.weight_sync.push.Send.load`.

        Raises:
            ValueError: another rank could not share its copy.
        """
        if engines:
            shared = [handle for handle in prepared or () if handle is not None]
            if not prepared or len(shared) < len(prepared):
                raise ValueError("a rank that shares a GPU with the engine could not share its bucket")
            await asyncio.gather(*(engine.load(bucket, shared) for engine in engines))


class SendNothing:
    """Lets buckets pass by; all ranks that share an engine's GPUs do the same."""

    ahead = 1

    def prepare(self, bucket: Bucket | None, ranks: Ranks) -> None:
        """Needs nothing of other ranks."""

    async def load(self, engines: Sequence[Engine], bucket: Bucket, prepared: None) -> None:
        """Loads nothing."""


def share(flat: torch.Tensor) -> IpcHandle:
    """A handle of a flat CUDA tensor's bytes; the memory must stay as it is until the engine has read it.

    Raises:
        ValueError: the tensor is not on a GPU.
    """
    if not flat.is_cuda:
        raise ValueError(f"only memory of a GPU can be shared by CUDA IPC, but the bucket lies on {flat.device}")
    from torch.multiprocessing import reductions

    rebuild, arguments = reductions.reduce_tensor(flat.detach().view(torch.uint8))
    # The last argument asks the reader to wait for a CUDA event of this process. An engine that was started after this
    # process had given memory back can open the memory but not the event (error 205). Waiting here needs no event.
    assert isinstance(arguments[-1], bool), "torch's rebuild_cuda_tensor ends with event_sync_required"
    torch.cuda.current_stream(flat.device).synchronize()
    arguments = (*arguments[:-1], False)
    return IpcHandle(str(torch.cuda.get_device_properties(flat.device).uuid), rebuild, tuple(arguments))
