"""What the rotary embedding of a model is: base, and how its frequencies are scaled. Needs no torch: a plan asks too.

:mod:`relax_train.models.architectures.rope_keys` reads it from a ``config.json``, and
:mod:`relax_train.models.rotary` computes with it.
"""

import dataclasses
import math
from typing import Any, Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]
"""How the frequencies are scaled, as Hugging Face's ``rope_type`` names it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embedding (RoFormer, arXiv 2104.09864), and what stretches it to longer texts.

    Attributes:
        theta: base of the frequencies.
        kind: ``default`` is as trained; ``linear`` divides every frequency by ``factor`` (arXiv 2306.15595);
            ``llama3`` only the low ones, with a smooth passage (arXiv 2407.21783, as released with Llama 3.1);
            ``yarn`` likewise, with a passage of its own, and makes attention sharper (arXiv 2309.00071).
        factor: how many times longer a text may be than before.
        original_positions: longest text before, in tokens (``original_max_position_embeddings``).
        low_freq_factor, high_freq_factor: of ``llama3``: a frequency with fewer than ``low`` turns in the original
            length is divided, one with more than ``high`` is kept.
        beta_slow, beta_fast: the same of ``yarn``.
        truncate: of ``yarn``: whether the passage begins and ends at a whole dimension.
        attention_factor: of ``yarn``: what the cosines and sines are multiplied by; for ``factor`` s it is
            0.1 ln(s) + 1, which multiplies the logits of attention by its square.
        sections: of a model that reads pictures: how many frequencies turn with the time, the height and the width of a
            token (``mrope_section``, arXiv 2409.12191); none: all turn with its position.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    sections: tuple[int, ...] = ()

    def as_config(self) -> dict[str, Any]:
        """All values by name, for a comparison; two models that differ in one compute different things."""
        values = dataclasses.asdict(self)
        return {"rope_theta": values.pop("theta"), "rope_type": values.pop("kind"), **values}


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The square root of 1/t of YaRN (arXiv 2309.00071, eq. 22), with DeepSeek's ``mscale`` before the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_passage(rope: Rope, dim: int) -> tuple[float, float]:
    """First and last frequency, counted from 0, of the passage from kept to divided ones (arXiv 2309.00071, eq. 20).

    A frequency number ``i`` turns ``r`` times in the original length when
    ``i = dim * ln(length / (2 pi r)) / (2 ln(theta))``; the passage lies between those of ``beta_fast`` and
    ``beta_slow`` turns.
    """

    def number(turns: float) -> float:
        return dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = number(rope.beta_fast), number(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return low, high if high != low else high + 0.001  # as transformers: no division by zero
