"""Advantages of the samples of a rollout: the chosen estimator, and what comes before and after it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from relax_data.types import StepManifest

from relax_train.algorithms.estimators import AdvantageInputs, AllReduce, alone, whitened
from relax_train.algorithms.registry import Estimator, load_estimator
from relax_train.settings.algorithm import AlgorithmSettings


def check_rewards(names: Sequence[str], rewards: np.ndarray) -> None:
    """Holds that every reward is a number.

    Raises:
        ValueError: one is not finite; the message names the sample.
    """
    for name, reward in zip(names, rewards, strict=True):
        if not np.isfinite(reward):
            raise ValueError(f"{name}: its reward is {reward}; the reward function must return a finite number")


def kl_of_tokens(old_log_probs: Sequence[np.ndarray], ref_log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``log pi_old - log pi_ref`` of each token: the estimate k1 of the divergence from the reference model.

    Args:
        old_log_probs: per sample ``[response]``, of the policy before the first optimizer step.
        ref_log_probs: per sample ``[response]``, of the reference model.

    Returns:
        per sample float64 ``[response]``.
    """
    return [old.astype(np.float64) - ref for old, ref in zip(old_log_probs, ref_log_probs, strict=True)]


def advantage_inputs(
    manifest: StepManifest,
    settings: AlgorithmSettings,
    *,
    own: Sequence[int] | NDArray[np.int64],
    masks: Sequence[np.ndarray],
    old_log_probs: Sequence[np.ndarray] | None = None,
    ref_log_probs: Sequence[np.ndarray] | None = None,
    all_reduce: AllReduce = alone,
) -> AdvantageInputs:
    """Gathers what an estimator is given on this rank.

    Args:
        manifest: all samples of the rollout, so that groups are complete.
        settings: estimator and its switches.
        own: which of the samples this rank holds.
        masks: ``[response]`` for each own sample.
        old_log_probs: ``[response]`` for each own sample; needed when ``settings.kl_coef`` is not 0.
        ref_log_probs: ``[response]`` for each own sample; needed when ``settings.kl_coef`` is not 0.
        all_reduce: sums an array over the ranks that hold the samples; the default is for a rank that holds all.

    Raises:
        ValueError: a reward is not finite; the message names the sample.
    """
    check_rewards(manifest.names, manifest.rewards)
    kl = None
    if settings.kl_coef != 0:
        assert old_log_probs is not None, "--kl-coef needs the log-probs of the policy"
        assert ref_log_probs is not None, "--kl-coef needs the log-probs of the reference"
        kl = kl_of_tokens(old_log_probs, ref_log_probs)
    return AdvantageInputs(
        rewards=manifest.rewards.astype(np.float64),
        group_ids=manifest.group_ids,
        trained_tokens=manifest.trained_tokens,
        own=np.asarray(own, dtype=np.int64),
        masks=masks,
        kl=kl,
        settings=settings,
        all_reduce=all_reduce,
    )


def compute_advantages(inputs: AdvantageInputs, estimator: Estimator | None = None) -> list[np.ndarray]:
    """Advantage of every response token of the samples of this rank.

    Args:
        inputs: rewards of the whole rollout, token columns of this rank's samples.
        estimator: from :func:`load_estimator`; default: the one that the settings name.

    Returns:
        float64 ``[response]`` for each own sample; normalised over all trained tokens of the rollout with
        ``--normalize-advantages``.

    Raises:
        ValueError: an estimator of the user returned something else; the message says what.
    """
    settings = inputs.settings
    advantages = (estimator or load_estimator(settings.advantage_estimator))(inputs)
    return whitened(advantages, inputs.masks, inputs.all_reduce) if settings.normalize_advantages else advantages
