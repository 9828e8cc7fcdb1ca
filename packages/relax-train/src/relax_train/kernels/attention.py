"""Causal attention over packed documents by cuDNN, with gradients, beside the FlashAttention 2 of torch."""

from typing import Any

import torch

PREFERRED = "flash"
"""``flash`` or ``cudnn``: which kernel attends, where both can."""

_LENGTHS, _COUNTS = 512, 16
"""cuDNN makes a plan for each longest length and number of documents: both are rounded up to a multiple of these."""


def rounded(borders: torch.Tensor, longest: int) -> tuple[torch.Tensor, int]:
    """Borders with empty documents at the end, and a longest length, that many micro-batches have in common.

    Args:
        borders: int32 ``[documents + 1]``.
    """
    empty = -(borders.numel() - 1) % _COUNTS
    return torch.cat([borders, borders[-1:].expand(empty)]), -(-longest // _LENGTHS) * _LENGTHS


def cudnn(  # tensors of one kernel
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float | None,
) -> torch.Tensor:
    """Attends: ``[tokens, heads, dim]``; arguments as of ``varlen_attn``, borders and longest as of :func:`rounded`."""
    out: torch.Tensor = _Cudnn.apply(query, key, value, borders, longest, scale)
    return out


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(  # tensors of one kernel
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        borders: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        found = torch.ops.aten._cudnn_attention_forward(
            query, key, value, None, borders, borders, longest, longest, True, 0.0, True, False, scale=scale
        )
        out, log_sum, seed, offset = found[0], found[1], found[6], found[7]
        ctx.save_for_backward(query, key, value, borders, out, log_sum, seed, offset)
        ctx.plan = (longest, scale)
        result: torch.Tensor = out.view(query.shape)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, borders, out, log_sum, seed, offset = ctx.saved_tensors
        longest, scale = ctx.plan
        found = torch.ops.aten._cudnn_attention_backward(
            grads[0].contiguous(), query, key, value, out, log_sum, seed, offset, None, borders, borders, longest,
            longest, 0.0, True, scale=scale,
        )  # fmt: skip
        return *(grad.view(x.shape) for grad, x in zip(found, (query, key, value), strict=True)), None, None, None
