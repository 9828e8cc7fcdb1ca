"""Options of what is optimised: advantages, clipped objective, KL terms, entropy, importance sampling."""

import dataclasses
from typing import ClassVar, Literal

from relax_data.options import LARGEST_COEFFICIENT, LARGEST_FLOAT, Settings, option

from relax_train.algorithms.registry import (
    ADVANTAGES,
    ESTIMATOR_FLAG,
    LOSS_FLAG,
    LOSSES,
    Estimator,
    choice_problem,
    names_with,
    table_help,
)

KLLossType = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSettings(Settings):
    """Flags of the reinforcement-learning objective."""

    TITLE: ClassVar[str] = "Algorithm"

    advantage_estimator: str = option(
        "grpo",
        f"How advantages follow from rewards. {table_help(ADVANTAGES)} Or module:function(inputs) -> list of arrays, "
        "see relax_train.algorithms.",
        metavar="NAME",
    )
    loss_type: str = option(
        "clip",
        f"What is maximised for a token. {table_help(LOSSES)} Or module:function(inputs) -> Objective, see "
        "relax_train.algorithms.",
        metavar="NAME",
    )
    disable_grpo_std_normalization: bool = option(
        False, "Do not divide advantages of grpo and gspo by the standard deviation of their group (Dr. GRPO)."
    )
    normalize_advantages: bool = option(
        False, "Whiten the advantages over all trained tokens of a rollout, after the advantage estimator."
    )
    eps_clip: float = option(
        0.2,
        "Probability ratios are clipped below 1 - EPS_CLIP. With --advantage-estimator gspo set it much smaller: its "
        "paper has 3e-4.",
        gt=0,
        lt=1,
    )
    eps_clip_high: float | None = option(
        None,
        "Probability ratios are clipped above 1 + EPS_CLIP_HIGH; default: --eps-clip (DAPO clip-higher). The paper of "
        "gspo has 4e-4.",
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
        "Weight of the KL divergence to the reference model that is subtracted from the reward: of the whole response, "
        "or, with reinforce_plus_plus and reinforce_plus_plus_baseline, of each token and those after it.",
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
    def sequence_ratio(self) -> bool:
        """Whether the loss takes one probability ratio for a whole response."""
        return self._builtin_estimator is not None and self._builtin_estimator.sequence_ratio

    @property
    def compares_group(self) -> bool:
        """Whether the estimator compares the responses to one prompt, so that a single one has the advantage 0."""
        return self._builtin_estimator is not None and self._builtin_estimator.compares_group

    @property
    def _builtin_estimator(self) -> Estimator | None:
        return ADVANTAGES.get(self.advantage_estimator)

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
        return found + self._choice_problems()

    def _choice_problems(self) -> list[str]:
        """Estimator and loss: whether they exist, and combinations that mean nothing."""
        choices = ((ESTIMATOR_FLAG, self.advantage_estimator, ADVANTAGES), (LOSS_FLAG, self.loss_type, LOSSES))
        found = [problem for choice in choices if (problem := choice_problem(*choice)) is not None]
        name, estimator, loss = self.advantage_estimator, self._builtin_estimator, LOSSES.get(self.loss_type)
        if estimator is None:  # the user's own: it may read every setting
            return found
        if self.disable_grpo_std_normalization and not estimator.divides_by_std:
            found.append(
                f"--disable-grpo-std-normalization has no effect with {ESTIMATOR_FLAG} {name}, which does not divide "
                f"by the standard deviation of a group: remove it, or use {names_with('divides_by_std')}"
            )
        if self.normalize_advantages and estimator.whitens:
            found.append(
                f"--normalize-advantages has no effect with {ESTIMATOR_FLAG} {name}, which normalises over the "
                "tokens of a rollout itself: remove it"
            )
        if estimator.sequence_ratio and loss is not None and loss.token_ratio:
            found.append(
                f"{LOSS_FLAG} {self.loss_type} clips the ratio of a token, and {ESTIMATOR_FLAG} {name} has one ratio "
                f"for a whole response: use {LOSS_FLAG} clip, or {ESTIMATOR_FLAG} grpo, which has the same advantages"
            )
        return found
