"""A new version of the weights, from the trainer's ranks to engines, bucket by bucket.

A bucket is a list of (Hugging Face name, whole tensor). It is copied into one flat tensor and sent in SGLang's
``flattened_bucket`` format: on CPU by value inside the request, so that no file or socket has to be shared; on CUDA as
an IPC handle, so that only a few bytes travel and the engine copies from the trainer's memory.

At most two buckets exist at a time: the trainer's and its flat copy.
"""

import asyncio
import base64
import contextlib
import dataclasses
import io
import pickle
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from relax_data.types import WeightVersion

from relax_rollout.engines.base import PauseMode
from relax_rollout.engines.sglang.client import SGLangEngine

Bucket = list[tuple[str, torch.Tensor]]

LOAD_FORMAT = "flattened_bucket"
_ALIGNMENT = 16
# Position of the device in the arguments that rebuild a CUDA tensor (torch.multiprocessing.reductions).
_DEVICE_ARGUMENT = 6


class WeightPushFailed(RuntimeError):
    """A push did not reach every engine; those it began with refuse to generate until a whole push succeeded."""


@dataclasses.dataclass(frozen=True)
class PushReport:
    """What a finished push sent: number of buckets and tensors, and their bytes."""

    buckets: int
    tensors: int
    bytes: int


# ---------------------------------------------------------------------- one bucket


@dataclasses.dataclass
class FlatBucket:
    """A bucket as one uint8 tensor, and where each tensor lies in it.

    On CUDA it must stay alive until the engine has loaded it: the engine reads this memory.
    """

    data: torch.Tensor
    layout: list[types.SimpleNamespace]

    @classmethod
    def of(cls, bucket: Sequence[tuple[str, torch.Tensor]]) -> "FlatBucket":
        """Copies the tensors of one device, one after the other, each at a multiple of 16 bytes.

        Raises:
            ValueError: the bucket is empty or spans devices.
        """
        if not bucket:
            raise ValueError("an empty bucket of weights")
        devices = {t.device for _, t in bucket}
        if len(devices) != 1:
            raise ValueError(f"a bucket of weights must lie on one device, not on {sorted(map(str, devices))}")
        layout, end = [], 0
        for name, tensor in bucket:
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = start + tensor.numel() * tensor.element_size()
            # Attributes as SGLang reads them; start and end are in bytes.
            layout.append(
                types.SimpleNamespace(
                    name=name,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=end - start,
                )
            )
        data = torch.empty(end, dtype=torch.uint8, device=devices.pop())
        for (_, tensor), place in zip(bucket, layout, strict=True):
            target = data[place.start_idx : place.end_idx].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor.detach())
        return cls(data, layout)

    def serialize(self) -> str:
        """Base64 of a pickle that SGLang's restricted unpickler accepts; by value on CPU, an IPC handle on CUDA."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump({"flattened_tensor": self.data, "metadata": self.layout})
        return base64.b64encode(buffer.getbuffer()).decode("ascii")


class _Pickler(pickle.Pickler):
    """Pickles CUDA tensors as IPC handles that name the GPU by UUID: its number differs between processes."""

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        from torch.multiprocessing import reductions

        rebuild, arguments = reductions.reduce_tensor(obj)
        device = arguments[_DEVICE_ARGUMENT]
        if isinstance(device, int):
            device = str(torch.cuda.get_device_properties(device).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], device, *arguments[_DEVICE_ARGUMENT + 1 :])


# ---------------------------------------------------------------------- several ranks


class Ranks(Protocol):
    """How the ranks of the trainer act together in a push. Every rank makes the same calls in the same order."""

    @property
    def serializes(self) -> bool:
        """True when an engine reads this rank's copy of the bucket."""
        ...

    def gather(self, serialized: str) -> list[str] | None:
        """On the rank that posts the strings of all ranks of its engine, in tensor-parallel order; else None."""
        ...

    def agree(self, error: str | None) -> str | None:
        """The first error of any rank; also holds every rank until all came here."""
        ...


class OneRank:
    """A single process that feeds engines of one rank each."""

    serializes = True

    def gather(self, serialized: str) -> list[str] | None:
        return [serialized]

    def agree(self, error: str | None) -> str | None:
        return error


