"""From the samples of a rollout to what a forward pass takes. Needs numpy; torch only to move the result.

A rollout is cut into optimizer steps, a step into micro-batches per data-parallel rank, and a micro-batch is one row of
packed documents: each document is one sample, prompt and response. Everything of a response token lies at the position
that PREDICTS it, one before its own.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from relax_data.packing.costs import CostModel
from relax_data.packing.pack import balance, pack, pack_static

from relax_train.models.context_parallel import zigzag_positions
from relax_train.models.vision import Pictures, VisionShape, lay_out_pictures
from relax_train.settings.batch import BatchSettings

if TYPE_CHECKING:
    import torch


class Lengths(Protocol):
    """Facts about ``n`` samples that planning needs: a manifest, or a batch of any kind."""

    @property
    def names(self) -> list[str]:
        """Name of each sample in messages."""
        ...

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 ``[n]``, tokens."""
        ...

    @property
    def total_lengths(self) -> np.ndarray:
        """int64 ``[n]``, prompt plus response tokens."""
        ...

    def __len__(self) -> int: ...


class Samples(Lengths, Protocol):
    """Samples of which at least this rank's have their tokens."""

    @property
    def tokens(self) -> "Values":
        """int64 ``[prompt + response]`` by place."""
        ...

    @property
    def pixel_values(self) -> "Values":
        """float32 ``[patches, numbers of a patch]`` by place, of all pictures of a sample; read for pictures only."""
        ...

    @property
    def image_grid_thw(self) -> "Values":
        """int64 ``[pictures, 3]`` by place: frames, rows and columns of patches; read for pictures only."""
        ...


