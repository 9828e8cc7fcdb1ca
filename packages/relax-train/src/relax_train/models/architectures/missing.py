"""Parts of models that no architecture here has, by the key of ``config.json`` that asks for them."""

from relax_train.models.shape import Config

_PARTS: dict[str, tuple[str, ...]] = {
    "multi-head latent attention": ("kv_lora_rank",),
    "sliding-window attention": ("sliding_window",),
    "attention of another kind in some layers": (
        "full_attention_interval",
        "attn_type_list",
        "hybrid_override_pattern",
    ),
    "layers without positions": ("no_rope_layers", "no_rope_layer_interval"),
    "shared experts": ("n_shared_experts", "shared_expert_intermediate_size", "num_shared_experts"),
    "state-space layers": ("mamba_d_state", "ssm_state_size", "state_size"),
    "a vision tower of another kind": ("vision_config", "image_token_id"),
    "sound": ("audio_config",),
    "capped logits": ("attn_logit_softcapping", "final_logit_softcapping"),
    "scaled residuals or logits": ("residual_multiplier", "attention_multiplier", "logits_scaling", "scale_depth"),
    "quantised weights": ("quantization_config",),
}


def missing_parts(config: Config) -> list[str]:
    """What a configuration has that is not built, each with its key."""
    if config.get("use_sliding_window") is False:
        config = {**config, "sliding_window": None}
    found = []
    for part, keys in _PARTS.items():
        key = next((key for key in keys if config.get(key)), None)
        if key is not None:
            found.append(f"{part} ({key})")
    return found
