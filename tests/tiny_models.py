"""Tiny models of every family: one shape, which tests change where they must."""

from typing import Any

SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
    dtype="float32",
)
"""Options of a transformers configuration, for the characters of :mod:`char_tokenizer`."""


def random_model(family: str, options: dict[str, Any]) -> Any:
    """A transformers model of seed 0 whose matrices are larger than transformers makes them.

    Args:
        family: as transformers' classes begin: ``Qwen3``, ``Llama``.
        options: of its configuration.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)  # so that attention is no mean over all tokens
    return model


def disturb(model: Any, seed: int = 1) -> None:
    """Changes every weight of a model, as a step of training does; the same way for a seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
