"""Layers of the model as fused kernels compute them, and what of their activations is made anew in the backward pass.

megatron-core's modules stay as they are built: their parameters, checkpoints and gradient buffers know nothing of this.
:func:`fuse` gives instances another forward pass, which takes the fused kernels for tensors on CUDA in half or single
precision (:func:`relax_train.backend.device.fuses`) and megatron's own code for all others.

A module may give its output a recipe (:func:`give_recipe`): a linear layer that gets such a tensor keeps the recipe
for its backward pass and not the tensor. It costs one pass over memory to make a norm or a SwiGLU again, where a whole
layer costs its matrix products.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from relax_train.backend.device import add_product, fuses
from relax_train.backend.mcore import MLP, SelfAttention, SequentialMLP, TransformerLayer

Recipe = Callable[[], torch.Tensor]


# ------------------------------------------------------------------ tensors that are made again


@dataclasses.dataclass(frozen=True)
class Remake:
    """What is made again in the backward pass, of the layers that are not recomputed whole.

    Attributes:
        norms: outputs of the norms before attention and MLP.
        activations: outputs of SwiGLU of dense MLPs.
        expert_activations: outputs of SwiGLU of experts.
    """

    norms: bool = False
    activations: bool = False
    expert_activations: bool = False


def give_recipe(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Notes on ``tensor`` how to make it again; the recipe may keep other tensors alive."""
    tensor._relax_recipe = recipe  # type: ignore[attr-defined]
    return tensor


