"""What it costs to compute a sequence, from the shape of the model."""

from typing import Any

from relax_data.packing.costs import CostModel


def cost_model(hf_config: Any) -> CostModel:
    """FLOPs of a forward pass over a sequence by its length; parallel sizes and backward scale all of it alike.

    Every matrix that a token is multiplied with counts: of a mixture of experts the router and the experts that a token
    goes to, and the output layer, but not the input embedding, which is looked up.

    Args:
        hf_config: a transformers configuration that :func:`relax_train.models.build.load_hf_config` accepts.
    """
    from relax_train.models.build import expert_layers

    hidden, heads = hf_config.hidden_size, hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hidden // heads
    attention = 2 * hidden * head_dim * (heads + (hf_config.num_key_value_heads or heads))
    layers = expert_layers(hf_config)
    parameters = hidden * hf_config.vocab_size + len(layers) * attention
    for is_expert in layers:
        if is_expert:
            chosen = hf_config.num_experts_per_tok * 3 * hidden * hf_config.moe_intermediate_size
            parameters += chosen + hidden * hf_config.num_experts
        else:
            parameters += 3 * hidden * hf_config.intermediate_size
    return CostModel.from_shape(
        parameters=parameters, num_layers=len(layers), num_attention_heads=heads, head_dim=head_dim
    )
