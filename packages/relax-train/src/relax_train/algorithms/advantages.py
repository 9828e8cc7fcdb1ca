"""Advantages of the samples of a rollout: host arithmetic in float64, the same on every rank."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from relax_data.types import TrainBatch

from relax_train.settings.algorithm import AlgorithmSettings

STD_FLOOR = 1e-6
"""Added to standard deviations, so that nearly equal rewards do not give huge advantages."""


def group_normalized(rewards: ArrayLike, group_ids: ArrayLike, *, divide_by_std: bool = True) -> NDArray[np.float64]:
    """GRPO: reward of each sample relative to its group.

    DeepSeekMath (arXiv:2402.03300) section 4.1.2, outcome supervision: ``A_i = (r_i - mean(r)) / std(r)`` over the
    responses to one prompt. Without the division: Dr. GRPO (arXiv:2503.20783) section 3.2. The standard deviation is
    the unbiased one (n - 1), plus :data:`STD_FLOOR`.

    A group of one sample has nothing to be compared with: its advantage is 0, as is, exactly, that of every sample of a
    group of equal rewards.

    Args:
        rewards: ``[n]``.
        group_ids: ``[n]``, equal within a group; groups need not be contiguous.
        divide_by_std: divide by the group's standard deviation.

    Returns:
        float64 ``[n]``.
    """
    values = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(group_ids)
    result = np.empty_like(values)
    for group in np.unique(ids):
        members = np.flatnonzero(ids == group)
        r = values[members]
        if r.max() == r.min():
            result[members] = 0.0
        else:
            centred = r - r.mean()
            result[members] = centred / (r.std(ddof=1) + STD_FLOOR) if divide_by_std else centred
    return result


def whitened(advantages: ArrayLike, token_counts: ArrayLike) -> NDArray[np.float64]:
    """Advantages with mean 0 and variance 1 over all trained tokens of the rollout.

    Args:
        advantages: ``[n]``, one a sample; each of its trained tokens has it.
        token_counts: ``[n]`` trained tokens of each sample: the weights of mean and variance.

    Returns:
        float64 ``[n]``; the input when no token is trained.
    """
    values = np.asarray(advantages, dtype=np.float64)
    counts = np.asarray(token_counts, dtype=np.float64)
    if counts.sum() == 0:
        return values
    mean = np.average(values, weights=counts)
    std = np.sqrt(np.average((values - mean) ** 2, weights=counts))
    return (values - mean) / (std + STD_FLOOR)


def rewards_minus_kl(
    batch: TrainBatch, old_log_probs: list[np.ndarray], ref_log_probs: list[np.ndarray], kl_coef: float
) -> NDArray[np.float64]:
    """``r_i - kl_coef * sum_t mask_t (log pi_old(t) - log pi_ref(t))``: InstructGPT (arXiv:2203.02155) equation 2.

    Args:
        batch: rewards and loss masks.
        old_log_probs: per sample ``[response]``, of the policy before the first optimizer step.
        ref_log_probs: per sample ``[response]``, of the reference model.
        kl_coef: weight of the divergence (``--kl-coef``).

    Returns:
        float64 ``[n]``.
    """
    kl = [
        float(((old.astype(np.float64) - ref) * mask).sum())
        for old, ref, mask in zip(old_log_probs, ref_log_probs, batch.loss_masks, strict=True)
    ]
    return batch.rewards.astype(np.float64) - kl_coef * np.array(kl)


def compute_advantages(
    batch: TrainBatch,
    settings: AlgorithmSettings,
    *,
    old_log_probs: list[np.ndarray] | None = None,
    ref_log_probs: list[np.ndarray] | None = None,
) -> NDArray[np.float64]:
    """Advantage of each sample of ``batch``; all its tokens share it.

    Args:
        batch: the whole rollout, so that groups are complete.
        settings: estimator and its switches.
        old_log_probs: needed when ``settings.kl_coef`` is not 0.
        ref_log_probs: needed when ``settings.kl_coef`` is not 0.

    Returns:
        float64 ``[n]``.

    Raises:
        ValueError: a reward is not finite; the message names the sample.
    """
    check_rewards(batch.names, batch.rewards)
    rewards = batch.rewards.astype(np.float64)
    if settings.kl_coef != 0:
        assert old_log_probs is not None, "--kl-coef needs the log-probs of the policy"
        assert ref_log_probs is not None, "--kl-coef needs the log-probs of the reference"
        rewards = rewards_minus_kl(batch, old_log_probs, ref_log_probs, settings.kl_coef)
    advantages = group_normalized(rewards, batch.group_ids, divide_by_std=not settings.disable_grpo_std_normalization)
    if settings.normalize_advantages:
        advantages = whitened(advantages, [mask.sum() for mask in batch.loss_masks])
    return advantages


def check_rewards(names: Sequence[str], rewards: np.ndarray) -> None:
    """Raises where a reward is not finite; the message names the sample."""
    for name, reward in zip(names, rewards, strict=True):
        if not np.isfinite(reward):
            raise ValueError(f"{name}: its reward is {reward}; the reward function must return a finite number")
