"""Qwen3, the mixtures of experts (arXiv 2505.09388): as the dense models, some or all layers with experts."""

from relax_train.models.architectures.base import (
    ATTENTION_OUT,
    QK_NORM,
    QKV,
    Architecture,
    all_dense,
    experts_key,
    integer,
)
from relax_train.models.shape import Config, Kind


def _layer_kinds(config: Config, layers: int) -> tuple[Kind, ...]:
    """Every ``decoder_sparse_step``-th layer has experts, but for those that ``mlp_only_layers`` lists (from 0)."""
    dense = config.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(isinstance(i, int) for i in dense):
        raise ValueError(f"config.json: mlp_only_layers should be a list of layer numbers, not {str(dense)[:40]!r}")
    step = integer(config, "decoder_sparse_step")
    if not integer(config, experts_key(config), 0, least=0):
        return all_dense(config, layers)
    without = set(dense)
    return tuple("dense" if i in without or (i + 1) % step else "experts" for i in range(layers))


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    attention=(QKV, *QK_NORM, ATTENTION_OUT),
    has_experts=True,
    layer_kinds=_layer_kinds,
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    models=("Qwen3 MoE",),
    tried=("0.1 M, random, CPU", "0.5 B, random, two H200s"),
)
