"""Qwen2 and Qwen2.5 (arXiv 2407.10671, 2412.15115): query, key and value have biases."""

from relax_train.models.architectures.base import ATTENTION_OUT, QKV, QKV_BIAS, Architecture

QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    attention=(QKV, QKV_BIAS, ATTENTION_OUT),
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    models=("Qwen2", "Qwen2.5"),
)
