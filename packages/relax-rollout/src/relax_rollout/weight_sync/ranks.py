"""Joint steps of the trainer's ranks in a push. Every rank makes the same calls in the same order."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The trainer's ranks, seen from one of them."""

    @property
    def shares_gpu(self) -> bool:
        """True when an engine reads this rank's copy of the bucket."""
        ...

    @property
    def posts(self) -> bool:
        """True on the rank that talks to an engine in the name of all ranks that share its GPUs."""
        ...

    def all_of_engine(self, ready: bool) -> bool:
        """Whether all ranks that share the GPUs of this rank's engine are ready; collective over these."""
        ...

    def gather(self, item: T) -> list[T] | None:
        """On the rank that posts the items of all ranks of its engine, in tensor-parallel order; else None."""
        ...

    def agree(self, error: str | None) -> str | None:
        """The first error of any rank; also holds every rank until all came here."""
        ...

    def everyones(self, item: T) -> list[T]:
        """The items of all ranks, in their order, on every rank."""
        ...


class OneRank:
    """A single process that feeds engines of one rank each."""

    shares_gpu = True
    posts = True

    def all_of_engine(self, ready: bool) -> bool:
        """Whether it is ready itself."""
        return ready

    def gather(self, item: T) -> list[T] | None:
        """Its own item."""
        return [item]

    def agree(self, error: str | None) -> str | None:
        """Its own error."""
        return error

    def everyones(self, item: T) -> list[T]:
        """Its own item."""
        return [item]


class TorchRanks:
    """Ranks of a ``torch.distributed`` world; what they tell each other travels over gloo."""

    def __init__(self, engines: Sequence[Sequence[int]]) -> None:
        """Collective over all ranks: makes the groups.

        Args:
            engines: for each engine the global ranks that share its GPUs, in its tensor-parallel order. The first of
                them posts. Empty where no GPU is shared.

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
    def shares_gpu(self) -> bool:
        """True when an engine reads this rank's copy of the bucket."""
        return bool(self._mine)

    @property
    def posts(self) -> bool:
        """True on the rank that talks to the engine."""
        return bool(self._mine) and self._mine[0] == self._rank

    def all_of_engine(self, ready: bool) -> bool:
        """Whether all ranks that share the GPUs of this rank's engine are ready; collective over these."""
        if self._group is None:
            return ready
        import torch
        import torch.distributed as dist

        least = torch.tensor([int(ready)])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return bool(least.item())

    def gather(self, item: T) -> list[T] | None:
        """On the rank that posts the items of all ranks of its engine, in tensor-parallel order; else None."""
        if self._group is None:
            return [item] if self._mine else None
        import torch.distributed as dist

        # Gloo orders a group by global rank, the engine by its tensor-parallel rank.
        everyone: list[Any] | None = [None] * len(self._mine) if self.posts else None
        dist.gather_object((self._rank, item), everyone, dst=self._mine[0], group=self._group)
        if everyone is None:
            return None
        by_rank = dict(everyone)
        return [by_rank[r] for r in self._mine]

    def agree(self, error: str | None) -> str | None:
        """The first error of any rank; also holds every rank until all came here."""
        return next((e for e in self.everyones(error) if e is not None), None)

    def everyones(self, item: T) -> list[T]:
        """The items of all ranks, in their order, on every rank."""
        import torch.distributed as dist

        items: list[Any] = [None] * dist.get_world_size(self._world)
        dist.all_gather_object(items, item, group=self._world)
        return items
