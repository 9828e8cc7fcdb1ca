"""The rotation of a packed row is transformers' rotation of each document, scaled as its configuration says."""

import math
from typing import Any

import pytest
import torch
from relax_train.models.architectures import model_shape
from relax_train.models.rope import Rope
from relax_train.models.rotary import rope_frequencies, rotary_tables, rotate

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Rotary embeddings as published, and what their families allow beside.
PUBLISHED: dict[str, tuple[float, int, int, dict[str, Any]]] = {
    "smollm2-135m": (1e5, 64, 8192, {"rope_type": "default"}),
    "llama-3.1-8b": (5e5, 128, 131072, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
    "llama-3.2-1b": (5e5, 64, 131072, {"rope_type": "llama3", "factor": 32.0, **LLAMA3}),
    "longchat": (1e4, 128, 2048, {"type": "linear", "factor": 8.0}),
    "qwen2.5-7b": (1e6, 128, 131072, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "qwen3-8b": (1e6, 128, 40960, {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}),
    "qwen3, no original length": (1e6, 128, 40960, {"rope_type": "yarn", "factor": 4.0}),
    "mscale": (1e4, 64, 163840, {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "not truncated": (1.5e5, 64, 131072, {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 16}),
    "one dimension": (1e4, 16, 64, {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.2, "beta_slow": 1.1}),
    "same attention factor": (1e4, 16, 64, {"rope_type": "yarn", "factor": math.e, "attention_factor": 1.1}),
}


def _config(name: str, form: str) -> dict[str, Any]:
    theta, dim, positions, rope = PUBLISHED[name]
    keys: dict[str, Any] = {"rope_scaling": rope, "rope_theta": theta}
    if form == "new":
        keys = {"rope_parameters": {**rope, "rope_theta": theta}}
    return {
        "model_type": "llama",
        "hidden_size": 4 * dim,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "max_position_embeddings": positions,
        **keys,
    }


@pytest.mark.parametrize("form", ["old", "new"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_and_attention_factor_are_those_of_transformers(name: str, form: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape, theirs = model_shape(_config(name, form)), LlamaRotaryEmbedding(LlamaConfig(**_config(name, form)))
    ours = rope_frequencies(shape.rope, shape.head_dim, torch.float32)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert shape.rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-6)
    if shape.rope.kind != "default":
        plain = rope_frequencies(Rope(theta=shape.rope.theta), shape.head_dim, torch.float32)
        assert not torch.allclose(ours, plain, rtol=1e-3), "this scaling does nothing, so nothing was compared"


def test_linear_counts_positions_before_it_and_the_others_after_it() -> None:
    assert model_shape(_config("longchat", "old")).max_positions == 8 * 2048
    assert model_shape(_config("llama-3.1-8b", "old")).max_positions == 131072
    assert model_shape(_config("qwen3-8b", "old")).max_positions == 40960


def test_an_original_length_beside_the_object_is_refused_unless_it_is_the_same() -> None:
    config = {**_config("qwen3-8b", "old"), "original_max_position_embeddings": 32768}
    assert model_shape(config).rope.original_positions == 32768
    with pytest.raises(ValueError, match="original_max_position_embeddings stands outside rope_scaling"):
        model_shape({**config, "original_max_position_embeddings": 16384})


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA: dict[str, Any] = {"rope_type": "llama3", "factor": 4.0, **LLAMA3}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        # What SGLang reads in another way, or stops at.
        ({**YARN, "attention_factor": 1.0}, "SGLang ignores attention_factor 1.0 and computes 1.13863 from the factor"),
        ({"rope_type": "linear", "factor": 4}, "SGLang stops at factor 4 of rope type 'linear': write 4.0"),
        (
            {**YARN, "factor": 2.0},
            "256 is more than factor 2 times original_max_position_embeddings 64.*lower it to 128",
        ),
        ({**YARN, "attn_factor": 2.0}, "attn_factor of rope type 'yarn' is not supported"),
        ({"rope_type": "default", "mrope_section": [8, 12]}, "mrope_section of rope type 'default' is not supported"),
        ({**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}, "mscale should be a number above 0"),
        # What nobody can compute.
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope type 'dynamic' is not supported, only default, linear, llama3,",
        ),
        ({"rope_type": ["yarn"], "factor": 2.0}, "is not supported, only default"),
        ({"rope_type": "yarn"}, "rope type 'yarn' needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor 0.5 of rope type 'linear' should be at least 1"),
        ({**LLAMA, "low_freq_factor": None}, "rope type 'llama3' needs low_freq_factor"),
        ({**LLAMA, "low_freq_factor": 4.0}, "low_freq_factor 4.0 should be below high_freq_factor 4.0"),
        ({**LLAMA, "original_max_position_embeddings": "long"}, "original_max_position_embeddings should be a whole"),
        ({**YARN, "beta_fast": 0.5}, "beta_slow 1.0 should be below beta_fast 0.5"),
        ({**YARN, "beta_slow": None}, "rope type 'yarn' needs beta_slow"),
        ({**YARN, "truncate": "no"}, "truncate should be true or false"),
        ({**YARN, "rope_theta": 1.0}, "rope_theta 1.0 of rope type 'yarn' should be above 1"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention of rope type 'default' is not supported"),
    ],
)
def test_a_scaling_that_is_not_computed_alike_is_refused(rope: dict[str, Any], words: str) -> None:
    config = {**_config("longchat", "old"), "max_position_embeddings": 256, "rope_scaling": rope}
    with pytest.raises(ValueError, match=words):
        model_shape(config)


def test_a_base_is_needed() -> None:
    from relax_train.models.architectures.rope_keys import rope_theta

    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}) == 1e6
    with pytest.raises(ValueError, match="rope_theta"):
        rope_theta({})


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "longchat", "qwen3-8b"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(name: str, dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    lengths = [5, 1, 900]
    shape, theirs = model_shape(_config(name, "old")), LlamaRotaryEmbedding(LlamaConfig(**_config(name, "old")))
    dim = shape.head_dim
    positions = torch.cat([torch.arange(n) for n in lengths])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(positions), 4, dim, generator=generator).to(dtype)
    k = torch.randn(len(positions), 2, dim, generator=generator).to(dtype)
    tables = rotary_tables(positions, dim, shape.rope, torch.float32)
    cos, sin = theirs(q.float(), positions[None])
    for x in (q, k):
        # transformers rotates [batch, heads, tokens, dim].
        expected = apply_rotary_pos_emb(x.float().transpose(0, 1)[None], x.float().transpose(0, 1)[None], cos, sin)[0]
        got = rotate(x, *tables)
        assert got.dtype == dtype
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2  # an angle of 900 is known to 3e-5 only
        torch.testing.assert_close(got.float(), expected[0].transpose(0, 1), atol=tolerance, rtol=1e-2)


def test_a_token_at_position_zero_is_not_rotated_and_norms_stay() -> None:
    x = torch.randn(7, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = rotate(x, *rotary_tables(torch.arange(7), 16, Rope(theta=1e4), torch.float64))
    assert torch.equal(got[0], x[0])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    assert not torch.allclose(got[1:], x[1:])
