"""Qwen3, the dense models (arXiv 2505.09388): queries and keys are normalised, and there are no biases."""

from relax_train.models.architectures.base import ATTENTION_OUT, QK_NORM, QKV, Architecture

QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    attention=(QKV, *QK_NORM, ATTENTION_OUT),
    defaults={"num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    models=("Qwen3 dense",),
    tried=(
        "0.1 M, random, CPU",
        "1.0 M of `examples/arithmetic`, CPU and one H200",
        "0.6 B and 4 B, random, one and two H200s",
    ),
)
