"""SwiGLU of a matrix whose rows hold gate and linear part side by side, optionally weighted row by row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(up, out, weights, size, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(up + row * 2 * size + columns, mask=inside, other=0).to(tl.float32)
    linear = tl.load(up + row * 2 * size + size + columns, mask=inside, other=0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * linear
    if WEIGHTED:
        y *= tl.load(weights + row).to(tl.float32)
    tl.store(out + row * size + columns, y, mask=inside)


@triton.jit
def _backward(  # noqa: PLR0913  # tensors of one kernel
    grad,
    up,
    weights,
    grad_up,
    grad_weights,
    again,
    size,
    WEIGHTED: tl.constexpr,
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    g = tl.load(grad + row * size + columns, mask=inside, other=0).to(tl.float32)
    gate = tl.load(up + row * 2 * size + columns, mask=inside, other=0).to(tl.float32)
    linear = tl.load(up + row * 2 * size + size + columns, mask=inside, other=0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if WEIGHTED:
        # One block holds a whole row.
        tl.store(grad_weights + row, tl.sum(g * silu * linear, 0))
        g *= tl.load(weights + row).to(tl.float32)
    if AGAIN:
        tl.store(again + row * size + columns, silu * linear, mask=inside)
    grad_gate = g * linear * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_up + row * 2 * size + columns, grad_gate, mask=inside)
    tl.store(grad_up + row * 2 * size + size + columns, g * silu, mask=inside)


def _grid(rows: int, size: int, weighted: bool) -> tuple[tuple[int, int], int]:
    block = triton.next_power_of_2(size) if weighted else min(1024, triton.next_power_of_2(size))
    return (rows, triton.cdiv(size, block)), block


def forward(up: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Computes ``silu(gate) * linear * weight``, in float32, rounded once.

    Args:
        up: contiguous ``[rows, 2 * size]``.
        weights: ``[rows]`` of any floating type.

    Returns:
        ``[rows, size]`` of the type of ``up``.
    """
    rows, size = up.shape[0], up.shape[1] // 2
    out = up.new_empty(rows, size)
    grid, block = _grid(rows, size, weights is not None)
    if rows:
        _forward[grid](up, out, up if weights is None else weights, size, WEIGHTED=weights is not None, BLOCK=block)
    return out


def backward(
    grad: torch.Tensor, up: torch.Tensor, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of ``up`` and of ``weights`` (float32; None without)."""
    rows, size = up.shape[0], up.shape[1] // 2
    grad_up = torch.empty_like(up)
    weighted = weights is not None
    grad_weights = torch.empty(rows, dtype=torch.float32, device=up.device) if weighted else None
    grid, block = _grid(rows, size, weighted)
    if rows:
        _backward[grid](
            grad,
            up,
            up if weights is None else weights,
            grad_up,
            up if grad_weights is None else grad_weights,
            up,
            size,
            WEIGHTED=weighted,
            AGAIN=False,
            BLOCK=block,
        )
    return grad_up, grad_weights


def exchange(grad: torch.Tensor, up: torch.Tensor) -> None:
    """Turns ``grad``, the gradient of SwiGLU's output, into that output, and ``up`` into its own gradient.

    Args:
        grad: contiguous ``[rows, size]``.
        up: contiguous ``[rows, 2 * size]``.
    """
    rows, size = grad.shape
    grid, block = _grid(rows, size, False)
    if rows:
        _backward[grid](grad, up, up, up, up, grad, size, WEIGHTED=False, AGAIN=True, BLOCK=block)
