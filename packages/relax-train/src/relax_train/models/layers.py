"""Modules that the megatron-core model gets through its own extension point, ``ModuleSpec``."""

from collections.abc import Iterable
from typing import Any

import torch

from relax_train.backend.mcore import (
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
)
from relax_train.models.attention import PackedAttention
from relax_train.models.shape import Kind, ModelShape


class Norm(torch.nn.RMSNorm):
    """RMSNorm for megatron-core layers; normalises the last dimension, in float32 inside.

    megatron-core's own wrapper of torch's norm refuses sequence parallelism. All that needs is a mark on the weight:
    its gradient is then summed over the tensor-parallel ranks, each of which saw a part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron reads it


def layer_spec(config: TransformerConfig, shape: ModelShape, kind: Kind) -> Any:
    """Spec of one transformer layer: megatron-core's local one with our norms and our attention.

    Args:
        kind: what its MLP is.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if kind == "experts" else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"rope": shape.rope})
    return spec


def stage_spec(config: TransformerConfig, shape: ModelShape, kinds: Iterable[Kind]) -> TransformerBlockSubmodules:
    """Spec of a pipeline stage whose layers are of these kinds."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config, shape, kind) for kind in kinds], layer_norm=Norm)
