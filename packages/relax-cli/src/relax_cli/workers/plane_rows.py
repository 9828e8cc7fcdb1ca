"""Rows of ``--fully-async``: from the rollout worker through TransferQueue to the rank that needs them."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from relax_data.plane.base import PlaneError
from relax_data.plane.rows import PlaneRows
from relax_data.types import ROW_COLUMNS, StepManifest

if TYPE_CHECKING:
    from relax_data.plane.transferqueue import TransferQueuePlane

ROWS_PLANE = "rows"
"""Name of the plane. The rollout worker starts it, the ranks join it."""


@functools.cache
def joined_plane() -> "TransferQueuePlane":
    """The plane of the run's rows, as a process has it that fetches from there; the first call joins it.

    Raises:
        PlaneError: the rollout worker has not started it.
    """
    from relax_data.plane.transferqueue import TransferQueuePlane

    return TransferQueuePlane(ROWS_PLANE)


@dataclasses.dataclass(frozen=True)
class RowsInPlane:
    """Rows that the rollout worker has put into TransferQueue; the manifest has their ids."""

    def for_rank(self, rank: int, manifest: StepManifest) -> "FetchedRows":
        """Names the rows of this manifest for one rank."""
        rows = PlaneRows(joined_plane(), manifest.row_ids, manifest.picture_ids)
        return FetchedRows(rows, manifest.rollout_id, rank)


@dataclasses.dataclass
class FetchedRows:
    """Rows in a plane that one rank fetches, and how long that took.

    Attributes:
        rows: of all samples of the step.
        rollout_id: of the step.
        rank: of the trainer, who fetches.
        seconds: that its fetches have taken.
    """

    rows: PlaneRows
    rollout_id: int
    rank: int
    seconds: float = 0.0

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The rows of the samples at ``indices``.

        Raises:
            PlaneError, PlaneFailed: see :meth:`relax_data.plane.rows.PlaneRows.fetch`; rollout and rank are noted.
        """
        begin = time.perf_counter()
        try:
            return self.rows.fetch(indices, columns)
        except PlaneError as error:
            what = f"the rows of {len(indices)} samples of rollout {self.rollout_id}"
            error.add_note(f"Trainer rank {self.rank} was fetching {what}.")
            raise
        finally:
            self.seconds += time.perf_counter() - begin
