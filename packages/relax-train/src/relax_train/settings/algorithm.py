"""What is optimised: advantages, clipped objective, KL terms, entropy, importance sampling."""

import dataclasses
from typing import ClassVar, Literal

from relax_data.options import LARGEST_COEFFICIENT, LARGEST_FLOAT, Settings, option

KLLossType = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(Settings):
    """Flags of the reinforcement-learning objective."""

    TITLE: ClassVar[str] = "Algorithm"

    advantage_estimator: Literal["grpo"] = option(
        "grpo", "Advantage of a response: grpo compares its reward with the other responses to the same prompt."
    )
    disable_grpo_std_normalization: bool = option(
        False, "Do not divide GRPO advantages by the standard deviation of their group (Dr. GRPO)."
    )
    normalize_advantages: bool = option(
        False, "Whiten the advantages over all trained tokens of a rollout, after the advantage estimator."
    )
    eps_clip: float = option(0.2, "Probability ratios below 1 - EPS_CLIP give no gradient (PPO clipping).", gt=0, lt=1)
    eps_clip_high: float | None = option(
        None,
        "Probability ratios above 1 + EPS_CLIP_HIGH give no gradient; default: --eps-clip (DAPO clip-higher).",
        gt=0,
        le=LARGEST_FLOAT,
    )
    use_kl_loss: bool = option(False, "Add the KL divergence to the reference model to the loss.")
    kl_loss_coef: float = option(
        0.0,
        "Weight of the KL loss; needs --use-kl-loss. With 0 no reference forward pass is run.",
        ge=0,
        le=LARGEST_COEFFICIENT,
    )
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k3", "Estimator of the KL loss: k1, k2, k3 (Schulman), or low_var_kl: k3 limited to 10 a token."
    )
    kl_coef: float = option(
        0.0,
        "Weight of the KL divergence to the reference model that is subtracted from the reward of a response.",
        ge=0,
        le=LARGEST_COEFFICIENT,
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", ge=0, le=LARGEST_COEFFICIENT)
    use_tis: bool = option(
        False, "Weight each token by the truncated ratio of trainer and rollout probability (importance sampling)."
    )
    tis_clip: float = option(2.0, "Largest importance-sampling weight; needs --use-tis.", gt=0, le=LARGEST_FLOAT)
    calculate_per_token_loss: bool = option(
        False,
        "Average the loss over all tokens of the optimizer step, instead of over the tokens of a response and then "
        "over the responses.",
    )

    @property
    def upper_clip(self) -> float:
        """Distance of the upper clip bound from 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def kl_loss_weight(self) -> float:
        """Weight of the KL term in the loss, 0 when it is off."""
        return self.kl_loss_coef if self.use_kl_loss else 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part."""
        return self.kl_loss_weight != 0 or self.kl_coef != 0

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        for name in ("kl_loss_coef", "kl_loss_type"):
            if name in given and not self.use_kl_loss:
                found.append(f"--{name.replace('_', '-')} has no effect without --use-kl-loss: add it or drop the flag")
        if self.use_kl_loss and self.kl_loss_coef == 0 and "kl_loss_coef" not in given:
            found.append("--use-kl-loss has no effect with the default --kl-loss-coef 0: set it, for example to 0.001")
        if "tis_clip" in given and not self.use_tis:
            found.append("--tis-clip has no effect without --use-tis: add it or drop --tis-clip")
        return found