@contextlib.contextmanager
def keep_recipe_of(tensor: torch.Tensor) -> Iterator[None]:
    """Inside, an operation that would save ``tensor`` saves its recipe, if it has one."""
    recipe: Recipe | None = getattr(tensor, "_relax_recipe", None)
    if recipe is None or not torch.is_grad_enabled():
        yield
        return
    address, size = tensor.data_ptr(), tensor.numel()

    def pack(saved: torch.Tensor) -> Any:
        if saved.data_ptr() == address and saved.numel() == size:
            return recipe, saved.shape
        return saved

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, tuple):
            made: torch.Tensor = packed[0]()
            return made.view(packed[1])
        assert isinstance(packed, torch.Tensor)
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _linear(layer: Any, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    with keep_recipe_of(inputs):
        return type(layer).forward(layer, inputs, *args, **kwargs)


def _norm(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = type(layer).forward(layer, inputs)
    if not torch.is_grad_enabled():
        return output
    kept = inputs.detach()

    def again() -> torch.Tensor:
        with torch.no_grad():
            return F.rms_norm(kept, layer.normalized_shape, layer.weight, layer.eps)

    return give_recipe(output, again)


class _AddNorm(torch.autograd.Function):
    """``x + residual`` and its RMSNorm; the gradients that meet at the sum are added in the same kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from relax_train.kernels import norm

        total, out, scales = norm.forward(x, residual, weight, eps)
        ctx.save_for_backward(total, scales, weight)
        ctx.adds = residual is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from relax_train.kernels import norm

        total, scales, weight = ctx.saved_tensors
        grad_total, grad_out = (grad.contiguous() for grad in grads)
        grad, grad_weight = norm.backward(grad_total, grad_out, total, scales, weight)
        return grad, grad if ctx.adds else None, _given(weight, grad_weight), None


def _given(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Adds ``grad`` to the gradient buffer of a weight, where it has one; gives what is left for autograd to add."""
    buffer: torch.Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None:
        return grad.to(weight.dtype)
    buffer.add_(grad)
    return None


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor | None, layer: Any, *, remake: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives ``x + residual`` and what ``layer``, an RMSNorm, makes of it; with ``remake`` that has a recipe."""
    shape, size = x.shape, x.shape[-1]
    flat = x.contiguous().view(-1, size)
    other = None if residual is None else residual.contiguous().view(-1, size)
    total, out = _AddNorm.apply(flat, other, layer.weight, layer.eps)
    if remake and torch.is_grad_enabled():
        from relax_train.kernels import norm

        kept = total.detach()
        return total.view(shape), give_recipe(
            out.view(shape), lambda: norm.forward(kept, None, layer.weight.detach(), layer.eps)[1]
        )
    return total.view(shape), out.view(shape)


# ------------------------------------------------------------------ SwiGLU


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * linear``, of rows that hold both; times a weight of the row, where given."""

    @staticmethod
    def forward(ctx: Any, up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        from relax_train.kernels import swiglu

        ctx.save_for_backward(up, weights)
        return swiglu.forward(up, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from relax_train.kernels import swiglu

        up, weights = ctx.saved_tensors
        grad_up, grad_weights = swiglu.backward(grads[0].contiguous(), up, weights)
        return grad_up, None if grad_weights is None else grad_weights.to(weights.dtype)


def swiglu(up: torch.Tensor, weights: torch.Tensor | None = None, *, remake: bool = False) -> torch.Tensor:
    """Computes SwiGLU in one kernel where the device has it.

    Args:
        up: ``[..., 2 * size]``: gate and linear part side by side.
        weights: a factor for each row.
        remake: give the result a recipe.

    Returns:
        ``[..., size]``.
    """
    if not fuses(up):
        gate, linear = up.chunk(2, dim=-1)
        inner = F.silu(gate) * linear
        return inner if weights is None else (inner * weights.unsqueeze(-1)).to(up.dtype)
    flat = up.reshape(-1, up.shape[-1])
    rows = None if weights is None else weights.reshape(-1).contiguous()
    out: torch.Tensor = _SwiGLU.apply(flat, rows)
    out = out.view(*up.shape[:-1], -1)
    if remake:
        from relax_train.kernels import swiglu as kernel

        kept, factors = flat.detach(), None if rows is None else rows.detach()
        give_recipe(out, lambda: kernel.forward(kept, factors))
    return out


class _Down(torch.autograd.Function):
    """SwiGLU and the product after it, of which ``up`` is kept only: a backward pass, and no second one, overwrites it.

    The backward pass makes SwiGLU's output beside its gradient. Without ``made`` the result is memory of no value, for
    who wants the gradients only.
    """

    @staticmethod
    def forward(ctx: Any, up: torch.Tensor, weight: torch.Tensor, made: bool) -> torch.Tensor:
        from relax_train.kernels import swiglu

        ctx.save_for_backward(up, weight)
        shape = (*up.shape[:-1], weight.shape[0])
        if not made:
            return up.new_zeros(()).expand(shape)
        return (swiglu.forward(up.view(-1, up.shape[-1])) @ weight.t()).view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from relax_train.kernels import swiglu

        up, weight = ctx.saved_tensors
        grad = grads[0].contiguous().view(-1, weight.shape[0])
        inner = grad @ weight
        swiglu.exchange(inner, up.view(-1, up.shape[-1]))
        if hasattr(weight, "main_grad"):
            add_product(weight.main_grad, grad, inner)
            return up, None, None
        return up, grad.t() @ inner, None


def _mlp(layer: Any, hidden: torch.Tensor, *args: Any, remake: bool, **kwargs: Any) -> Any:
    """Forward pass of a dense MLP."""
    if args or not fuses(hidden) or kwargs.get("per_token_scale") is not None:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    up, bias = layer.linear_fc1(hidden)
    assert bias is None, "the MLPs of these models have no bias"
    if remake and torch.is_grad_enabled() and layer.config.tensor_model_parallel_size == 1:
        return _Down.apply(up, layer.linear_fc2.weight, True), None
    return layer.linear_fc2(swiglu(up, remake=remake))


# ------------------------------------------------------------------ queries, keys and values


class _QKV(torch.autograd.Function):
    """Norm and rotation of queries and keys: see :mod:`relax_train.kernels.qkv`."""

    @staticmethod
    def forward(  # noqa: PLR0913  # tensors of one kernel
        ctx: Any,
        mixed: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
        groups: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from relax_train.kernels import qkv

        ctx.save_for_backward(mixed, query_norm, key_norm, cos, sin)
        ctx.plan = (eps, groups)
        norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
        return qkv.forward(mixed, (cos, sin), norms, eps, groups)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from relax_train.kernels import qkv

        mixed, query_norm, key_norm, cos, sin = ctx.saved_tensors
        eps, groups = ctx.plan
        norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
        query, key, value = (grad.contiguous() for grad in grads)
        grad_mixed, grad_norms = qkv.backward(mixed, (query, key, value), (cos, sin), norms, eps, groups)
        of_norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if grad_norms is not None and query_norm is not None and key_norm is not None:
            of_norms = _given(query_norm, grad_norms[0]), _given(key_norm, grad_norms[1])
        return grad_mixed, *of_norms, None, None, None, None


def _qkv(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``get_query_key_value_tensors`` of self-attention; queries and keys come rotated when the kernel makes them."""
    core, packed = layer.core_attention, layer._relax_packed
    dim = layer.hidden_size_per_attention_head
    core.rotated = bool(
        packed is not None and core.rope is not None and fuses(hidden) and dim in (16, 32, 64, 128, 256)
    )
    if not core.rotated:
        return type(layer).get_query_key_value_tensors(layer, hidden, *args, **kwargs)
    mixed, _ = layer.linear_qkv(hidden)
    tokens = mixed.shape[0]
    cos, sin = core.tables(packed, tokens, dim, mixed)
    query_norm, key_norm = (getattr(norm, "weight", None) for norm in (layer.q_layernorm, layer.k_layernorm))
    query, key, value = _QKV.apply(
        mixed.view(tokens, -1),
        query_norm,
        key_norm,
        cos.view(tokens, dim),
        sin.view(tokens, dim),
        layer.config.layernorm_epsilon,
        layer.num_query_groups_per_partition,
    )
    return query[:, None], key[:, None], value[:, None]


def _attention(layer: Any, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
    layer._relax_packed = packed_seq_params
    return type(layer).forward(layer, *args, packed_seq_params=packed_seq_params, **kwargs)


# ------------------------------------------------------------------ layers


class _Recomputed(torch.autograd.Function):
    """Runs ``run`` and keeps its input only; the backward pass differentiates ``again`` at that input.

    ``again`` gives several tensors, each of which has the gradient of the one result: parts of a sum that nobody needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[torch.Tensor], torch.Tensor],
        again: Callable[[torch.Tensor], Sequence[torch.Tensor]],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        ctx.again = again
        ctx.save_for_backward(hidden)
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        hidden = kept.detach().requires_grad_()
        with torch.enable_grad():
            parts = ctx.again(hidden)
        torch.autograd.backward(parts, [grads[0]] * len(parts))
        return None, None, hidden.grad


def _layer(
    layer: Any, hidden_states: torch.Tensor, *args: Any, whole: bool, remake: Remake, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Forward pass of a layer; with ``whole`` it keeps its input only.

    It is then run again in the backward pass, without the last matrix product of a dense MLP, whose output nobody asks
    for there. megatron-core's own recomputation makes that too, and what layers note on themselves is left behind.
    """
    if args or not fuses(hidden_states):

        def run(hidden: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = type(layer).forward(layer, hidden, *args, **kwargs)[0]
            return output

        def again(hidden: torch.Tensor) -> Sequence[torch.Tensor]:
            return (run(hidden),)

    else:

        def run(hidden: torch.Tensor) -> torch.Tensor:
            stream, output = _parts(layer, hidden, remake=remake, **kwargs)
            return stream + output

        def again(hidden: torch.Tensor) -> Sequence[torch.Tensor]:
            return _parts(layer, hidden, remake=remake, for_gradient=True, **kwargs)

    if whole and torch.is_grad_enabled():
        output: torch.Tensor = _Recomputed.apply(run, again, hidden_states)
        return output, None
    return run(hidden_states), None


def _parts(
    layer: Any,
    hidden: torch.Tensor,
    *,
    remake: Remake,
    attention_mask: torch.Tensor | None = None,
    packed_seq_params: Any = None,
    for_gradient: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream before the MLP and what the MLP adds to it, in place of megatron-core's code between them.

    Args:
        for_gradient: leave out the last product of a dense MLP, where it is no more than a product.
    """
    mlp = layer.mlp
    dense = isinstance(mlp, MLP)
    stream, normed = _add_norm(hidden, None, layer.input_layernorm, remake=remake.norms)
    mixed, bias = layer.self_attention(normed, attention_mask=attention_mask, packed_seq_params=packed_seq_params)
    assert bias is None, "the projections of these models have no bias"
    # The router of experts would keep the norm's output all the same.
    stream, normed = _add_norm(mixed, stream, layer.pre_mlp_layernorm, remake=remake.norms and dense)
    if dense and for_gradient and layer.config.tensor_model_parallel_size == 1:
        up, _bias = mlp.linear_fc1(normed)
        return stream, _Down.apply(up, mlp.linear_fc2.weight, False)
    if getattr(layer, "recompute_mlp", False) and torch.is_grad_enabled():

        def run(x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = mlp(x)[0]
            return output

        added: torch.Tensor = _Recomputed.apply(run, lambda x: (run(x),), normed)
        return stream, added
    return stream, mlp(normed)[0]


def fuse(model: torch.nn.Module, remake: Remake, recomputed_layers: int = 0, *, at_once: bool = False) -> None:
    """Lets the layers of a model compute as this module does.

    Args:
        remake: what is made again in layers that are not recomputed.
        recomputed_layers: how many layers, from the first of this stage on, keep their input only.
        at_once: whether the backward pass follows at once, so that the last layer would be run twice in a row: it is
            not recomputed as a whole then, but for what is made again in one pass over memory.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if at_once and recomputed_layers == len(layers) > 1:
        recomputed_layers, remake = len(layers) - 1, Remake(norms=True, activations=True, expert_activations=True)
    for number, layer in enumerate(layers):
        whole = number < recomputed_layers
        kept = Remake() if whole else remake
        layer.forward = functools.partial(_layer, layer, whole=whole, remake=kept)
        _fuse_layer(layer, kept)


def _fuse_layer(layer: Any, remake: Remake) -> None:
    mlp, attention = layer.mlp, layer.self_attention
    linears = []
    if isinstance(attention, SelfAttention):
        attention._relax_packed = None
        attention.forward = functools.partial(_attention, attention)
        attention.get_query_key_value_tensors = functools.partial(_qkv, attention)
        linears.append(attention.linear_qkv)
    norms = [layer.input_layernorm]
    if isinstance(mlp, MLP):
        mlp.forward = functools.partial(_mlp, mlp, remake=remake.activations)
        linears += [mlp.linear_fc1, mlp.linear_fc2]
        norms.append(layer.pre_mlp_layernorm)  # the router of experts would keep it all the same
    for linear in linears:
        linear.forward = functools.partial(_linear, linear)
    if remake.norms:
        for norm in norms:
            norm.forward = functools.partial(_norm, norm)
    for module in mlp.modules():
        if isinstance(module, SequentialMLP):
            module._relax_remake = remake.expert_activations
