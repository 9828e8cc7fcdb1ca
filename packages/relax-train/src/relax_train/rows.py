"""The samples of a step as one rank has them: the manifest of all, the rows of its own."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from relax_data.types import PICTURE_COLUMNS, ROW_COLUMNS, RowSource, StepManifest


@dataclasses.dataclass(frozen=True)
class RankBatch:
    """A step's samples, all of them by their numbers and those of this rank with their rows.

    Attributes:
        manifest: lengths, rewards, names of all ``n`` samples.
        tokens: int64 ``[prompt + response]`` by place in the manifest, of the rows that were fetched.
        loss_masks: float32 ``[response]``, likewise.
        rollout_log_probs: float32 ``[response]``, likewise.
        pixel_values, image_grid_thw: what the processor made of their pictures, likewise (columns of
            :data:`relax_data.types.PICTURE_COLUMNS`); empty for a model that reads text only.
    """

    manifest: StepManifest
    tokens: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    loss_masks: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    rollout_log_probs: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    pixel_values: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    image_grid_thw: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.manifest)

    @property
    def rollout_id(self) -> int:
        """Absolute id of the rollout."""
        return self.manifest.rollout_id

    @property
    def names(self) -> list[str]:
        """Name of each sample in messages."""
        return self.manifest.names

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 ``[n]``."""
        return self.manifest.response_lengths

    @property
    def total_lengths(self) -> np.ndarray:
        """int64 ``[n]``: prompt plus response tokens."""
        return self.manifest.total_lengths

    def select(self, indices: Sequence[int]) -> "RankBatch":
        """The samples at ``indices``, in that order, with those of their rows that are here."""
        place = {old: new for new, old in enumerate(indices)}

        def column(values: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
            return {place[i]: value for i, value in values.items() if i in place}

        return RankBatch(
            self.manifest.select(indices),
            column(self.tokens),
            column(self.loss_masks),
            column(self.rollout_log_probs),
            column(self.pixel_values),
            column(self.image_grid_thw),
        )


def fetch_rows(manifest: StepManifest, rows: RowSource, own: Sequence[int], *, pictures: bool = False) -> RankBatch:
    """Fetches the rows of a rank's own samples, and no other.

    Args:
        manifest: of all samples.
        rows: where they are.
        own: places in the manifest, each once.
        pictures: whether the model reads pictures.

    Raises:
        ValueError: a row is not what the manifest says; the message names the sample.
    """
    columns = rows.fetch(own, (*ROW_COLUMNS, *PICTURE_COLUMNS) if pictures else ROW_COLUMNS)
    for name, lengths in (
        ("tokens", manifest.total_lengths),
        ("loss_masks", manifest.response_lengths),
        ("rollout_log_probs", manifest.response_lengths),
    ):
        for i, value in zip(own, columns[name], strict=True):
            if len(value) != lengths[i]:
                raise ValueError(
                    f"{manifest.names[i]}: its row has {len(value)} values of {name}, its manifest says {lengths[i]}: "
                    "the rows belong to another rollout, or the generate function gave columns of different lengths"
                )
    return RankBatch(manifest, **{name: dict(zip(own, values, strict=True)) for name, values in columns.items()})
