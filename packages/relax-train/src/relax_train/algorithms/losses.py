"""The policy objective on the tokens of a micro-batch.

Everything is a sum over tokens with weights that the host computed for the whole optimizer step, over all
data-parallel ranks and micro-batches (:func:`token_weights`). Adding the losses of the micro-batches therefore gives
the loss of the step, however the samples were grouped.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from relax_train.algorithms.registry import Loss, load_loss
from relax_train.algorithms.surrogates import LossInputs
from relax_train.settings.algorithm import AlgorithmSettings, KLLossType

MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this before ``exp``: a probability ratio of 5e8 is far outside every clip already."""

LOW_VAR_KL_LIMIT = 10.0
"""Largest magnitude of a token's ``low_var_kl``."""

MEANS = (
    "approx_kl",
    "clip_fraction",
    "clip_fraction_high",
    "clip_fraction_low",
    "entropy",
    "kl_ref",
    "logprob_diff_mean",
    "ratio_mean",
    "tis_clip_fraction",
    "tis_weight_mean",
)
"""Metrics that are means over the trained tokens of the step."""

TOTALS = ("loss", "pg_loss", "kl_loss")
"""Metrics that add up to the value of the step."""

MAXIMA = ("logprob_diff_max",)
"""Metrics that are maxima over the trained tokens of the step."""


def metric_names(settings: AlgorithmSettings) -> tuple[str, ...]:
    """Metrics that :func:`policy_loss` gives under these settings, sorted, ``tokens`` aside."""
    absent = set()
    if not settings.needs_reference:
        absent |= {"kl_ref"}
    if settings.kl_loss_weight == 0:
        absent |= {"kl_loss"}
    if not settings.use_tis:
        absent |= {"tis_clip_fraction", "tis_weight_mean"}
    return tuple(sorted(set(MEANS + TOTALS + MAXIMA) - absent))


def token_weights(masks: Sequence[np.ndarray], *, per_token: bool) -> list[NDArray[np.float64]]:
    """Weight of each response token in the loss of an optimizer step; all weights add up to 1.

    Args:
        masks: loss mask of EVERY sample of the step, ``[response]`` each.
        per_token: True: mean over all trained tokens. False: mean over the samples of the mean over the sample's
            trained tokens, where samples without a trained token do not count.

    Returns:
        float64 ``[response]`` per sample; all zero when nothing is trained.
    """
    divisors = weight_divisors([m.sum(dtype=np.float64) for m in masks], per_token=per_token)
    return [masked_weights(mask, divisor) for mask, divisor in zip(masks, divisors, strict=True)]


def weight_divisors(trained_tokens: ArrayLike, *, per_token: bool) -> NDArray[np.float64]:
    """Divisor of the loss mask of each sample that gives its weights (:func:`token_weights`).

    Args:
        trained_tokens: ``[n]``, sum of the loss mask of EVERY sample of the step.
        per_token: as for :func:`token_weights`.

    Returns:
        float64 ``[n]``; 0 for a sample of which nothing is trained.
    """
    counts = np.asarray(trained_tokens, dtype=np.float64)
    total = counts.sum() if per_token else float((counts > 0).sum())
    return np.where(counts > 0, total if per_token else total * counts, 0.0)


