"""Optimizer state in a checkpoint: by whole tensor, so that it loads under every parallel layout.

The distributed optimizer of megatron-core cuts the state twice: as the weights are cut over tensor-, pipeline- and
expert-parallel ranks, and then, whatever the rows and columns, into runs of equal length over the data-parallel ranks.
Here each run becomes the few rectangles of whole tensors that it is made of, for a matrix three at most: the end of a
row, whole rows, the begin of one. These are what torch's distributed checkpoint stores, under names that no layout
changes (``exp_avg.model.layers.0.mlp.up_proj.weight``). Under another layout a rank asks for other rectangles, and
reads those of the file that overlap with them. Nothing is gathered, neither to save nor to load.

What is equal on several ranks is written once: by tensor-parallel rank 0, and not by the last pipeline stage for its
copy of a tied embedding. Rows that pad the vocabulary are not written; their weights and moments are 0 in every layout.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from relax_train.backend.mcore import MCoreSavePlanner
from relax_train.backend.optimizer import Optimizer
from relax_train.checkpoint.folders import CheckpointError
from relax_train.checkpoint.no_code import data_only, read_index
from relax_train.models.build import Model
from relax_train.models.hf_mapping import Block, Entry, entries


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor of optimizer state that this rank holds.

    Attributes:
        name: of the whole tensor: ``exp_avg``, ``exp_avg_sq`` or ``master``, a dot, and the name of its weight.
        size: shape of the whole tensor.
        offset: where the rectangle begins in it.
        data: the rectangle, float32; a view of the state itself.
        written: whether this rank is the one that writes it.
    """

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor
    written: bool

    @property
    def index(self) -> MetadataIndex:
        """The name of the piece in a distributed checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offset))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The rectangle as a distributed checkpoint notes it."""
        return ChunkStorageMetadata(torch.Size(self.offset), torch.Size(self.data.shape))


def pieces(model: Model, optimizer: Optimizer) -> list[Piece]:
    """The optimizer state of this rank as rectangles of whole tensors, in the order of the forward pass.

    They are views: no memory is taken beside the state.
    """
    shards = {id(shard.param): shard for shard in optimizer.shards()}
    found: list[Piece] = []
    for entry in entries(model):
        shard = shards.get(id(entry.param))
        if shard is None:  # data-parallel neighbours have all of it
            continue
        written, start = _is_writer(model, entry), 0
        length = next(iter(shard.tensors.values())).numel()
        for block in entry.blocks():
            low, high = max(shard.start, start), min(shard.start + length, start + math.prod(block.shape))
            for at, offset, shape in rectangles(block.shape, low - start, high - start):
                first = start + at - shard.start
                for kind, state in shard.tensors.items():
                    data = state[first : first + math.prod(shape)].view(shape)
                    found.append(_piece(kind, block, offset, data, written))
            start += math.prod(block.shape)
    return found


def _is_writer(model: Model, entry: Entry) -> bool:
    rank = model.parallel.tp_rank if entry.expert is None else model.parallel.etp_rank
    return not entry.is_copy and (entry.dim is not None or rank == 0)


def _piece(kind: str, block: Block, offset: tuple[int, ...], data: torch.Tensor, written: bool) -> Piece:
    place = tuple(a + b for a, b in zip(block.offset, offset, strict=True))
    return Piece(f"{kind}.{block.name}", block.size, place, data, written)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Cuts the elements ``start:stop`` of a tensor in row-major order into rectangles, for a matrix three at most.

    Yields:
        for each: its first element in that order, its offset in the tensor, its shape; none for an empty range.
    """
    if stop <= start:
        return
    if len(shape) == 1:
        yield start, (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    zeros = (0,) * (len(shape) - 1)
    if first > last:  # inside of one row
        yield from _within_row(shape, last, start, stop)
        return
    yield from _within_row(shape, first - 1, start, first * inner)
    if last > first:
        yield first * inner, (first, *zeros), (last - first, *shape[1:])
    yield from _within_row(shape, last, last * inner, stop)


def _within_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    begin = row * math.prod(shape[1:])
    for at, offset, sizes in rectangles(shape[1:], start - begin, stop - begin):
        yield begin + at, (row, *offset), (1, *sizes)


# ---------------------------------------------------------------------- save


class SavePlanner(MCoreSavePlanner):
    """megatron-core's planner, which writes pieces beside the sharded state.

    That all pieces together are each tensor once, torch checks before the index is written.
    """

    def __init__(self, held: list[Piece]) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._pieces = {piece.index: piece for piece in held if piece.written}

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        plan: SavePlan = super().create_local_plan()
        plan.items.extend(_write_item(piece) for piece in self._pieces.values())
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor that was planned under ``index``."""
        piece = self._pieces.get(index)
        return super().lookup_object(index) if piece is None else piece.data


def _write_item(piece: Piece) -> WriteItem:
    properties = TensorProperties(dtype=piece.data.dtype)
    written = TensorWriteData(chunk=piece.chunk, properties=properties, size=torch.Size(piece.size))
    return WriteItem(index=piece.index, type=WriteItemType.SHARD, tensor_data=written)


# ---------------------------------------------------------------------- load


class _LoadPlanner(DefaultLoadPlanner):
    """Fills pieces from whatever rectangles are stored."""

    def __init__(self, wanted: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted = {piece.index: piece for piece in wanted}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        by_name = sorted(self._wanted.values(), key=lambda piece: piece.name)
        for name, group in itertools.groupby(by_name, key=lambda piece: piece.name):
            held = list(group)
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != held[0].size:
                size = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None
                raise CheckpointError(f"it has {name} of shape {size}, this model takes {held[0].size}")
            found = create_read_items_for_chunk_list(name, stored, [piece.chunk for piece in held])
            # Stored rectangles do not overlap: as many elements as are wanted are all that are wanted.
            if sum(math.prod(item.lengths) for item in found) != sum(piece.data.numel() for piece in held):
                raise CheckpointError(f"it does not have all of {name}")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._wanted[index].data


def read_optimizer(model: Model, optimizer: Optimizer, folder: Path) -> None:
    """Fills moments, and master weights where the weights are not float32, from a checkpoint; no other rank is asked.

    The weights must be loaded before: in float32 the master weights are a view of them. Beside the state itself there
    is one stored rectangle at a time in host memory, never more than what one rank that saved had of one tensor; a
    stored rectangle of which a rank needs a part is read whole.

    Raises:
        CheckpointError: the checkpoint does not have what this rank needs.
    """
    index, planner = read_index(folder / ".metadata"), _LoadPlanner(pieces(model, optimizer))
    planner.set_up_planner({}, index)
    reader = torch_checkpoint.FileSystemReader(folder)
    reader.set_up_storage_reader(index, is_coordinator=True)
    with data_only(), torch.no_grad():
        reader.read_data(planner.create_local_plan(), planner).wait()
