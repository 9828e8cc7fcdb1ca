"""Softmax statistics of rows of logits, and the gradient of log-probabilities and entropy written over the logits."""

import torch
import triton
import triton.language as tl

BLOCK = 4096
NO_PROBABILITY = tl.constexpr(-1e4)


@triton.jit
def _statistics(logits, log_z, p_log_p, stride, width, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    base = logits + row * stride
    # Each lane keeps its own maximum and sums, so that a block costs no reduction over lanes.
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + columns < width
        x = tl.load(base + first + columns, mask=inside, other=-float("inf")).to(tl.float32) * inverse_temperature
        higher = tl.maximum(top, x)
        pivot = tl.where(higher == -float("inf"), 0.0, higher)
        old, new = tl.exp(top - pivot), tl.exp(x - pivot)
        mass = mass * old + new
        moment = moment * old + tl.where(new > 0, x * new, 0.0)
        top = higher
    highest = tl.max(top, 0)
    pivot = tl.where(highest == -float("inf"), 0.0, highest)
    scale = tl.exp(top - pivot)
    total = tl.sum(mass * scale, 0)
    mean = tl.sum(moment * scale, 0) / total
    z = pivot + tl.log(total)
    tl.store(log_z + row, z)
    tl.store(p_log_p + row, tl.where(total > 0, mean - z, 0.0))


def statistics(logits: torch.Tensor, width: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives ``log sum exp(x)`` and ``sum p log p`` of the first ``width`` columns of ``x = logits / temperature``.

    Args:
        logits: ``[rows, columns]`` of bfloat16 or float32, the last dimension contiguous.

    Returns:
        float32 ``[rows]`` each; -inf and 0 for a row of nothing but -inf.
    """
    rows = logits.shape[0]
    log_z = torch.empty(rows, dtype=torch.float32, device=logits.device)
    p_log_p = torch.empty_like(log_z)
    _statistics[(rows,)](logits, log_z, p_log_p, logits.stride(0), width, 1 / temperature, BLOCK=BLOCK, num_warps=8)
    return log_z, p_log_p


@triton.jit
def _gradient(  # noqa: PLR0913  # tensors of one kernel
    logits,
    out,
    labels,
    log_z,
    grad_log_prob,
    entropy,
    grad_entropy,
    stride,
    out_stride,
    columns_total,
    width,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    log_p = tl.maximum(x * inverse_temperature - tl.load(log_z + row), NO_PROBABILITY)
    g = tl.load(grad_log_prob + row)
    factor = -g
    if WITH_ENTROPY:
        factor -= tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    d = tl.exp(log_p) * factor + tl.where(columns == tl.load(labels + row), g, 0.0)
    d = tl.where(inside, d * inverse_temperature, 0.0)
    tl.store(out + row * out_stride + columns, d, mask=columns < columns_total)


def write_gradient(  # noqa: PLR0913  # tensors and switches of one kernel
    logits: torch.Tensor,
    out: torch.Tensor,
    labels: torch.Tensor,
    log_z: torch.Tensor,
    grad_log_prob: torch.Tensor,
    *,
    width: int,
    temperature: float,
    entropy: torch.Tensor | None = None,
    grad_entropy: torch.Tensor | None = None,
) -> None:
    """Writes the gradient of ``logits`` into ``out``, which may be the same memory.

    Args:
        logits: ``[rows, columns]``.
        labels: int64 ``[rows]``: column of each label, -1 where it lies on another rank.
        log_z: float32 ``[rows]`` over the whole vocabulary.
        grad_log_prob: float32 ``[rows]``.
        width: columns that are no padding; the gradient of the others is 0.
        entropy: with ``grad_entropy``, where the entropy has a gradient too.
    """
    rows, columns = logits.shape
    some = log_z if entropy is None else entropy
    _gradient[(rows, triton.cdiv(columns, BLOCK))](
        logits,
        out,
        labels,
        log_z,
        grad_log_prob,
        some,
        some if grad_entropy is None else grad_entropy,
        logits.stride(0),
        out.stride(0),
        columns,
        width,
        1 / temperature,
        WITH_ENTROPY=grad_entropy is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
