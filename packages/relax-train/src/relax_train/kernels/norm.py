"""RMSNorm of a sum, in one pass each way: the residual stream and its norm, and both their gradients."""

import torch
import triton
import triton.language as tl

PROGRAMS = 528
"""Programs of the backward pass: four for each multiprocessor of an H200; each adds up the weight's gradient."""


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
    for turn in range(0, each):
        row = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        here = inside & (row < rows)
        at = row * size + columns
        g = tl.load(grad_out + at, mask=here, other=0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0)
        normed = tl.load(total + at, mask=here, other=0).to(tl.float32) * scale
        grad_weight += g * normed
        g *= w
        d = scale * (g - normed * (tl.sum(g * normed, 0) / size))
        tl.store(grad_in + at, d + tl.load(grad_total + at, mask=here, other=0).to(tl.float32), mask=here)
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
