"""The weights as full Hugging Face tensors, on every rank, a bucket at a time."""

import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from relax_data.weights import Bucket

from relax_train.backend.device_context import DeviceContext
from relax_train.backend.parallel import ParallelState
from relax_train.models.build import Model
from relax_train.models.hf_mapping import Entry, entries

_KNOWN: "weakref.WeakKeyDictionary[Model, list[_Item]]" = weakref.WeakKeyDictionary()
"""Tensors of each model: names and shapes stay as they are, so the ranks tell each other once."""


@dataclasses.dataclass(frozen=True)
class _Item:
    """One full tensor: its name, its shape, and where its parts are."""

    name: str
    shape: tuple[int, ...]
    stage: int
    ep_rank: int | None
    """Expert-parallel rank that has it, None when all have."""
    index: int
    """Number of the entry on the ranks that have it."""
    part: int
    """Number of the tensor in that entry."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _own_entries(model: Model) -> list[Entry]:
    return [entry for entry in entries(model) if not entry.is_copy]


def _items(model: Model, own: list[Entry]) -> list[_Item]:
    """All tensors of the model in one order that every rank agrees on: stages, then layers, then experts."""
    if model in _KNOWN:
        return _KNOWN[model]
    parallel = model.parallel
    mine = [(e.names, [tuple(s) for s in e.full_shapes()], e.expert is not None) for e in own]
    every: list[tuple[int, int, list[tuple[tuple[str, ...], list[tuple[int, ...]], bool]]]]
    every = [(0, 0, [])] * parallel.world_size
    dist.all_gather_object(every, (parallel.pp_rank, parallel.ep_rank, mine), group=parallel.gloo_group)
    held = {(stage, ep_rank): listed for stage, ep_rank, listed in every}
    items = []
    for stage in range(parallel.pp_size):
        indices = range(len(held[stage, 0]))
        for is_expert, run in itertools.groupby(indices, key=lambda i: held[stage, 0][i][2]):
            positions = list(run)
            for ep_rank in range(parallel.ep_size) if is_expert else (None,):
                for index in positions:
                    names, shapes, _ = held[stage, ep_rank or 0][index]
                    for part, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                        items.append(_Item(name, shape, stage, ep_rank, index, part))
    _KNOWN[model] = items
    return items


def _group_items(items: list[_Item], max_numel: int) -> Iterator[list[_Item]]:
    """Consecutive items of one stage, together at most ``max_numel`` elements; a larger one alone."""
    group: list[_Item] = []
    size = 0
    for item in items:
        if group and (size + item.numel > max_numel or item.stage != group[0].stage):
            yield group
            group, size = [], 0
        group.append(item)
        size += item.numel
    if group:
        yield group


def _gather_parts(entry: Entry, part: int, out: torch.Tensor) -> None:
    """Writes the full tensor into ``out``; collective over the ranks that hold its parts."""
    piece = entry.split(entry.param.detach())[part]
    if entry.parts == 1:
        out.copy_(piece if entry.rows is None else piece[: entry.rows])
        return
    assert entry.dim is not None
    piece = piece.contiguous()
    if entry.dim == 0 and out.size(0) == piece.size(0) * entry.parts:
        dist.all_gather_into_tensor(out, piece, group=entry.group)
        return
    gathered = piece.new_empty(entry.parts * piece.size(0), *piece.shape[1:])
    dist.all_gather_into_tensor(gathered, piece, group=entry.group)
    if entry.dim == 0:
        out.copy_(gathered[: out.size(0)])
        return
    assert entry.dim == 1
    out.view(out.size(0), entry.parts, -1).copy_(gathered.view(entry.parts, *piece.shape).transpose(0, 1))


def _fill(group: list[_Item], flat: torch.Tensor, own: list[Entry], parallel: ParallelState) -> None:
    """Fills the flat bucket on all ranks."""
    sizes = [item.numel for item in group]
    offsets = [0, *itertools.accumulate(sizes)]
    if parallel.pp_rank == group[0].stage:
        for item, offset in zip(group, offsets, strict=False):
            if item.ep_rank in (None, parallel.ep_rank):
                _gather_parts(own[item.index], item.part, flat[offset : offset + item.numel].view(item.shape))
        if parallel.ep_size > 1:
            for ep_rank, run in itertools.groupby(range(len(group)), key=lambda i: group[i].ep_rank):
                if ep_rank is not None:
                    positions = list(run)
                    span = flat[offsets[positions[0]] : offsets[positions[-1] + 1]]
                    dist.broadcast(span, dist.get_global_rank(parallel.ep_group, ep_rank), group=parallel.ep_group)
    if parallel.pp_size > 1:
        dist.broadcast(flat, dist.get_global_rank(parallel.pp_group, group[0].stage), group=parallel.pp_group)


def weight_buckets(model: Model, max_bytes: int, *, without: str | None = None) -> Iterator[Bucket]:
    """The full weights under their Hugging Face names; collective, and every rank gets all of them.

    A bucket lies on this rank's device, in the model's dtype; it is a copy, which the caller may keep. The order is the
    same on every rank and in every call. A caller that lets go of each bucket before it takes the next but one has two
    of them at most, and beside them the parts of one tensor while it is gathered.

    Args:
        max_bytes: largest size of a bucket (``--update-weight-buffer-size``); a larger tensor comes alone.
        without: leaves out the tensors whose names begin so; the same on every rank.
    """
    assert max_bytes > 0
    own = _own_entries(model)
    itemsize = own[0].param.element_size() if own else model.dtype.itemsize
    with DeviceContext():
        items = [item for item in _items(model, own) if without is None or not item.name.startswith(without)]
    for group in _group_items(items, max(1, max_bytes // itemsize)):
        with DeviceContext(), torch.no_grad():
            total = sum(item.numel for item in group)
            flat = torch.empty(total, dtype=model.dtype, device=model.parallel.device)
            _fill(group, flat, own, model.parallel)
        bucket = Bucket(
            names=tuple(item.name for item in group),
            shapes=tuple(item.shape for item in group),
            dtype=str(model.dtype).removeprefix("torch."),
            flat=flat,
        )
        del flat
        yield bucket
        del bucket
