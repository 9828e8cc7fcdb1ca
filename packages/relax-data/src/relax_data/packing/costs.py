"""The cost of computing a sequence, by its length."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Time of a sequence as ``linear * L + quadratic * L**2``, in FLOPs of one forward pass.

    The matrix products take ``2 * parameters`` FLOPs a token. Causal attention takes ``4 * q_width`` FLOPs a layer for
    each of the ``L**2 / 2`` pairs of a query and a key before it: ``2 * q_width`` for the score and as many for the
    weighted sum. Backward is twice the forward for both, so the ratio holds for training too.
    (Kaplan et al. 2020, arXiv:2001.08361, table 1; the factor 1/2 is the causal mask that varlen kernels skip.)
    """

    linear: float
    quadratic: float

    @classmethod
    def from_shape(cls, *, parameters: float, num_layers: int, num_attention_heads: int, head_dim: int) -> "CostModel":
        """The cost of a transformer.

        Args:
            parameters: those that a token passes through; of a mixture of experts the active ones, no embedding.
            num_layers, num_attention_heads, head_dim: as in the model's configuration.
        """
        return cls(linear=2.0 * parameters, quadratic=2.0 * num_layers * num_attention_heads * head_dim)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """float64 ``[n]`` for lengths ``[n]`` in tokens."""
        tokens: np.ndarray = np.asarray(lengths, dtype=np.float64)
        return np.asarray(self.linear * tokens + self.quadratic * tokens * tokens)
