"""Causal attention over packed sequences, with context parallelism.

Packed ("thd") means that the documents of a micro-batch lie one after another in one row, and ``cu_seqlens`` holds
their borders. No document sees another. With context parallelism of size ``cp`` each document is cut into ``2 * cp``
equal chunks, and rank ``r`` holds chunks ``r`` and ``2 * cp - 1 - r`` (so that all ranks have the same work under a
causal mask); keys and values are gathered from all ranks, queries stay.

On CUDA in half precision the kernel is ``torch.nn.attention.varlen``; elsewhere, and there for rows of documents of
:data:`LONG` tokens, scaled-dot-product attention runs over documents of about the same length at once, padded to the
longest of them, so that the cost stays near the sum of the squared lengths and never is the square of the row, and a
row of short documents takes few calls.
"""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from relax_train.backend.mcore import (
    MegatronModule,
    PackedSeqParams,
    ProcessGroupCollection,
    TransformerConfig,
    tensor_parallel,
)
from relax_train.models.context_parallel import zigzag_positions
from relax_train.models.rope import Rope
from relax_train.models.rotary import rotary_tables, rotate

LONG = 16384
"""Tokens of a document that torch's dense attention, which is cuDNN's on an H100 or H200, gets for itself.

It is up to twice as fast as the kernel for many documents, but cuDNN makes a plan for every length that it meets."""


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Consecutive local queries, and the consecutive keys of the full row up to and including the last query's."""

    query: int
    queries: int
    key: int
    keys: int


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Segments of about the same length that attend in one call, each padded behind its end.

    Attributes:
        queries: int64 ``[segments * longest queries]``, the local query of each place; any one where there is none.
        keys: int64 ``[segments * longest keys]``, the key of the full row, likewise.
        size: number of segments.
        mask: bool ``[segments, 1, longest queries, longest keys]``, which keys a query sees; None: the causal mask,
            which keeps real queries from padding by itself where each segment has as many keys as queries.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    size: int
    mask: torch.Tensor | None


PADDED_LENGTH = 16
"""Segments that differ by no more tokens attend together; longer ones also when the shorter has three quarters."""


