"""Types that flow between the packages: prompts, samples, groups, training batches. Needs numpy only."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

WeightVersion = int
"""Number of the policy: 0 for the start weights, one more after each training step, counted over resumes.

The weights that rollout ``k`` of a colocate run is generated with have version ``k``.
"""

ROUNDING = 2.0**-21
"""Numbers that differ by less than this share of their size differ by rounding: four steps of float32."""
_CANCELLED = 1e-12

Messages = list[dict[str, Any]]

NO_PICTURES: dict[str, np.ndarray] = {
    "pixel_values": np.zeros((0, 0), np.float32),
    "image_grid_thw": np.zeros((0, 3), np.int64),
}
"""Columns of :data:`PICTURE_COLUMNS` of a sample without pictures."""


class SampleStatus(enum.StrEnum):
    """Progress of the generation of a sample."""

    PENDING = "pending"
    """Nothing, or a part of the response is there and generation will go on."""
    COMPLETED = "completed"
    """The model ended it: end-of-sequence or a stop string."""
    TRUNCATED = "truncated"
    """The length budget ended it."""
    ABORTED = "aborted"
    """We interrupted it; what it has may be continued or thrown away."""
    FAILED = "failed"
    """Its generation or its reward raised; ``Sample.error`` says what."""

    @property
    def finished(self) -> bool:
        """True when the response is whole and may be scored."""
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


@dataclasses.dataclass(slots=True)
class Prompt:
    """One row of the prompt data, ready to generate from.

    Attributes:
        prompt_id: position in the whole run, 0-based over all epochs: the identity of this prompt in ledger and logs.
        epoch: 0-based epoch it belongs to.
        source: ``file:line`` (1-based line or row), for error messages.
        text: the prompt as the model sees it, after the chat template.
        input_ids: its tokens.
        label: ground truth for the reward, or None.
        messages: the chat messages it was made from, or None for plain text.
        metadata: whatever the row holds under ``--metadata-key``.
        multimodal: paths or objects by modality (``{"image": [...]}``); empty for text.
        features: what became of its pictures, empty for text: for the trainer ``pixel_values`` float32 ``[patches,
            numbers of a patch]`` and ``image_grid_thw`` int64 ``[pictures, 3]``, for the engine ``picture_png`` uint8
            ``[bytes]``, one file after another, ``picture_sizes`` int64 ``[pictures]``, bytes of each, and
            ``engine_ids`` int64, the tokens with one for each picture, and ``media_tokens`` int64, the tokens that
            stand for pictures and videos: no engine goes on behind one that the model wrote; for a resume
            ``picture_digest`` uint8 ``[16]``, of their files.
    """

    prompt_id: int
    epoch: int
    source: str
    text: str
    input_ids: list[int]
    label: Any = None
    messages: Messages | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    multimodal: dict[str, Any] = dataclasses.field(default_factory=dict)
    features: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False, compare=False)


@dataclasses.dataclass(slots=True)
class Sample:
    """One response to one prompt, with what is known of each of its tokens.

    ``tokens``, ``log_probs``, ``versions`` and ``loss_mask`` have one entry a response token and grow only through
    :meth:`append`, so they cannot drift apart; :meth:`check_columns` finds those that somebody set otherwise.

    Attributes:
        prompt: what it answers.
        index: 0-based number among the responses to this prompt.
        tokens: response token ids.
        log_probs: natural log-probability the engine gave each token when it sampled it.
        versions: policy version that sampled each token.
        loss_mask: 1 where the token is trained on, 0 where it is not (tool output, masked off-policy tokens).
        response: decoded response.
        reward: score, None until it was computed.
        reward_info: further values the reward function returned.
        aborted_count: how often it was interrupted.
        error: why its status is FAILED.
    """

    prompt: Prompt
    index: int
    status: SampleStatus = SampleStatus.PENDING
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[WeightVersion] = dataclasses.field(default_factory=list)
    loss_mask: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    reward: float | None = None
    reward_info: dict[str, Any] = dataclasses.field(default_factory=dict)
    aborted_count: int = 0
    error: str | None = None

    @property
    def label(self) -> Any:
        """Ground truth of its prompt, or None."""
        return self.prompt.label

    @property
    def name(self) -> str:
        """Its name in messages: the row it came from and its number in the group."""
        return f"{self.prompt.source} response {self.index}"

    @property
    def oldest_version(self) -> WeightVersion | None:
        """Oldest policy version among its tokens; None before the first token."""
        return min(self.versions) if self.versions else None

    def append(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float],
        versions: WeightVersion | Sequence[WeightVersion],
        *,
        loss_mask: int | Sequence[int] = 1,
    ) -> None:
        """Adds response tokens; the only operation that changes the per-token columns.

        Args:
            tokens: new token ids.
            log_probs: log-probability of each.
            versions: policy version of each, or one for all.
            loss_mask: 1 or 0 of each, or one for all.

        Raises:
            ValueError: the columns differ in length, or a log-probability is NaN. Nothing is added then.
        """
        n = len(tokens)
        new_versions = [versions] * n if isinstance(versions, int) else list(versions)
        new_mask = [loss_mask] * n if isinstance(loss_mask, int) else list(loss_mask)
        for column, values in (("log_probs", log_probs), ("versions", new_versions), ("loss_mask", new_mask)):
            if len(values) != n:
                raise ValueError(f"{self.name}: {n} tokens but {len(values)} {column}")
        if any(p != p for p in log_probs):
            raise ValueError(f"{self.name}: the engine returned a log-probability that is not a number")
        self.tokens.extend(tokens)
        self.log_probs.extend(log_probs)
        self.versions.extend(new_versions)
        self.loss_mask.extend(new_mask)

    def check_columns(self) -> None:
        """Looks whether the columns still fit together; a function of the user may have set one of them itself.

        Raises:
            ValueError: one has another length than ``tokens``, or a value that it cannot have; the message names the
                sample and the column.
        """
        n = len(self.tokens)
        allowed = {
            "tokens": ("iu", "token ids, integers from 0 on", lambda values: values >= 0),
            "log_probs": ("iuf", "numbers", lambda values: values == values),
            "versions": ("iu", "integers", lambda values: values == values),
            "loss_mask": ("biuf", "0 or 1", lambda values: (values == 0) | (values == 1)),
        }
        for column, (kinds, wanted, holds) in allowed.items():
            given = getattr(self, column)
            if not isinstance(given, Sequence | np.ndarray):
                raise ValueError(f"{self.name}: its {column} are no list, but {type(given).__name__}")
            if len(given) != n:
                raise ValueError(
                    f"{self.name}: {n} tokens but {len(given)} {column}; all columns must be equally long, as "
                    "sample.append keeps them"
                )
            try:
                values = np.asarray(given)
            except ValueError:  # lists of different lengths inside
                values = np.empty((0, 0))
            if n and not (values.ndim == 1 and values.dtype.kind in kinds and holds(values).all()):
                raise ValueError(f"{self.name}: its {column} are not {wanted} alone")

    def check_trainable(self) -> None:
        """Looks whether it can be trained on.

        Raises:
            ValueError: it is unfinished, has no reward or no response token, or its columns do not fit together; the
                message names it.
        """
        if not self.status.finished or self.reward is None or not self.tokens:
            raise ValueError(
                f"{self.name} cannot be trained on: status {self.status}, reward {self.reward}, "
                f"{len(self.tokens)} tokens"
            )
        self.check_columns()

    def mask_older_than(self, version: WeightVersion) -> None:
        """Takes tokens of older versions out of the loss; what is masked already stays so.

        Args:
            version: the oldest one that is trained on.
        """
        self.loss_mask[:] = [m if v >= version else 0 for m, v in zip(self.loss_mask, self.versions, strict=True)]

    def restart(self) -> None:
        """Forgets the response, so that generation starts again from the clean prompt."""
        for column in (self.tokens, self.log_probs, self.versions, self.loss_mask):
            column.clear()
        self.response, self.reward, self.reward_info = "", None, {}
        self.status, self.error = SampleStatus.PENDING, None


@dataclasses.dataclass(slots=True)
class SampleGroup:
    """All responses to one prompt: the unit that GRPO normalises over and that filters keep or drop.

    Attributes:
        prompt: what all of them answer.
        samples: the responses.
        start_version: policy version that the engines served when the first of its tokens was asked for; None before
            that, and after all its samples were started again. No token of it is older.
    """

    prompt: Prompt
    samples: list[Sample]
    start_version: WeightVersion | None = None

    @classmethod
    def start(cls, prompt: Prompt, n_samples: int) -> "SampleGroup":
        """A group of ``n_samples`` empty samples."""
        return cls(prompt, [Sample(prompt, i) for i in range(n_samples)])

    def settle(self) -> None:
        """Sets ``start_version`` by the tokens that there are: generation has stopped, so no older one will come."""
        oldest = [v for s in self.samples if (v := s.oldest_version) is not None]
        self.start_version = min(oldest, default=None)

    @property
    def finished(self) -> bool:
        """True when the responses of all samples are whole."""
        return all(s.status.finished for s in self.samples)

    @property
    def scored(self) -> bool:
        """True when it is whole and each sample has a reward."""
        return self.finished and all(s.reward is not None for s in self.samples)

    @property
    def rewards(self) -> list[float]:
        """Rewards of all samples; an assertion holds that each has one."""
        assert all(s.reward is not None for s in self.samples), "rewards asked for before they were computed"
        return [float(s.reward) for s in self.samples if s.reward is not None]


def equal_rewards(rewards: Iterable[float]) -> bool:
    """Whether rewards are equal but for rounding: they differ by at most :data:`ROUNDING` of the largest one's size.

    Training keeps rewards as float32, and sums in another order differ in the last digits. Differences of that kind
    say nothing about the responses, but a division by their standard deviation would make whole advantages of them.
    Below 1e-12 they are what is left of terms that cancel (0.3 - 0.1 - 0.2 is not 0).

    Args:
        rewards: at least one, finite.
    """
    values = [float(r) for r in rewards]
    low, high = min(values), max(values)
    return high - low <= max(ROUNDING * max(abs(low), abs(high)), _CANCELLED)


@dataclasses.dataclass
class TrainBatch:
    """Samples of one training step, as numpy columns (cheap to send between processes). ``n`` samples.

    Attributes:
        rollout_id: absolute id of the rollout it came from.
        tokens: per sample int64 ``[prompt + response]``.
        response_lengths: int64 ``[n]``.
        loss_masks: per sample float32 ``[response]``.
        rollout_log_probs: per sample float32 ``[response]``, natural log, as the engine returned them.
        rewards: float32 ``[n]``.
        group_ids: int64 ``[n]``, equal for the responses to one prompt (the prompt's id).
        oldest_versions: int64 ``[n]``, oldest policy version among each sample's tokens.
        names: how messages call each sample.
        pixel_values: per sample float32 ``[patches, numbers of a patch]``, all pictures of its prompt one after
            another; ``[0, 0]`` without pictures.
        image_grid_thw: per sample int64 ``[pictures, 3]``: frames, rows and columns of patches.
    """

    rollout_id: int
    tokens: list[np.ndarray]
    response_lengths: np.ndarray
    loss_masks: list[np.ndarray]
    rollout_log_probs: list[np.ndarray]
    rewards: np.ndarray
    group_ids: np.ndarray
    oldest_versions: np.ndarray
    names: list[str]
    pixel_values: list[np.ndarray] = dataclasses.field(default_factory=list)
    image_grid_thw: list[np.ndarray] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.image_grid_thw:
            for name, none in NO_PICTURES.items():
                setattr(self, name, [none] * len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> np.ndarray:
        """int64 ``[n]``: prompt plus response tokens of each sample."""
        return np.array([len(t) for t in self.tokens], dtype=np.int64)

    @classmethod
    def from_groups(cls, groups: Iterable[SampleGroup], rollout_id: int) -> "TrainBatch":
        """Makes the columns of all samples of ``groups``, in order.

        Raises:
            ValueError: as :meth:`Sample.check_trainable`.
        """
        samples = [s for g in groups for s in g.samples]
        for s in samples:
            s.check_trainable()
        return cls(
            rollout_id=rollout_id,
            tokens=[np.array([*s.prompt.input_ids, *s.tokens], dtype=np.int64) for s in samples],
            response_lengths=np.array([len(s.tokens) for s in samples], dtype=np.int64),
            loss_masks=[np.array(s.loss_mask, dtype=np.float32) for s in samples],
            rollout_log_probs=[np.array(s.log_probs, dtype=np.float32) for s in samples],
            rewards=np.array([s.reward for s in samples], dtype=np.float32),
            group_ids=np.array([s.prompt.prompt_id for s in samples], dtype=np.int64),
            oldest_versions=np.array([s.oldest_version for s in samples], dtype=np.int64),
            names=[s.name for s in samples],
            pixel_values=[s.prompt.features.get("pixel_values", NO_PICTURES["pixel_values"]) for s in samples],
            image_grid_thw=[s.prompt.features.get("image_grid_thw", NO_PICTURES["image_grid_thw"]) for s in samples],
        )

    def select(self, indices: Sequence[int]) -> "TrainBatch":
        """The samples at ``indices``, in that order."""
        index = np.asarray(indices, dtype=np.int64)
        return TrainBatch(
            rollout_id=self.rollout_id,
            tokens=[self.tokens[i] for i in indices],
            response_lengths=self.response_lengths[index],
            loss_masks=[self.loss_masks[i] for i in indices],
            rollout_log_probs=[self.rollout_log_probs[i] for i in indices],
            rewards=self.rewards[index],
            group_ids=self.group_ids[index],
            oldest_versions=self.oldest_versions[index],
            names=[self.names[i] for i in indices],
            pixel_values=[self.pixel_values[i] for i in indices],
            image_grid_thw=[self.image_grid_thw[i] for i in indices],
        )


@dataclasses.dataclass(frozen=True)
class StepManifest:
    """Facts about the samples of a training step that all may know: about 60 bytes a sample, no row. ``n`` samples.

    The driver carries it, and every rank plans with it: which samples share a micro-batch, their weights in the loss,
    their advantages. Rows (tokens, masks, log-probs) go from a :class:`RowSource` to the rank that needs them.

    Attributes:
        rollout_id: absolute id of the rollout that the samples came from.
        names: how messages call each sample.
        group_ids: int64 ``[n]``, equal for the responses to one prompt (the prompt's id).
        rewards: float32 ``[n]``.
        prompt_lengths: int64 ``[n]``, tokens.
        response_lengths: int64 ``[n]``, tokens.
        trained_tokens: float64 ``[n]``, sum of the loss mask.
        oldest_versions: int64 ``[n]``, oldest policy version among each sample's tokens.
        row_ids: ids of their rows in a :class:`relax_data.plane.base.DataPlane`; empty where rows are not in one.
        picture_ids: for each sample the id of the row there that has the pictures of its prompt, None for a prompt
            without any; empty where no row has pictures.
    """

    rollout_id: int
    names: list[str]
    group_ids: np.ndarray
    rewards: np.ndarray
    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    trained_tokens: np.ndarray
    oldest_versions: np.ndarray
    row_ids: list[int] = dataclasses.field(default_factory=list)
    picture_ids: list[int | None] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def total_lengths(self) -> np.ndarray:
        """int64 ``[n]``: prompt plus response tokens of each sample."""
        lengths: np.ndarray = self.prompt_lengths + self.response_lengths
        return lengths

    @classmethod
    def of(cls, batch: TrainBatch) -> "StepManifest":
        """The manifest of samples that are all at hand."""
        return cls(
            rollout_id=batch.rollout_id,
            names=batch.names,
            group_ids=batch.group_ids,
            rewards=batch.rewards,
            prompt_lengths=batch.total_lengths - batch.response_lengths,
            response_lengths=batch.response_lengths,
            trained_tokens=np.array([mask.sum(dtype=np.float64) for mask in batch.loss_masks], dtype=np.float64),
            oldest_versions=batch.oldest_versions,
        )

    def select(self, indices: Sequence[int]) -> "StepManifest":
        """The samples at ``indices``, in that order."""
        index = np.asarray(indices, dtype=np.int64)
        return StepManifest(
            rollout_id=self.rollout_id,
            names=[self.names[i] for i in indices],
            group_ids=self.group_ids[index],
            rewards=self.rewards[index],
            prompt_lengths=self.prompt_lengths[index],
            response_lengths=self.response_lengths[index],
            trained_tokens=self.trained_tokens[index],
            oldest_versions=self.oldest_versions[index],
            row_ids=[self.row_ids[i] for i in indices] if self.row_ids else [],
            picture_ids=[self.picture_ids[i] for i in indices] if self.picture_ids else [],
        )


ROW_COLUMNS = ("tokens", "loss_masks", "rollout_log_probs")
"""Columns of a row, as in :class:`TrainBatch`: one array a sample."""
PICTURE_COLUMNS = ("pixel_values", "image_grid_thw")
"""Further columns of a row, for a model that reads pictures. All responses to a prompt share one array."""


class RowSource(Protocol):
    """Source of the rows of a rank's own samples."""

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The values of ``columns`` (see :data:`ROW_COLUMNS`) of the samples at these places of the manifest.

        Raises:
            TimeoutError: they did not come in time; the message names the rollout.
        """
        ...


@dataclasses.dataclass(frozen=True)
class BatchRows:
    """Rows of a batch that is at hand."""

    batch: TrainBatch

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The rows, without copies."""
        known = {*ROW_COLUMNS, *PICTURE_COLUMNS}
        assert set(columns) <= known, f"a row has the columns {sorted(known)}, not {columns}"
        return {name: [getattr(self.batch, name)[i] for i in indices] for name in columns}