def masked_weights(mask: np.ndarray, divisor: float) -> NDArray[np.float64]:
    """Weights of the tokens of one sample, float64 ``[response]``: its loss mask over its divisor."""
    if divisor == 0:
        return np.zeros(len(mask))
    weights: NDArray[np.float64] = mask.astype(np.float64) / divisor
    return weights


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLLossType) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from a token that the policy sampled.

    Schulman, "Approximating KL divergence" (http://joschu.net/blog/kl-approx.html), with ``r = p_ref / p``:
    k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r. ``low_var_kl`` is k3 limited to
    +-:data:`LOW_VAR_KL_LIMIT`. As a loss, k1 has a gradient of mean zero on-policy; k2 and k3 pull to the reference.

    Args:
        log_probs: ``[tokens]`` of the policy.
        ref_log_probs: ``[tokens]`` of the reference.
        kind: which estimator.

    Returns:
        ``[tokens]``.
    """
    log_r = ref_log_probs - log_probs
    if kind == "k1":
        return -log_r
    if kind == "k2":
        return log_r.square() / 2
    bounded = log_r.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = torch.expm1(bounded) - bounded
    return k3.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else k3


def tis_weights(old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, clip: float) -> torch.Tensor:
    """Truncated importance sampling: ``min(pi_old / pi_rollout, clip)``, without gradient.

    It corrects for the rollout engine computing slightly other probabilities than the trainer for the same weights
    (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; the truncation is
    Ionides 2008).

    Args:
        old_log_probs: ``[tokens]`` of the trainer, before the first optimizer step.
        rollout_log_probs: ``[tokens]`` of the engine.
        clip: upper bound (``--tis-clip``).

    Returns:
        ``[tokens]``.
    """
    log_ratio = (old_log_probs - rollout_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp().clamp(max=clip)


@dataclasses.dataclass(frozen=True)
class Documents:
    """The responses that the tokens of a micro-batch belong to, for what is computed of a whole response.

    Attributes:
        index: int64 ``[tokens]``, number of the document that each token lies in.
        count: documents of the micro-batch, over all context-parallel ranks.
        group: context-parallel group, whose ranks hold parts of the same documents; None for a single rank.
    """

    index: torch.Tensor
    count: int
    group: "dist.ProcessGroup | None" = None

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """For each token the mean of ``values`` over the trained tokens of its document, in float64, without gradient.

        Args:
            values: ``[tokens]``.
            mask: ``[tokens]``, 1 on trained tokens; a document without one has the mean 0.
        """
        columns = torch.stack([values.detach() * mask, mask]).double()
        sums = torch.zeros(2, self.count, dtype=torch.float64, device=values.device).index_add_(1, self.index, columns)
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(sums, group=self.group)
        return (sums[0] / sums[1].clamp(min=1))[self.index]


def probability_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor, documents: Documents | None = None
) -> torch.Tensor:
    """``pi / pi_old`` of each token, or, with ``documents``, of the whole response that each token belongs to.

    Of a token: PPO (arXiv:1707.06347) section 3. Of a response y: GSPO (arXiv:2507.18071) equations 7 and 14,
    ``s = exp(mean over y of (log pi - log pi_old))`` on each of its tokens, with the gradient of GSPO-token:
    ``s_t = sg(s) pi_t / sg(pi_t)``, so ``grad s_t = s grad log pi_t``. Where all tokens of a response have the same
    weight and advantage, their sum has the gradient of GSPO itself (the paper's section 4.3), and no gradient has to
    flow through the sum over context-parallel ranks.

    Args:
        log_probs: ``[tokens]``, differentiable.
        old_log_probs: ``[tokens]``.
        mask: ``[tokens]``, 1 on trained tokens; the mean goes over those.
        documents: asks for the ratio of responses.

    Returns:
        ``[tokens]``, differentiable, of the type of ``log_probs``; log-ratios are limited to :data:`MAX_LOG_RATIO`.
    """
    log_ratio = log_probs - old_log_probs
    if documents is None:
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    mean = documents.mean(log_ratio, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return mean.exp().to(log_probs.dtype) * (log_probs - log_probs.detach()).exp()


def policy_loss(  # noqa: PLR0913  # columns of one batch
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    *,
    weights: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    settings: AlgorithmSettings,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    documents: Documents | None = None,
    objective: Loss | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Computes this micro-batch's part of the loss of the optimizer step.

    Per token ``-w_tis f(rho, A, log pi) + beta KL - c H``, where f is the function that ``--loss-type`` names
    (:mod:`relax_train.algorithms.surrogates`) and rho is ``pi / pi_old`` of the token, or of its response with
    ``--advantage-estimator gspo`` (:func:`probability_ratio`).

    Args:
        log_probs: ``[tokens]`` of the policy, differentiable.
        entropy: ``[tokens]``, differentiable when ``settings.entropy_coef`` is not 0.
        weights: ``[tokens]`` from :func:`token_weights`; 0 where nothing is trained.
        mask: ``[tokens]``, 1 on trained tokens and 0 elsewhere, where the other columns may hold anything.
        advantages: ``[tokens]``.
        rollout_log_probs: ``[tokens]`` of the engine.
        settings: clip bounds, coefficients, estimators.
        old_log_probs: ``[tokens]`` before the first optimizer step of the rollout; None: the current ones, which is
            exact at the first step.
        ref_log_probs: ``[tokens]`` of the reference model, or None.
        documents: which tokens form a response; needed for the ratio of a response.
        objective: from :func:`relax_train.algorithms.registry.load_loss`; default: the one that the settings name.

    Returns:
        the loss (scalar), and detached scalars: sums over tokens for :data:`MEANS` and :data:`TOTALS`, maxima for
        :data:`MAXIMA`, and ``tokens``: the trained tokens. Metrics that do not apply are absent.

    Raises:
        ValueError: the columns differ in shape; they would be spread over each other and count more than once.
    """
    columns = {
        "log_probs": log_probs,
        "entropy": entropy,
        "weights": weights,
        "mask": mask,
        "advantages": advantages,
        "rollout_log_probs": rollout_log_probs,
        "old_log_probs": old_log_probs,
        "ref_log_probs": ref_log_probs,
    }
    shapes = {name: tuple(column.shape) for name, column in columns.items() if column is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"the columns of a micro-batch must have one shape, not {shapes}")
    trained = mask > 0
    # Off the mask the columns may be anything, and 0 x inf is not 0: replace them by values without effect.
    log_probs, entropy = log_probs.where(trained, 0), entropy.where(trained, 0)
    advantages, rollout = advantages.where(trained, 0), rollout_log_probs.where(trained, 0)
    old = log_probs.detach() if old_log_probs is None else old_log_probs.where(trained, 0)

    assert documents is not None or not settings.sequence_ratio, "the ratio of a response needs its tokens"
    ratio = probability_ratio(log_probs, old, mask, documents if settings.sequence_ratio else None)
    surrogate, clipped_low, clipped_high = (objective or load_loss(settings.loss_type))(
        LossInputs(
            log_probs=log_probs,
            ratio=ratio,
            advantages=advantages,
            old_log_probs=old,
            rollout_log_probs=rollout,
            mask=mask,
            low=1 - settings.eps_clip,
            high=1 + settings.upper_clip,
        )
    )
    surrogate = surrogate.where(trained, 0)  # a loss of the user may give anything there
    if settings.use_tis:
        tis = tis_weights(old, rollout, settings.tis_clip)
        surrogate = surrogate * tis
    # Sums over tokens need no masking from here on: the weights are 0 off the mask.
    totals = {"pg_loss": -(weights * surrogate).sum()}
    loss = totals["pg_loss"]
    ref = None if ref_log_probs is None else ref_log_probs.where(trained, 0)
    if settings.kl_loss_weight != 0:
        assert ref is not None, "--use-kl-loss needs the reference log-probs"
        totals["kl_loss"] = (weights * kl_estimate(log_probs, ref, settings.kl_loss_type)).sum()
        loss = loss + settings.kl_loss_weight * totals["kl_loss"]
    if settings.entropy_coef != 0:
        loss = loss - settings.entropy_coef * (weights * entropy).sum()
    totals["loss"] = loss

    with torch.no_grad():
        gap = old - rollout
        metrics = {
            "ratio_mean": ratio,
            "approx_kl": kl_estimate(old, log_probs, "k3"),
            "clip_fraction": clipped_low | clipped_high,
            "clip_fraction_low": clipped_low,
            "clip_fraction_high": clipped_high,
            "entropy": entropy,
            "logprob_diff_mean": gap.abs(),
        }
        if settings.use_tis:
            metrics |= {"tis_weight_mean": tis, "tis_clip_fraction": gap > math.log(settings.tis_clip)}
        if ref is not None:
            metrics["kl_ref"] = kl_estimate(log_probs, ref, "k3")
        sums = {k: (v * trained).sum(dtype=torch.float64) for k, v in metrics.items()}
        sums |= {k: v.detach().double() for k, v in totals.items()}
        sums["logprob_diff_max"] = (gap.abs() * trained).amax().double()
        sums["tokens"] = trained.sum(dtype=torch.float64)
    return loss, sums
