"""Rotary position embedding of packed rows, for all documents of a row at once.

megatron-core rotates the documents of a packed row one by one, in every layer: a row of 30 short responses then
launches thousands of small kernels, which took more than half of a training step of a 0.6 B model on an H200.

Nor are its frequencies used: its Llama 3 scaling takes only the factor from outside and fixes the other three numbers
(an original length of 8192), and its YaRN has no ``attention_factor``.
"""

import math

import torch

from relax_train.models.rope import Rope, yarn_passage


def rope_frequencies(rope: Rope, dim: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Angle between neighbouring positions, in radians, of each pair of dimensions; as transformers rounds them.

    Args:
        dim: size of a head; even.
        dtype: float32 or float64.

    Returns:
        ``[dim / 2]``, from the highest to the lowest.
    """
    assert dim % 2 == 0, f"head size {dim} is odd"
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
    waves = rope.theta**exponents
    kept = 1.0 / waves
    if rope.kind == "default":
        return kept
    if rope.kind == "linear":
        return kept / rope.factor
    if rope.kind == "llama3":
        lengths = 2 * math.pi / kept  # in tokens
        low, high = rope.low_freq_factor, rope.high_freq_factor
        part = ((rope.original_positions / lengths - low) / (high - low)).clamp(0, 1)
        return (1 - part) * kept / rope.factor + part * kept
    assert rope.kind == "yarn", f"rope type {rope.kind} is not built"
    first, last = yarn_passage(rope, dim)
    numbers = torch.arange(dim // 2, dtype=dtype, device=device)
    part = 1 - ((numbers - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * waves) * (1 - part) + kept * part


def rotary_tables(
    positions: torch.Tensor, dim: int, rope: Rope, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotation of RoFormer (Su et al., arXiv 2104.09864, eq. 34).

    The halves of a head lie side by side, as in Llama and Qwen.

    Args:
        positions: int64 ``[tokens]``, position of each token in its document; or ``[3, tokens]`` of time, height and
            width, each of which turns the frequencies of its section of ``rope``.
        dim: size of a head; even.
        rope: base and scaling of the frequencies.
        dtype: float32 or float64.

    Returns:
        two ``[tokens, 1, dim]`` tensors, to be broadcast over heads; YaRN's are multiplied by its attention factor.
    """
    angles = positions.to(dtype)[..., None] * rope_frequencies(rope, dim, dtype, positions.device)
    if positions.dim() == 2:
        sections = angles.split(rope.sections, dim=-1)
        angles = torch.cat([section[axis] for axis, section in enumerate(sections)], dim=-1)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if rope.attention_factor == 1 else (cos * rope.attention_factor, sin * rope.attention_factor)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``[tokens, heads, dim]`` by the tables, computed in their type and returned in that of ``x``."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
