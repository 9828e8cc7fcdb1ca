"""The rotation of a packed row is transformers' rotation of each document."""

import pytest
import torch
from relax_train.models.rotary import rotary_tables, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_transformers(dtype: torch.dtype) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    theta, dim, lengths = 1e6, 32, [5, 1, 9]
    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(positions), 4, dim, generator=generator).to(dtype)
    k = torch.randn(len(positions), 2, dim, generator=generator).to(dtype)
    tables = rotary_tables(positions, dim, theta, torch.float32)
    cos, sin = Qwen3RotaryEmbedding(config)(q.float(), positions[None])
    for x in (q, k):
        # transformers rotates [batch, heads, tokens, dim].
        expected = apply_rotary_pos_emb(x.float().transpose(0, 1)[None], x.float().transpose(0, 1)[None], cos, sin)[0]
        got = rotate(x, *tables)
        assert got.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), expected[0].transpose(0, 1), atol=tolerance, rtol=0)


def test_a_token_at_position_zero_is_not_rotated_and_norms_stay() -> None:
    x = torch.randn(7, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = rotate(x, *rotary_tables(torch.arange(7), 16, 1e4, torch.float64))
    assert torch.equal(got[0], x[0])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=0)
    assert not torch.allclose(got[1:], x[1:])
