"""The experts of a rank in two grouped matrix products, where megatron-core runs them one after another.

Without TransformerEngine megatron-core has a loop over the experts of a layer: with 64 of them hundreds of small
kernels in each direction, which a GPU waits for. The parameters stay those of megatron's experts, so that checkpoints,
gradient buffers and the Hugging Face map know nothing of it; their weights are put side by side for each product, which
moves twice their bytes through the device's memory, and not kept for the backward pass.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from relax_train.backend.mcore import SequentialMLP
from relax_train.models.fused import keep_recipe_of, swiglu


class _GroupedLinear(torch.autograd.Function):
    """``y[rows of e] = x[rows of e] @ weights[e].T``; ``ends`` int32 ``[experts]``: where the rows of each end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_x = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        grad_weights = F.grouped_mm(grad.transpose(0, 1), x, offs=ends)
        return grad_x, None, *_added(weights, grad_weights)


def _added(weights: Sequence[torch.Tensor], grads: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Adds ``grads[i]`` to the gradient buffer of ``weights[i]``; gives what is left for autograd to add.

    The buffers of a layer lie at equal distances in megatron-core's flat buffer: one kernel adds to all of them.
    """
    if not all(hasattr(weight, "main_grad") for weight in weights):
        return grads.unbind(0)
    buffers: list[torch.Tensor] = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
    places = [buffer.data_ptr() for buffer in buffers]
    steps = {after - before for before, after in itertools.pairwise(places)}
    first = buffers[places.index(min(places))]
    if len(steps) == 1 and all(buffer.is_contiguous() for buffer in buffers):
        (step,) = steps
        distance = abs(step) // first.element_size()
        together = first.as_strided(grads.shape, (distance, first.stride(0), 1), first.storage_offset())
        together.add_(grads if step > 0 else grads.flip(0))
    else:
        for buffer, grad in zip(buffers, grads.unbind(0), strict=True):
            buffer.add_(grad)
    return [None] * len(weights)


def _forward(
    experts: Any, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Computes ``SequentialMLP.forward`` of megatron-core: ``[tokens, hidden]``, sorted by expert, weighted."""
    if hidden.dtype != torch.bfloat16 or hidden.size(0) == 0:  # what the kernel does not take
        result: tuple[torch.Tensor, None] = SequentialMLP.forward(experts, hidden, tokens_per_expert, probs)
        return result
    ends = tokens_per_expert.to(device=hidden.device, dtype=torch.int32, non_blocking=True).cumsum(0).int()
    up = _GroupedLinear.apply(hidden, ends, *(e.linear_fc1.weight for e in experts.local_experts))
    inner = swiglu(up, probs, remake=getattr(experts, "_relax_remake", False))
    with keep_recipe_of(inner):
        return _GroupedLinear.apply(inner, ends, *(e.linear_fc2.weight for e in experts.local_experts)), None


def use_grouped_products(model: torch.nn.Module) -> None:
    """Lets all layers with experts of a model compute as this module does, where their sizes allow it."""
    if not hasattr(F, "grouped_mm"):  # torch before 2.10
        return
    for module in model.modules():
        if isinstance(module, SequentialMLP) and module.num_local_experts > 1:
            sizes = module.local_experts[0].linear_fc2.weight.shape
            if all(size % 8 == 0 for size in sizes):  # the kernel reads 16 bytes at a time
                module.forward = functools.partial(_forward, module)
