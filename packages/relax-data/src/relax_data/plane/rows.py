"""Samples as rows of a plane: one row a sample, about 13 bytes a token.

- ``tokens`` int32 ``[prompt + response]``
- ``log_probs`` float32 ``[response]``: natural log, as the engine returned them
- ``versions`` int32 ``[response]``: policy version that sampled each token
- ``mask`` uint8 ``[response]``: 1 where the token is trained on

Pictures have rows of their own, one a prompt, since all responses to a prompt share them; their columns are
:data:`relax_data.types.PICTURE_COLUMNS`.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from relax_data.plane.base import DataPlane
from relax_data.types import NO_PICTURES, PICTURE_COLUMNS, ROW_COLUMNS, Prompt, Sample

_STORED: dict[str, tuple[str, type[np.generic]]] = {
    "tokens": ("tokens", np.int64),
    "loss_masks": ("mask", np.float32),
    "rollout_log_probs": ("log_probs", np.float32),
}
"""For each of :data:`relax_data.types.ROW_COLUMNS` the column of the plane, and the type that the trainer has it in."""


def sample_rows(samples: Iterable[Sample]) -> dict[str, list[np.ndarray]]:
    """Columns of one row a sample, for :meth:`relax_data.plane.base.DataPlane.put`.

    Raises:
        ValueError: as :meth:`relax_data.types.Sample.check_trainable`.
    """
    columns: dict[str, list[np.ndarray]] = {"tokens": [], "log_probs": [], "versions": [], "mask": []}
    for sample in samples:
        sample.check_trainable()
        columns["tokens"].append(np.array([*sample.prompt.input_ids, *sample.tokens], dtype=np.int32))
        columns["log_probs"].append(np.array(sample.log_probs, dtype=np.float32))
        columns["versions"].append(np.array(sample.versions, dtype=np.int32))
        columns["mask"].append(np.array(sample.loss_mask, dtype=np.uint8))
    return columns


def picture_row(prompt: Prompt) -> dict[str, np.ndarray] | None:
    """Columns of the row with a prompt's pictures, or None when it has none."""
    features = prompt.features
    return {name: features[name] for name in PICTURE_COLUMNS} if PICTURE_COLUMNS[0] in features else None


@dataclasses.dataclass(frozen=True)
class PlaneRows:
    """The rows of a step's samples in a plane, as a :class:`relax_data.types.RowSource`.

    Attributes:
        plane: that they were put into.
        ids: one a sample, in the order of the manifest.
        picture_ids: likewise, of the rows with pictures; None for a sample without, and empty when all are.
    """

    plane: DataPlane
    ids: Sequence[int]
    picture_ids: Sequence[int | None] = ()

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The rows of the samples at ``indices``, in the types of :class:`relax_data.types.TrainBatch`.

        The pictures of a prompt are fetched once, and all samples of it share the arrays.

        Raises:
            PlaneError: a row is not there.
            PlaneFailed: the plane broke; the message says which part of it.
        """
        known = {*ROW_COLUMNS, *PICTURE_COLUMNS}
        assert set(columns) <= known, f"a row has the columns {sorted(known)}, not {columns}"
        stored = [name for name in columns if name in _STORED]
        found = self.plane.fetch([self.ids[i] for i in indices], [_STORED[name][0] for name in stored]).columns
        rows = {name: [row.astype(_STORED[name][1]) for row in found[_STORED[name][0]]] for name in stored}
        wanted = [name for name in columns if name not in _STORED]
        return rows | (self._pictures(indices, wanted) if wanted else {})

    def _pictures(self, indices: Sequence[int], columns: Sequence[str]) -> dict[str, list[np.ndarray]]:
        of_samples = [self.picture_ids[i] if self.picture_ids else None for i in indices]
        ids = list(dict.fromkeys(i for i in of_samples if i is not None))
        found = self.plane.fetch(ids, columns).columns
        place = {i: k for k, i in enumerate(ids)}
        return {
            name: [NO_PICTURES[name] if i is None else found[name][place[i]] for i in of_samples] for name in columns
        }
