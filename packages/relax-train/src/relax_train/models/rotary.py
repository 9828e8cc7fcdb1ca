"""Rotary position embedding of packed rows, for all documents of a row at once.

megatron-core rotates the documents of a packed row one by one, in every layer: a row of 30 short responses then
launches thousands of small kernels, which took more than half of a training step of a 0.6 B model on an H200.
"""

import torch


def rotary_tables(
    positions: torch.Tensor, dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotation of RoFormer (Su et al., arXiv 2104.09864, eq. 34).

    The halves of a head lie side by side, as in Llama and Qwen.

    Args:
        positions: int64 ``[tokens]``, position of each token in its document.
        dim: size of a head; even.
        theta: base of the frequencies.
        dtype: float32 or float64.

    Returns:
        two ``[tokens, 1, dim]`` tensors, to be broadcast over heads.
    """
    assert dim % 2 == 0, f"head size {dim} is odd"
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=positions.device).to(dtype) / dim
    angles = positions.to(dtype)[:, None] * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates ``[tokens, heads, dim]`` by the tables, computed in their type and returned in that of ``x``."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)