def _similar(segments: list[_Segment]) -> list[list[int]]:
    """Places of segments that attend together, the longest first."""
    groups: list[list[int]] = []
    for place in sorted(range(len(segments)), key=lambda i: (segments[i].keys, segments[i].queries), reverse=True):
        here = segments[place]
        first = segments[groups[-1][0]] if groups else here
        alike = all(
            a <= max(b + PADDED_LENGTH, 4 * b // 3) for a, b in ((first.keys, here.keys), (first.queries, here.queries))
        )
        if groups and alike and here.queries <= first.queries:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


class _Plan:
    """Facts about one micro-batch that attention needs. Made once and shared by all its layers."""

    def __init__(self, packed: PackedSeqParams, cp_size: int, cp_rank: int, device: torch.device) -> None:
        borders = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        self._borders, self._cp_size, self._cp_rank, self._device = borders, cp_size, cp_rank, device
        self._max_length = packed.max_seqlen_q
        self._given = getattr(packed, "_relax_positions", None)  # of rows with pictures
        self._rotary: dict[tuple[int, Rope, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    @functools.cached_property
    def borders(self) -> list[int]:
        result: list[int] = self._borders.tolist()
        return result

    @functools.cached_property
    def segments(self) -> list[_Segment]:
        cp, rank, found = self._cp_size, self._cp_rank, []
        for start, end in itertools.pairwise(self.borders):
            if start == end:
                continue
            if cp == 1:
                found.append(_Segment(start, end - start, start, end - start))
                continue
            chunk = (end - start) // (2 * cp)
            found.append(_Segment(start // cp, chunk, start, (rank + 1) * chunk))
            found.append(_Segment(start // cp + chunk, chunk, start, (2 * cp - rank) * chunk))
        return found

    @functools.cached_property
    def long(self) -> bool:
        """Whether the row holds no more documents than it has room for of :data:`LONG` tokens."""
        if self._cp_size > 1 or (self._max_length or 0) < LONG:
            return False
        return len(self.borders) - 1 <= self.borders[-1] // LONG

    @functools.cached_property
    def batches(self) -> list[_Batch]:
        """The segments, in batches of similar ones."""
        return [self._batch([self.segments[i] for i in group]) for group in self._groups]

    @functools.cached_property
    def _groups(self) -> list[list[int]]:
        return _similar(self.segments)

    @functools.cached_property
    def query_order(self) -> torch.Tensor:
        """int64 ``[local tokens]``: where each local query is among the places of all batches, one after the other."""
        places, start = [np.empty(0, np.int64)] * len(self.segments), 0
        for group in self._groups:
            longest = max(self.segments[i].queries for i in group)
            for i in group:
                places[i] = np.arange(start, start + self.segments[i].queries)
                start += longest
        return torch.from_numpy(np.concatenate(places)).to(self._device)

    def _batch(self, segments: list[_Segment]) -> _Batch:
        queries, keys = (np.array([[getattr(s, name) for s in segments]]).T for name in ("queries", "keys"))
        first_query, first_key = (np.array([[getattr(s, name) for s in segments]]).T for name in ("query", "key"))
        query, key = np.arange(queries.max())[None], np.arange(keys.max())[None]
        mask = None
        if (queries != keys).any():  # the last query sees the last key; a query of padding what the last one sees
            last_seen = np.minimum(query, queries - 1) + keys - queries
            mask = torch.from_numpy(key[:, None] <= last_seen[..., None])[:, None].to(self._device)
        indices = [
            torch.from_numpy((first + np.minimum(place, number - 1)).reshape(-1)).to(self._device)
            for first, place, number in ((first_query, query, queries), (first_key, key, keys))
        ]
        return _Batch(queries=indices[0], keys=indices[1], size=len(segments), mask=mask)

    @functools.cached_property
    def key_order(self) -> torch.Tensor:
        """int64: index that brings the keys gathered from all ranks into the order of the full row."""
        held = np.concatenate([zigzag_positions(self.borders, self._cp_size, r) for r in range(self._cp_size)])
        return torch.from_numpy(np.argsort(held)).to(self._device)

    @functools.cached_property
    def key_index(self) -> torch.Tensor:
        """int64: index that brings the gathered keys into the order of the segments, repeated where shared."""
        order = self.key_order
        return torch.cat([order[s.key : s.key + s.keys] for s in self.segments])

    def rotary(self, tokens: int, dim: int, rope: Rope, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of :func:`rotary_tables` for the ``tokens`` that this rank holds; all layers share them."""
        key = (dim, rope, dtype)
        if key not in self._rotary:
            self._rotary[key] = rotary_tables(self._positions(tokens), dim, rope, dtype)
        return self._rotary[key]

    def _positions(self, tokens: int) -> torch.Tensor:
        """int64 ``[tokens]``: position in its document of each token of this rank; ``[3, tokens]`` with pictures."""
        if self._given is not None:
            given: torch.Tensor = self._given
            return given
        borders = self._borders.to(device=self._device, dtype=torch.int64)
        if self._cp_size == 1:
            held = torch.arange(tokens, device=self._device)
        else:
            held = torch.from_numpy(zigzag_positions(self.borders, self._cp_size, self._cp_rank)).to(self._device)
        positions: torch.Tensor = held - borders[torch.searchsorted(borders, held, right=True) - 1]
        return positions

    @functools.cached_property
    def varlen(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Borders of the queries and of the keys, int32, and the longest of each."""
        if self._cp_size == 1:
            cu = self._borders.to(device=self._device, dtype=torch.int32)
            longest = self._max_length
            if longest is None:
                longest = max(s.keys for s in self.segments)
            return cu, cu, int(longest), int(longest)
        queries, keys = [s.queries for s in self.segments], [s.keys for s in self.segments]
        cu_q = torch.tensor([0, *queries]).cumsum(0).to(device=self._device, dtype=torch.int32)
        cu_k = torch.tensor([0, *keys]).cumsum(0).to(device=self._device, dtype=torch.int32)
        return cu_q, cu_k, max(queries), max(keys)


def _plan(packed: PackedSeqParams, cp_size: int, cp_rank: int, device: torch.device) -> _Plan:
    # Kept on the object itself: it lives as long as the micro-batch, and recomputation gets the same object.
    plan = getattr(packed, "_relax_plan", None)
    if plan is None:
        plan = packed._relax_plan = _Plan(packed, cp_size, cp_rank, device)
    return plan


@functools.cache
def _varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """Causal ``varlen_attn`` whatever this torch calls its arguments; None where it is missing."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:
        options["enable_gqa"] = True
    kernel: Callable[..., Any] = functools.partial(varlen_attn, **options)  # a tensor, unless more is asked for
    return kernel


def _padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: _Plan, scale: float | None
) -> torch.Tensor:
    """Attention of all segments of a plan, batch by batch; shapes as in :meth:`PackedAttention.forward`.

    Args:
        key: ``[tokens of the full row, key heads, dim]``, in the order of the row; ``value`` likewise.
    """
    grouped = query.size(1) != key.size(1)
    outputs = []
    for batch in plan.batches:
        q, k, v = (
            x.index_select(0, index).unflatten(0, (batch.size, -1)).transpose(1, 2)  # [segments, heads, longest, dim]
            for x, index in ((query, batch.queries), (key, batch.keys), (value, batch.keys))
        )
        causal = batch.mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=batch.mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.query_order)


class PackedAttention(MegatronModule):
    """``core_attention`` of a megatron-core layer, for packed sequences. Holds no parameters; no dropout.

    With ``rope`` it rotates queries and keys itself (see :mod:`relax_train.models.rotary`); the model is then
    built with megatron-core's position embedding "none".
    """

    def __init__(  # noqa: PLR0913  # megatron's signature
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        rope: Rope | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.softmax_scale, self.rope = groups.cp, softmax_scale, rope
        self.rotated = False  # whether queries and keys come rotated (relax_train.models.fused)

    def tables(
        self, packed: PackedSeqParams, tokens: int, dim: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[tokens, 1, dim]`` of the tokens that this rank holds, at least in float32."""
        assert self.rope is not None
        plan = _plan(packed, self.cp_group.size(), self.cp_group.rank(), like.device)
        return plan.rotary(tokens, dim, self.rope, torch.promote_types(like.dtype, torch.float32))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attends.

        Args:
            query: ``[tokens, heads, dim]``, the tokens that this rank holds.
            key: ``[tokens, key heads, dim]``; value likewise.

        Returns:
            ``[tokens, heads * dim]``.
        """
        assert packed_seq_params is not None, "the model takes packed sequences only: pass packed_seq_params"
        tokens, cp = query.size(0), self.cp_group.size()
        plan = _plan(packed_seq_params, cp, self.cp_group.rank(), query.device)
        if self.rope is not None and not self.rotated:
            tables = self.tables(packed_seq_params, tokens, query.size(-1), query)
            query, key = rotate(query, *tables), rotate(key, *tables)
        if cp > 1:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(
                    x.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
                )
                for x in (key, value)
            )
        kernel = _varlen_kernel() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else None
        if kernel is not None and not plan.long:
            if cp > 1:
                key, value = key.index_select(0, plan.key_index), value.index_select(0, plan.key_index)
            cu_q, cu_k, longest_q, longest_k = plan.varlen
            out = kernel(query, key, value, cu_q, cu_k, longest_q, longest_k, scale=self.softmax_scale)
        else:
            if cp > 1:
                key, value = key.index_select(0, plan.key_order), value.index_select(0, plan.key_order)
            out = _padded(query, key, value, plan, self.softmax_scale)
        return out.reshape(tokens, -1)
