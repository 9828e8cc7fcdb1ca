"""Protocol of a transport of weights, and what one is built from."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, EngineAddress


class WeightPushFailed(RuntimeError):
    """A push did not reach the engines; those it began with refuse to generate until a whole push succeeded."""


@dataclasses.dataclass(frozen=True)
class PushReport:
    """Report of a finished push.

    Attributes:
        buckets: number of buckets that this rank sent, or made for others to send.
        tensors: in them.
        bytes: of them.
        failed: for each engine that does not have the new version, by name, why; the same on every rank. Only
            transports that reach each engine by itself get so far with some of them.
        seconds: of the parts ``begin`` (join, pause), ``send`` and ``end`` (serve and go on) on this rank, and of
            ``make`` (all buckets, for the most part beside the others), of transports that measure them.
    """

    buckets: int = 0
    tensors: int = 0
    bytes: int = 0
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)


class WeightTransport(Protocol):
    """One rank's end of a way for weights to travel. Every rank of the trainer has one and makes the same calls."""

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """Makes engines serve a new version; collective.

        At most two buckets exist on this rank at a time, the copies that are sent counted, and none afterwards.

        Args:
            buckets: the whole model, the same on every rank; read one at a time.
            version: number of the new weights.
            engines: names of those that get them, the same on every rank; None for all. The others are not spoken to.

        Raises:
            WeightPushFailed: on every rank when a rank could not make its buckets, or no engine has the new version;
                of transports that reach all engines together, when one of them has not.
        """
        ...

    def close(self) -> None:
        """Gives back what it holds between pushes. May be called twice."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransportSetup:
    """Everything that a transport is built from.

    Attributes:
        engines: all engines of the run, in order.
        rank: of this process in the trainer's world.
        world_size: ranks of the trainer.
        gpus_per_engine: tensor-parallel size of each engine.
        connect: makes the client of an engine.
        device: ``cpu`` or ``cuda``: where the buckets lie.
        folder: where files for engines may be written, for a transport that needs it; both sides have to see it.
    """

    engines: tuple[EngineAddress, ...]
    rank: int
    world_size: int
    gpus_per_engine: int
    connect: Callable[[EngineAddress], Engine]
    device: str = "cpu"
    folder: Path | None = None
