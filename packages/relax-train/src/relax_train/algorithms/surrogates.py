"""Policy losses: what is maximised for a token, given its probability ratio and advantage.

They work on tensors by their methods alone, so that importing this module does not import torch. To add one, write a
function of :class:`LossInputs` and give it a name in :mod:`relax_train.algorithms.registry`.
"""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Argument of a policy loss: columns ``[tokens]`` of a micro-batch, on its device.

    Untrained tokens hold zeros, and a ratio of 1 or that of their response; what the loss gives for them is ignored.
    Nothing here may be changed in place.

    Attributes:
        log_probs: of the policy, differentiable.
        ratio: ``pi / pi_old``, differentiable; of a token, or of its whole response (GSPO), see
            :func:`relax_train.algorithms.losses.policy_loss`.
        advantages: of the tokens.
        old_log_probs: before the first optimizer step of the rollout.
        rollout_log_probs: of the engine.
        mask: 1 on trained tokens, 0 elsewhere.
        low, high: clip bounds of the ratio: 1 - ``--eps-clip`` and 1 + ``--eps-clip-high``.
    """

    log_probs: "torch.Tensor"
    ratio: "torch.Tensor"
    advantages: "torch.Tensor"
    old_log_probs: "torch.Tensor"
    rollout_log_probs: "torch.Tensor"
    mask: "torch.Tensor"
    low: float
    high: float


class Objective(NamedTuple):
    """Result of a policy loss.

    Attributes:
        values: ``[tokens]``, differentiable: what is MAXIMISED. Weights, importance sampling, KL and entropy terms are
            not part of it.
        clipped_low: bool ``[tokens]``, where the lower bound changed the gradient; for the metrics.
        clipped_high: bool ``[tokens]``, where the upper bound did.
    """

    values: "torch.Tensor"
    clipped_low: "torch.Tensor"
    clipped_high: "torch.Tensor"


def clip(inputs: LossInputs) -> Objective:
    """Ratio times advantage; no gradient from where the ratio has already moved too far the right way (PPO).

    PPO (arXiv:1707.06347) equation 7 with the two bounds of DAPO (arXiv:2503.14476) equation 8:
    ``min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)``.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    values = (ratio * advantages).minimum(ratio.clamp(inputs.low, inputs.high) * advantages)
    low = (ratio.detach() < inputs.low) & (advantages < 0)
    high = (ratio.detach() > inputs.high) & (advantages > 0)
    return Objective(values, low, high)


def cispo(inputs: LossInputs) -> Objective:
    """Clipped ratio, as a weight without gradient, times advantage times log-probability: every token has a gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585) equations 4 and 5: ``sg(clip(rho, 1 - eps, 1 + eps_high)) A log pi`` with the
    ratio of a token. The gradient is ``clip(rho) A grad log pi``, also where the ratio is clipped. The paper tunes the
    upper bound alone (its lower one is so far away that it does nothing: ``--eps-clip 0.999``), and takes the mean over
    all tokens: ``--calculate-per-token-loss``.
    """
    ratio = inputs.ratio.detach()
    values = ratio.clamp(inputs.low, inputs.high) * inputs.advantages * inputs.log_probs
    return Objective(values, ratio < inputs.low, ratio > inputs.high)
