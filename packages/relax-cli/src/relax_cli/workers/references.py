"""References that the driver hands on instead of rows, by which a rank of the trainer gets those of its own samples."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from relax_data.types import ROW_COLUMNS, RowSource, StepManifest

from relax_cli.cluster.actors import Actor
from relax_cli.cluster.waits import wait_for
from relax_cli.workers.rollout import RolloutActor

ROWS_DEADLINE_S = 120.0
"""How long a rank waits for its rows. They lie in memory, a gigabyte takes seconds: longer is a fault."""


class RowReference(Protocol):
    """A small, picklable name of a rollout's rows."""

    def for_rank(self, rank: int, manifest: StepManifest) -> RowSource:
        """The source that this rank of the trainer fetches the rows of a manifest's samples from."""
        ...


@dataclasses.dataclass(frozen=True)
class RolloutRows:
    """Rows that the rollout worker holds: they go from there to the rank, not through the driver.

    Attributes:
        worker: who holds them.
        rollout_id: of the rollout.
        rank: of the trainer, who fetches; None before it is known.
    """

    worker: Actor[RolloutActor]
    rollout_id: int
    rank: int | None = None

    def for_rank(self, rank: int, manifest: StepManifest) -> RowSource:
        """Names these rows for one rank."""
        return dataclasses.replace(self, rank=rank)

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The rows of the samples at ``indices``, as read-only arrays.

        Raises:
            TimeoutError: after :data:`ROWS_DEADLINE_S`.
            RuntimeError: the rollout worker has died. Both messages name rollout and rank.
        """
        import ray

        what = f"the rows of {len(indices)} samples of rollout {self.rollout_id} to reach trainer rank {self.rank}"
        places = [int(i) for i in indices]
        ref = self.worker.call(RolloutActor.fetch_rows, self.rollout_id, places, tuple(columns))
        try:
            return wait_for(ref, what, deadline_s=ROWS_DEADLINE_S)
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"the rollout worker died, which had {what}: {error}") from error
