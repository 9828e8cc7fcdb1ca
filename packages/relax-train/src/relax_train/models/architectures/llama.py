"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and what shares their shape: SmolLM2 (arXiv 2502.02737) among others.

The plainest decoder. ``attention_bias`` and ``mlp_bias`` are refused: with them also the output of attention, or the
MLP, has a bias, for which megatron-core has one switch over both, and SGLang's Llama has no bias in the MLP at all.
"""

from relax_train.models.architectures.base import Architecture

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    refuses=("attention_bias", "mlp_bias"),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e4},
    models=("Llama 2", "Llama 3", "SmolLM2"),
    tried=("0.1 M, random, with scaled positions, CPU", "SmolLM2-135M-Instruct, CPU and one H200"),
)
