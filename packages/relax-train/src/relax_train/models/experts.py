"""The experts of a rank in two grouped matrix products, where megatron-core runs them one after another.

Without TransformerEngine megatron-core has a loop over the experts of a layer: with 64 of them hundreds of small
kernels in each direction, which a GPU waits for. The parameters stay those of megatron's experts, so that checkpoints,
gradient buffers and the Hugging Face map know nothing of it. Their weights and gradients lie at equal distances in
megatron-core's flat buffers, in the order of the experts (:func:`in_order`), where the products read and write them as
one tensor; elsewhere the weights are put side by side for each product.

Where one rank has all experts of a layer, tokens go to them and come back without megatron-core's dispatcher, which
sorts them by rank after it sorted them by expert, and asks the device for the counts.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from relax_train.backend.device import fuses
from relax_train.backend.mcore import MoELayer, SequentialMLP
from relax_train.models.fused import keep_recipe_of, swiglu

Weights = tuple[torch.Tensor, ...]


class _GroupedLinear(torch.autograd.Function):
    """``y[rows of e] = x[rows of e] @ weights[e].T``; ``ends`` int32 ``[experts]``: where the rows of each end.

    The weights come as ``held`` where their gradients go to buffers, so that autograd has nothing to do for each of
    them; else as ``weights``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, held: Weights | None, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, ends, *weights)
        ctx.held = held
        return F.grouped_mm(x, _side_by_side(held or weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *given = ctx.saved_tensors
        grad, weights = grads[0].contiguous(), ctx.held or given
        grad_x = F.grouped_mm(grad, _side_by_side(weights), offs=ends)
        grad_weights = F.grouped_mm(grad.transpose(0, 1), x, offs=ends)
        if ctx.held is None:
            return grad_x, None, None, *grad_weights.unbind(0)
        _add(weights, grad_weights)
        return grad_x, None, None


def _product(x: torch.Tensor, ends: torch.Tensor, weights: Weights) -> torch.Tensor:
    buffers = x.requires_grad and all(hasattr(weight, "main_grad") for weight in weights)
    result: torch.Tensor = (
        _GroupedLinear.apply(x, ends, weights) if buffers else _GroupedLinear.apply(x, ends, None, *weights)
    )
    return result


def _together(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of memory that all ``tensors`` share, ``[tensors, ...]``; None where they do not lie so in it."""
    first, places = tensors[0], [tensor.data_ptr() for tensor in tensors]
    step = places[1] - places[0]
    even = step > 0 and places == list(range(places[0], places[0] + len(places) * step, step))
    ends = {tensor.untyped_storage().data_ptr() for tensor in (first, tensors[-1])}
    if not even or len(ends) > 1 or not all(tensor.is_contiguous() for tensor in tensors):
        return None
    shape, strides = (len(tensors), *first.shape), (step // first.element_size(), *first.stride())
    return first.detach().as_strided(shape, strides, first.storage_offset())


def _side_by_side(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[weights, out, in]``, without a copy where that can be."""
    together = _together(weights)
    return torch.stack(list(weights)) if together is None else together


def _add(weights: Sequence[torch.Tensor], grads: torch.Tensor) -> None:
    """Adds ``grads[i]`` to the gradient buffer of ``weights[i]``."""
    buffers: list[torch.Tensor] = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
    together = _together(buffers)
    if together is not None:
        together.add_(grads)
    else:
        for buffer, grad in zip(buffers, grads.unbind(0), strict=True):
            buffer.add_(grad)


def _weights(experts: Any) -> tuple[Weights, Weights]:
    """Weights of the first and of the second product, by expert."""
    found: tuple[Weights, Weights] | None = getattr(experts, "_relax_weights", None)
    if found is None:  # looked up once: a layer has hundreds of modules
        local = list(experts.local_experts)
        found = tuple(e.linear_fc1.weight for e in local), tuple(e.linear_fc2.weight for e in local)
        experts._relax_weights = found
    return found


def _forward(
    experts: Any, hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Computes ``SequentialMLP.forward`` of megatron-core: ``[tokens, hidden]``, sorted by expert, weighted."""
    if hidden.dtype != torch.bfloat16 or hidden.size(0) == 0:  # what the kernel does not take
        result: tuple[torch.Tensor, None] = SequentialMLP.forward(experts, hidden, tokens_per_expert, probs)
        return result
    ends = tokens_per_expert.to(device=hidden.device, dtype=torch.int32, non_blocking=True).cumsum(0).int()
    first, second = _weights(experts)
    up = _product(hidden, ends, first)
    inner = swiglu(up, probs, remake=getattr(experts, "_relax_remake", False))
    with keep_recipe_of(inner):
        return _product(inner, ends, second), None


class _Copied(torch.autograd.Function):
    """A copy of its token for each of the token's experts; ``tokens`` and ``places`` as of :func:`_places`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return hidden.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from relax_train.kernels import routing

        return routing.sums(grads[0].contiguous(), *ctx.saved_tensors), None, None


class _Summed(torch.autograd.Function):
    """The sum over a token's experts: the adjoint of :class:`_Copied`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        from relax_train.kernels import routing

        ctx.save_for_backward(tokens)
        return routing.sums(rows.contiguous(), places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


def _places(routing: torch.Tensor, per_token: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the rows of each token lie when all are sorted by expert and then by token.

    Args:
        routing: bool ``[tokens, experts]``, with ``per_token`` marks in each row.

    Returns:
        the experts of each token and the places of its rows, int64 ``[tokens, per_token]``; and for each place the
        index of its row in these, int64 ``[tokens * per_token]``.
    """
    count = routing.shape[0]
    experts = routing.byte().topk(per_token, dim=1, sorted=False).indices
    after = routing.t().reshape(-1).cumsum(0)  # rows up to and with this expert and token
    places = after[experts * count + torch.arange(count, device=routing.device)[:, None]] - 1
    rows = torch.empty(places.numel(), dtype=torch.int64, device=routing.device)
    rows[places.view(-1)] = torch.arange(places.numel(), device=routing.device)
    return experts, places, rows


def _all_here(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of a layer whose experts are all on this rank."""
    if args or not fuses(hidden) or any(value is not None for value in kwargs.values()):
        return type(layer).forward(layer, hidden, *args, **kwargs)
    probs, routing = layer.router(hidden)
    per_token: int = layer.config.moe_router_topk
    with torch.no_grad():
        experts, places, rows = _places(routing, per_token)
        tokens = rows // per_token
    copies = _Copied.apply(hidden.reshape(-1, hidden.shape[-1]), tokens, places)
    weights = probs.gather(1, experts).view(-1).index_select(0, rows)
    output, _bias = layer.experts(copies, routing.sum(0), weights)
    return _Summed.apply(output, tokens, places).view(hidden.shape), None


def _is_all_here(layer: Any) -> bool:
    config = layer.config
    alone = config.expert_model_parallel_size == 1 and (config.expert_tensor_parallel_size or 1) == 1
    return alone and not (layer.use_shared_expert or layer.moe_layer_recompute)


@contextlib.contextmanager
def in_order(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the parameters of each layer's experts are listed from the last expert to the first.

    megatron-core's flat buffers take the parameters of a model from the last to the first: built inside, they hold the
    experts in their order.
    """
    held = [module.local_experts for module in model.modules() if isinstance(module, SequentialMLP)]
    before = [dict(experts._modules) for experts in held]
    for experts, modules in zip(held, before, strict=True):
        experts._modules = dict(reversed(modules.items()))
    try:
        yield
    finally:
        for experts, modules in zip(held, before, strict=True):
            experts._modules = modules


def use_grouped_products(model: torch.nn.Module) -> None:
    """Lets all layers with experts of a model compute as this module does, where their sizes allow it."""
    for module in model.modules():
        if isinstance(module, MoELayer) and _is_all_here(module):
            module.forward = functools.partial(_all_here, module)
    if not hasattr(F, "grouped_mm"):  # torch before 2.10
        return
    for module in model.modules():
        if isinstance(module, SequentialMLP) and module.num_local_experts > 1:
            sizes = module.local_experts[0].linear_fc2.weight.shape
            if all(size % 8 == 0 for size in sizes):  # the kernel reads 16 bytes at a time
                module.forward = functools.partial(_forward, module)