class TorchRanks:
    """Ranks of a ``torch.distributed`` world; the strings travel over gloo."""

    def __init__(self, engines: Sequence[Sequence[int]]) -> None:
        """Collective over all ranks: makes the groups.

        Args:
            engines: for each engine the global ranks that share its GPUs, in its tensor-parallel order. The first of
                them posts, and passes the engine to :func:`push_weights`; on CPU that is one rank, ``[[0]]``.

        Raises:
            ValueError: a rank appears in two engines.
        """
        import torch.distributed as dist

        flat = [r for ranks in engines for r in ranks]
        if len(set(flat)) != len(flat):
            raise ValueError(f"a rank can share GPUs with one engine only, but got {[list(e) for e in engines]}")
        self._world = dist.new_group(backend="gloo")
        self._mine: list[int] = []
        self._group: Any = None
        for ranks in engines:
            group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
            if dist.get_rank() in ranks:
                self._mine, self._group = list(ranks), group
        self._rank = dist.get_rank()

    @property
    def serializes(self) -> bool:
        return bool(self._mine)

    @property
    def posts(self) -> bool:
        """True on the rank that talks to the engine."""
        return bool(self._mine) and self._mine[0] == self._rank

    def gather(self, serialized: str) -> list[str] | None:
        if self._group is None:
            return [serialized] if self._mine else None
        import torch.distributed as dist

        # Gloo orders a group by global rank, the engine by its tensor-parallel rank.
        everyone: list[Any] | None = [None] * len(self._mine) if self.posts else None
        dist.gather_object((self._rank, serialized), everyone, dst=self._mine[0], group=self._group)
        if everyone is None:
            return None
        by_rank = dict(everyone)
        return [by_rank[r] for r in self._mine]

    def agree(self, error: str | None) -> str | None:
        import torch.distributed as dist

        errors: list[Any] = [None] * dist.get_world_size(self._world)
        dist.all_gather_object(errors, error, group=self._world)
        return next((e for e in errors if e is not None), None)


# ---------------------------------------------------------------------- the push


async def push_weights(
    engines: SGLangEngine | Sequence[SGLangEngine],
    buckets: Iterable[Bucket],
    version: WeightVersion,
    *,
    ranks: Ranks | None = None,
    mode: PauseMode = "abort",
) -> PushReport:
    """Makes engines serve a new version: pause, all buckets, flush, version, resume.

    Every rank of the trainer calls it with the same number of buckets; ranks that post to no engine pass none.

    Args:
        engines: the engines that this rank posts to.
        buckets: the whole model; read one at a time, and a bucket is let go before the next one is asked for.
        version: number of the new weights.
        ranks: the trainer's ranks; None for a single process.
        mode: what happens to requests that are running; see :meth:`SGLangEngine.pause`.

    Returns:
        what this rank sent.

    Raises:
        WeightPushFailed: on every rank, when it failed on any. Engines it began with are marked broken: they generate
            again only after a whole push.
    """
    own = [engines] if isinstance(engines, SGLangEngine) else list(engines)
    ranks = ranks or OneRank()
    report, failure = PushReport(0, 0, 0), None
    try:
        async with contextlib.AsyncExitStack() as stack:
            await _together(ranks, _begin(stack, own, version, mode))
            iterator = iter(buckets)
            while (sent := await _push_next(own, iterator, ranks)) is not None:
                report = PushReport(report.buckets + 1, report.tensors + sent[0], report.bytes + sent[1])
            if report.buckets == 0:
                raise ValueError("no weights were given")
    except Exception as error:
        failure = error
    told = ranks.agree(None if failure is None else f"{type(failure).__name__}: {failure}")
    if torch.cuda.is_initialized():
        # Frees the blocks whose IPC handles the engines have closed.
        torch.cuda.ipc_collect()
    if told is not None:
        raise WeightPushFailed(
            f"weights of version {version} did not reach every engine, which refuse to generate until they are pushed "
            f"again as a whole. {told}"
        ) from failure
    return report


async def _begin(
    stack: contextlib.AsyncExitStack, engines: list[SGLangEngine], version: WeightVersion, mode: PauseMode
) -> None:
    for engine in engines:
        await stack.enter_async_context(engine.pushing(version, mode))


async def _push_next(engines: list[SGLangEngine], buckets: Iterator[Bucket], ranks: Ranks) -> tuple[int, int] | None:
    """Sends the next bucket: (tensors, bytes), or None when there is none.

    The bucket, its flat copy and the strings are local here, so they are gone when the next one is made.
    """
    flat: FlatBucket | None = None
    serialized, sent, failure = "", None, None
    try:
        bucket = next(buckets, None)
        if bucket is not None:
            sent = (len(bucket), sum(t.numel() * t.element_size() for _, t in bucket))
            if ranks.serializes:
                flat = FlatBucket.of(bucket)
                serialized = flat.serialize()
        del bucket
    except Exception as error:  # the other ranks wait in gather: go there first
        failure = error
    strings = ranks.gather(serialized)

    async def post() -> None:
        if failure is not None:
            raise failure
        if sent is not None and engines:
            if not strings or not all(strings):
                raise ValueError("a rank that shares a GPU with the engine could not serialize its bucket")
            await asyncio.gather(*(e.update_weights_from_tensors(strings, load_format=LOAD_FORMAT) for e in engines))

    await _together(ranks, post())
    del flat
    return sent


async def _together(ranks: Ranks, action: Any) -> None:
    """Awaits this rank's part, then waits for all ranks.

    Raises:
        Exception: this rank's own error, or a RuntimeError with another rank's.
    """
    failure: Exception | None = None
    try:
        await action
    except Exception as error:
        failure = error
    told = ranks.agree(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if told is not None:
        raise RuntimeError(told)
