"""RMSNorm of a sum, in one pass each way: the residual stream and its norm, and both their gradients."""

import torch
import triton
import triton.language as tl

PROGRAMS = 264
"""Programs of the backward pass: two for each multiprocessor of an H200; each adds up the weight's gradient."""


@triton.jit
def _forward(  # noqa: PLR0913  # tensors of one kernel
    x, residual, total, out, scales, weight, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    at = row * size + columns
    value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        value = rounded.to(tl.float32)  # what the backward pass will read
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(scales + row, scale)
    tl.store(out + at, value * scale * tl.load(weight + columns, mask=inside, other=0).to(tl.float32), mask=inside)


@triton.jit
def _backward(  # noqa: PLR0913  # tensors of one kernel
    grad_total, grad_out, total, scales, weight, grad_in, partial, rows, size, each, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    w = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    grad_weight = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    at = row * size + columns
    g = tl.load(grad_out + at, mask=inside, other=0)
    kept = tl.load(total + at, mask=inside, other=0)
    passed = tl.load(grad_total + at, mask=inside, other=0)
    for _ in range(0, each):
        # The next row is on its way while this one is computed.
        following = row + tl.num_programs(0)
        there = inside & (following < rows)
        next_at = following * size + columns
        next_g = tl.load(grad_out + next_at, mask=there, other=0)
        next_kept = tl.load(total + next_at, mask=there, other=0)
        next_passed = tl.load(grad_total + next_at, mask=there, other=0)
        scale = tl.load(scales + row, mask=row < rows, other=0)
        normed = kept.to(tl.float32) * scale
        d = g.to(tl.float32)
        grad_weight += d * normed
        d *= w
        d = scale * (d - normed * (tl.sum(d * normed, 0) / size))
        here = inside & (row < rows)
        tl.store(grad_in + row * size + columns, d + passed.to(tl.float32), mask=here)
        row, g, kept, passed = following, next_g, next_kept, next_passed
    tl.store(partial + tl.program_id(0) * size + columns, grad_weight, mask=inside)


def forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives ``x + residual``, its RMSNorm, and what each row was multiplied with, float32 ``[rows]``.

    Args:
        x: contiguous ``[rows, size]``; without ``residual`` the first result is ``x`` itself.
        residual: the same shape, or None.
        weight: ``[size]``.
    """
    rows, size = x.shape
    total = x if residual is None else torch.empty_like(x)
    out, scales = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _forward[(rows,)](
            x, x if residual is None else residual, total, out, scales, weight, size, eps,
            ADDS=residual is not None, BLOCK=triton.next_power_of_2(size), num_warps=8,
        )  # fmt: skip
    return total, out, scales


def backward(
    grad_total: torch.Tensor, grad_out: torch.Tensor, total: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the sum (and so of both its parts) and of the weight (float32), from those of both results."""
    rows, size = total.shape
    programs = max(1, min(PROGRAMS, rows))
    grad_in = torch.empty_like(total)
    partial = torch.empty(programs, size, dtype=torch.float32, device=total.device)
    _backward[(programs,)](
        grad_total, grad_out, total, scales, weight, grad_in, partial, rows, size, triton.cdiv(rows, programs),
        BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip
    return grad_in, partial.sum(0)
