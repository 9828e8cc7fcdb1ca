"""Norm and rotation of queries and keys, from the output of the joint projection to what attention takes, in one pass.

A row of the projection holds for each group its query heads, one key head and one value head, as megatron-core lays
them. The rotation turns the halves of a head, as in Llama and Qwen.
"""

import torch
import triton
import triton.language as tl

TOKENS, TOKENS_BACKWARD = 32, 64
"""Tokens of one program of the forward and of the backward pass."""


@triton.jit
def _forward(  # noqa: PLR0913  # tensors of one kernel
    mixed,
    query,
    key,
    value,
    query_weight,
    key_weight,
    cos,
    sin,
    tokens,
    eps,
    groups,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    rows = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    group, place = head // (PER_GROUP + 2), head % (PER_GROUP + 2)
    columns = tl.arange(0, HALF)[None, :]
    inside = rows < tokens
    source = mixed + (rows * groups * (PER_GROUP + 2) + head) * DIM + columns
    low = tl.load(source, mask=inside, other=0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    if place == PER_GROUP + 1:
        target = value + (rows * groups + group) * DIM + columns
        tl.store(target, low, mask=inside)
        tl.store(target + HALF, high, mask=inside)
    else:
        weight = query_weight
        target = query + (rows * groups * PER_GROUP + group * PER_GROUP + place) * DIM + columns
        if place == PER_GROUP:
            weight = key_weight
            target = key + (rows * groups + group) * DIM + columns
        if NORM:
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
            low = low * scale * tl.load(weight + columns).to(tl.float32)
            high = high * scale * tl.load(weight + HALF + columns).to(tl.float32)
        c = tl.load(cos + rows * DIM + columns, mask=inside, other=0)
        s = tl.load(sin + rows * DIM + columns, mask=inside, other=0)
        tl.store(target, low * c - high * s, mask=inside)
        tl.store(target + HALF, high * c + low * s, mask=inside)


@triton.jit
def _backward(  # noqa: PLR0913  # tensors of one kernel
    mixed,
    grad_query,
    grad_key,
    grad_value,
    query_weight,
    key_weight,
    cos,
    sin,
    grad_mixed,
    partial,
    tokens,
    eps,
    groups,
    PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    rows = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    head = tl.program_id(1)
    group, place = head // (PER_GROUP + 2), head % (PER_GROUP + 2)
    columns = tl.arange(0, HALF)[None, :]
    inside = rows < tokens
    offset = (rows * groups * (PER_GROUP + 2) + head) * DIM + columns
    if place == PER_GROUP + 1:
        source = grad_value + (rows * groups + group) * DIM + columns
        tl.store(grad_mixed + offset, tl.load(source, mask=inside, other=0), mask=inside)
        tl.store(grad_mixed + offset + HALF, tl.load(source + HALF, mask=inside, other=0), mask=inside)
    else:
        weight = query_weight
        source = grad_query + (rows * groups * PER_GROUP + group * PER_GROUP + place) * DIM + columns
        if place == PER_GROUP:
            weight = key_weight
            source = grad_key + (rows * groups + group) * DIM + columns
        g_low = tl.load(source, mask=inside, other=0).to(tl.float32)
        g_high = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
        c = tl.load(cos + rows * DIM + columns, mask=inside, other=0)
        s = tl.load(sin + rows * DIM + columns, mask=inside, other=0)
        d_low, d_high = g_low * c + g_high * s, g_high * c - g_low * s
        if NORM:
            low = tl.load(mixed + offset, mask=inside, other=0).to(tl.float32)
            high = tl.load(mixed + offset + HALF, mask=inside, other=0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
            low, high = low * scale, high * scale
            at = partial + (tl.program_id(0) * groups * (PER_GROUP + 2) + head).to(tl.int64) * DIM + tl.arange(0, HALF)
            tl.store(at, tl.sum(d_low * low, 0))
            tl.store(at + HALF, tl.sum(d_high * high, 0))
            d_low *= tl.load(weight + columns).to(tl.float32)
            d_high *= tl.load(weight + HALF + columns).to(tl.float32)
            mean = ((tl.sum(d_low * low, 1) + tl.sum(d_high * high, 1)) / DIM)[:, None]
            d_low, d_high = scale * (d_low - low * mean), scale * (d_high - high * mean)
        tl.store(grad_mixed + offset, d_low, mask=inside)
        tl.store(grad_mixed + offset + HALF, d_high, mask=inside)


Weights = tuple[torch.Tensor, torch.Tensor]


def forward(
    mixed: torch.Tensor, tables: Weights, norms: Weights | None, eps: float, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries ``[tokens, heads, dim]``, keys and values ``[tokens, groups, dim]``, normalised and rotated.

    Args:
        mixed: contiguous ``[tokens, groups * (heads / groups + 2) * dim]``.
        tables: cosines and sines, float32 contiguous ``[tokens, dim]``.
        norms: weights of the norms of queries and keys, ``[dim]``; None when there are none.
        eps: of the norms.
        groups: key heads.
    """
    tokens, dim = mixed.shape[0], tables[0].shape[-1]
    per_group = mixed.shape[1] // dim // groups - 2
    query = mixed.new_empty(tokens, groups * per_group, dim)
    key, value = (mixed.new_empty(tokens, groups, dim) for _ in range(2))
    weights = norms or (mixed, mixed)
    _forward[(triton.cdiv(tokens, TOKENS), groups * (per_group + 2))](
        mixed, query, key, value, *weights, *tables, tokens, eps, groups,
        PER_GROUP=per_group, DIM=dim, NORM=norms is not None, TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
    return query, key, value


def backward(
    mixed: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tables: Weights,
    norms: Weights | None,
    eps: float,
    groups: int,
) -> tuple[torch.Tensor, Weights | None]:
    """Gradients of ``mixed`` and of the norms (float32 ``[dim]``), from those of query, key and value (contiguous)."""
    tokens, dim = mixed.shape[0], tables[0].shape[-1]
    per_group = mixed.shape[1] // dim // groups - 2
    programs, grad_mixed = triton.cdiv(tokens, TOKENS_BACKWARD), torch.empty_like(mixed)
    shape = (programs, groups, per_group + 2, dim) if norms else (1,)
    partial = torch.empty(shape, dtype=torch.float32, device=mixed.device)
    weights = norms or (mixed, mixed)
    _backward[(programs, groups * (per_group + 2))](
        mixed, *grads, *weights, *tables, grad_mixed, partial, tokens, eps, groups,
        PER_GROUP=per_group, DIM=dim, NORM=norms is not None, TOKENS=TOKENS_BACKWARD, num_warps=4,
    )  # fmt: skip
    if norms is None:
        return grad_mixed, None
    # A column of heads: a sum over the programs first, in which neighbours in memory are added by neighbouring threads.
    heads = partial.view(programs, -1).sum(0).view(groups, per_group + 2, dim)
    return grad_mixed, (heads[:, :per_group].sum((0, 1)), heads[:, per_group].sum(0))