Values = Sequence[np.ndarray] | Mapping[int, np.ndarray]
"""One array a sample, by place; a mapping holds those of some samples only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """Division of micro-batches over ranks.

    Attributes:
        dp_size: data-parallel ranks: each gets other samples.
        cp_size: context-parallel ranks: each gets a part of every document.
        cp_rank: which of them this rank is.
        sequence_size: ranks that each context-parallel part is divided over again: the tensor-parallel size with
            ``--sequence-parallel``, else 1.
        lock_step: whether data-parallel ranks meet in every micro-batch, not once a step.
        cost: of a sample by its padded length, what dynamic micro-batches even out over ranks; None is the tokens.
    """

    dp_size: int = 1
    cp_size: int = 1
    cp_rank: int = 0
    sequence_size: int = 1
    lock_step: bool = False
    cost: CostModel | None = None

    @property
    def document_multiple(self) -> int:
        """Length of a padded document is a multiple of this: the zigzag cuts it into 2 x cp_size equal pieces."""
        return 2 * self.cp_size if self.cp_size > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Length of a micro-batch is a multiple of this."""
        return math.lcm(self.document_multiple, self.cp_size * self.sequence_size)

    def padded(self, lengths: "NDArray[np.int64]") -> "NDArray[np.int64]":
        """Lengths of the padded documents."""
        return -(-lengths // self.document_multiple) * self.document_multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One packed row, this context-parallel rank's part of it (``local`` positions).

    Attributes:
        tokens: int64 ``[local]``.
        position_ids: int64 ``[local]``, position in the document.
        labels: int64 ``[local]``, the next token of the document; 0 where there is none.
        targets: int64 ``[local]``, number of the predicted response token among all response tokens of the batch in
            sample order (:func:`response_offsets`); -1 where the next token is no response token.
        documents: int64 ``[local]``, number of the padded document that each position lies in.
        columns: further values of the predicted token, float64 ``[local]``, 0 where ``targets`` is -1.
        cu_seqlens: int32 ``[documents + 1]``, borders of the padded documents in the whole row, over all
            context-parallel ranks.
        max_seqlen: longest padded document.
        indices: the samples, in order.
        pictures: of the samples; None when none of them has one.
    """

    tokens: "NDArray[np.int64]"
    position_ids: "NDArray[np.int64]"
    labels: "NDArray[np.int64]"
    targets: "NDArray[np.int64]"
    documents: "NDArray[np.int64]"
    columns: dict[str, "NDArray[np.float64]"]
    cu_seqlens: "NDArray[np.int32]"
    max_seqlen: int
    indices: tuple[int, ...]
    pictures: Pictures | None = None

    def to(self, device: "torch.device", dtype: "torch.dtype") -> dict[str, "torch.Tensor"]:
        """Tensors of everything.

        ``tokens`` and ``position_ids`` are ``[1, local]``, the others ``[local]``; columns are in ``dtype``.
        ``selected`` is int64 ``[positions that predict a response token]``, in order; the first position of the row
        where there is none, so that it is never empty.
        """
        import torch

        def move(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(dtype).to(device, non_blocking=True)

        result = {name: move(column, dtype) for name, column in self.columns.items()}
        result |= {name: move(getattr(self, name)) for name in ("labels", "targets", "documents", "cu_seqlens")}
        result |= {name: move(getattr(self, name))[None] for name in ("tokens", "position_ids")}
        selected = np.flatnonzero(self.targets >= 0)
        result["selected"] = move(selected if len(selected) else np.zeros(1, np.int64))
        return result


def optimizer_steps(batch: Lengths, settings: BatchSettings) -> list[list[int]]:
    """Samples of each optimizer step.

    They are in the order in which they came, or, with ``--balance-data`` and several steps, dealt so that all steps
    have about as many tokens (responses to one prompt may then fall into different steps).

    The last rollout of ``--num-epoch`` may have fewer samples than the others: it gives as many whole steps as it can
    and one more with the rest, so that every sample is trained once.

    Raises:
        ValueError: there are more samples than the steps of a rollout hold; the message shows the arithmetic.
    """
    sizes = settings.step_sizes(len(batch))
    if settings.balance_data and len(sizes) > 1:
        return balance(batch.total_lengths.astype(np.float64), len(sizes))
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def micro_batch_cap(settings: BatchSettings, split: Split, *, forward_only: bool = False) -> int | None:
    """Most tokens, padding included, of a whole row: tokens per GPU x cp_size, down to a length that rows can have.

    Args:
        settings: the flags.
        split: parallel sizes.
        forward_only: whether the row is for a log-prob pass, which has its own flag.

    Returns:
        None without ``--use-dynamic-batch-size``.

    Raises:
        ValueError: not even the shortest row fits.
    """
    if not settings.use_dynamic_batch_size:
        return None
    tokens = settings.log_probs_cap if forward_only else settings.max_tokens_per_gpu
    assert tokens is not None, "--use-dynamic-batch-size needs --max-tokens-per-gpu"
    multiple = split.total_multiple
    cap = tokens * split.cp_size // multiple * multiple
    if cap == 0:
        raise ValueError(
            f"{_cap_flag(settings, forward_only)} {tokens} is less than the {multiple} tokens that a micro-batch is "
            "padded to by context and sequence parallelism: raise it"
        )
    return cap


def _cap_flag(settings: BatchSettings, forward_only: bool) -> str:
    own = forward_only and settings.log_probs_max_tokens_per_gpu is not None
    return "--log-probs-max-tokens-per-gpu" if own else "--max-tokens-per-gpu"


def check_samples(batch: Lengths, settings: BatchSettings, split: Split, *, forward_only: bool = False) -> None:
    """Raises what would stop a pass over ``batch``, before anything has run.

    Raises:
        ValueError: a sample has no prompt, or is longer than a micro-batch may be; the message names it.
    """
    for i in np.flatnonzero(batch.response_lengths >= batch.total_lengths):
        raise ValueError(f"{batch.names[i]} has an empty prompt: there is nothing that predicts its first token")
    cap = micro_batch_cap(settings, split, forward_only=forward_only)
    if cap is None:
        return
    lengths = split.padded(batch.total_lengths)
    for i in np.flatnonzero(lengths > cap):
        tokens = settings.log_probs_cap if forward_only else settings.max_tokens_per_gpu
        raise ValueError(
            f"{batch.names[i]} has {batch.total_lengths[i]} tokens (padded {lengths[i]}), more than a micro-batch may "
            f"hold: {_cap_flag(settings, forward_only)} {tokens} x --context-parallel-size {split.cp_size}: raise one "
            "of them, or lower --rollout-max-response-len"
        )


def plan_micro_batches(
    batch: Lengths, settings: BatchSettings, split: Split, *, forward_only: bool = False
) -> list[list[list[int]]]:
    """Plans which samples share a forward pass.

    Args:
        batch: the samples of one optimizer step, or of a rollout for a forward-only pass.
        settings: static or dynamic batches. Dynamic ones always cost all ranks about as much (``split.cost``), static
            ones have about as many tokens with ``--balance-data``.
        split: parallel sizes.
        forward_only: whether this is for a log-prob pass, which has its own cap.

    Returns:
        for each data-parallel rank equally many lists of sample indices; a list may be empty when there are fewer
        samples than ranks (:func:`build_micro_batch` then makes a row that trains nothing).

    Raises:
        ValueError: as :func:`check_samples`.
    """
    check_samples(batch, settings, split, forward_only=forward_only)
    lengths = split.padded(batch.total_lengths)
    cap = micro_batch_cap(settings, split, forward_only=forward_only)
    if cap is not None:
        return pack(lengths, cap, dp_size=split.dp_size, cost=split.cost, lock_step=split.lock_step)
    size = settings.micro_batch_size
    if not settings.balance_data:
        return pack_static(len(batch), size, dp_size=split.dp_size)
    ranks = balance(lengths.astype(np.float64), split.dp_size)
    count = max(-(-len(rank) // size) for rank in ranks)
    return [[rank[i * size : (i + 1) * size] for i in range(count)] for rank in ranks]


def response_offsets(batch: Lengths) -> NDArray[np.int64]:
    """int64 ``[n + 1]``: where each sample begins when all response tokens lie one after the other."""
    return np.concatenate([[0], np.cumsum(batch.response_lengths)]).astype(np.int64)


def build_micro_batch(
    batch: Samples,
    indices: Sequence[int],
    split: Split,
    columns: Mapping[str, Values] | None = None,
    vision: VisionShape | None = None,
) -> MicroBatch:
    """Packs samples into one row and takes this context-parallel rank's part of it.

    Args:
        batch: where the samples are.
        indices: which, in this order; none gives the shortest row that is possible, with nothing to train.
        split: parallel sizes.
        columns: values per response token, for each name one ``[response]`` array for each of ``indices``, by its
            place in ``batch``.
        vision: of a model that reads pictures.

    Raises:
        ValueError: the pictures of a sample do not fit its tokens; the message names it.
    """
    columns = columns or {}
    lengths = split.padded(batch.total_lengths[np.asarray(indices, dtype=np.int64)])
    total = int(lengths.sum())
    missing = -total % split.total_multiple if total else split.total_multiple
    if len(lengths):
        lengths[-1] += missing
    else:
        lengths = np.array([missing], dtype=np.int64)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu[-1])

    tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    targets = np.full(total, -1, np.int64)
    values = {name: np.zeros(total, np.float64) for name in columns}
    offsets = response_offsets(batch)
    for start, i in zip(cu[:-1].tolist(), indices, strict=False):
        length, response = len(batch.tokens[i]), int(batch.response_lengths[i])
        assert response < length, f"{batch.names[i]} has an empty prompt"
        tokens[start : start + length] = batch.tokens[i]
        labels[start : start + length - 1] = batch.tokens[i][1:]
        predictors = slice(start + length - response - 1, start + length - 1)
        targets[predictors] = np.arange(offsets[i], offsets[i + 1])
        for name, column in columns.items():
            values[name][predictors] = column[i]
    positions = np.concatenate([np.arange(n) for n in lengths])

    mine = zigzag_positions(cu, split.cp_size, split.cp_rank)
    pictures = None
    if vision is not None:
        prompts = batch.total_lengths - batch.response_lengths
        rows = [(i, batch.tokens[i], int(prompts[i]), batch.names[i]) for i in indices]
        pictures = lay_out_pictures(batch, rows, cu, mine, vision)
    return MicroBatch(
        tokens=tokens[mine],
        position_ids=positions[mine],
        labels=labels[mine],
        targets=targets[mine],
        documents=np.repeat(np.arange(len(lengths)), lengths)[mine],
        columns={name: column[mine] for name, column in values.items()},
        cu_seqlens=cu,
        max_seqlen=int(lengths.max()),
        indices=tuple(indices),
        pictures=pictures,
    )


def split_responses(flat: np.ndarray, batch: Lengths) -> list[np.ndarray]:
    """The per-sample ``[response]`` pieces of a column that holds all response tokens one after the other."""
    offsets = response_offsets(batch)
    return [flat[offsets[i] : offsets[i + 1]] for i in range(len(batch))]
