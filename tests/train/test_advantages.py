"""GRPO advantages, whitening and KL in the reward against the formulas written out."""

from typing import Any

import numpy as np
import pytest
from relax_data.types import StepManifest, TrainBatch
from relax_train.algorithms.advantages import advantage_inputs, compute_advantages
from relax_train.algorithms.estimators import group_normalized, whitened
from relax_train.settings.algorithm import AlgorithmSettings


def batch_of(rewards: list[float], groups: list[int], masks: list[list[int]]) -> TrainBatch:
    n = len(rewards)
    return TrainBatch(
        rollout_id=0,
        tokens=[np.arange(2 + len(m)) for m in masks],
        response_lengths=np.array([len(m) for m in masks]),
        loss_masks=[np.array(m, dtype=np.float32) for m in masks],
        rollout_log_probs=[np.zeros(len(m), np.float32) for m in masks],
        rewards=np.array(rewards, dtype=np.float32),
        group_ids=np.array(groups),
        oldest_versions=np.zeros(n, np.int64),
        names=[f"row:{i}" for i in range(n)],
    )


def test_each_group_is_normalised_by_its_own_mean_and_unbiased_deviation() -> None:
    rewards, groups = [1.0, 10.0, 0.0, 30.0, 0.0], [7, 3, 7, 3, 7]
    got = group_normalized(rewards, groups)
    expected = np.zeros(5)
    for members in ([0, 2, 4], [1, 3]):
        r = [rewards[i] for i in members]
        mean = sum(r) / len(r)
        std = (sum((x - mean) ** 2 for x in r) / (len(r) - 1)) ** 0.5
        for i in members:
            expected[i] = (rewards[i] - mean) / (std + 1e-6)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_without_std_the_advantage_is_the_distance_from_the_mean() -> None:
    got = group_normalized([1.0, 0.0, 0.0, 5.0, 7.0], [0, 0, 0, 1, 1], divide_by_std=False)
    np.testing.assert_allclose(got, [2 / 3, -1 / 3, -1 / 3, -1, 1])


def test_equal_rewards_train_nothing_also_when_their_mean_is_not_exact() -> None:
    assert (group_normalized(np.full(7, np.float32(0.1)), np.zeros(7)) == 0).all()


@pytest.mark.parametrize("divide", [False, True])
def test_a_group_of_one_has_nothing_to_compare_with(divide: bool) -> None:
    got = group_normalized([0.5, 2.0, 4.0], [0, 1, 1], divide_by_std=divide)
    assert got[0] == 0
    assert got[1] == -got[2] != 0


def advantages_of(batch: TrainBatch, settings: AlgorithmSettings, **log_probs: Any) -> list[np.ndarray]:
    """Of a rank that holds every sample."""
    inputs = advantage_inputs(
        StepManifest.of(batch), settings, own=range(len(batch)), masks=batch.loss_masks, **log_probs
    )
    return compute_advantages(inputs)


def test_whitening_weights_samples_by_their_trained_tokens() -> None:
    values, counts = np.array([1.0, -1.0, 3.0]), [4, 2, 0]
    per_token = np.repeat(values, counts)
    masks = [np.array(m, np.float32) for m in ([1, 1, 0, 1, 1], [1, 0, 1], [0])]
    got = whitened([np.full(len(m), a) for a, m in zip(values, masks, strict=True)], masks)
    expected = (values - per_token.mean()) / (per_token.std() + 1e-6)
    for column, mask, value in zip(got, masks, expected, strict=True):
        np.testing.assert_allclose(column, np.full(len(mask), value))
    white = np.concatenate([a[m > 0] for a, m in zip(got, masks, strict=True)])
    assert white.mean() == pytest.approx(0, abs=1e-12)
    assert white.std() == pytest.approx(1, abs=1e-5)


def test_whitening_without_a_trained_token_changes_nothing() -> None:
    got = whitened([np.array([1.0]), np.array([2.0, 3.0])], [np.zeros(1), np.zeros(2)])
    np.testing.assert_array_equal(np.concatenate(got), [1.0, 2.0, 3.0])


def test_kl_in_the_reward_counts_trained_tokens_only() -> None:
    batch = batch_of([1.0, 0.0], [0, 0], [[1, 0, 1], [1]])
    inputs = advantage_inputs(
        StepManifest.of(batch),
        AlgorithmSettings(kl_coef=0.1),
        own=[0, 1],
        masks=batch.loss_masks,
        old_log_probs=[np.array([-1.0, -5.0, -2.0]), np.array([-0.5])],
        ref_log_probs=[np.array([-1.5, -1.0, -2.5]), np.array([-0.25])],
    )
    np.testing.assert_allclose(inputs.rewards_minus_kl(), [1.0 - 0.1 * 1.0, 0.0 + 0.1 * 0.25])


def test_compute_advantages_follows_the_settings() -> None:
    batch = batch_of([1.0, 0.0, 2.0, 2.0], [0, 0, 1, 1], [[1, 1], [1], [1], [1, 1, 1]])
    zeros = [np.zeros(len(m)) for m in batch.loss_masks]
    ref = [np.full(len(m), -0.5) for m in batch.loss_masks]

    def firsts(settings: AlgorithmSettings, **log_probs: Any) -> list[float]:
        found = advantages_of(batch, settings, **log_probs)
        assert [len(a) for a in found] == [2, 1, 1, 3]
        assert all((a == a[0]).all() for a in found)
        return [a[0] for a in found]

    plain = firsts(AlgorithmSettings())
    np.testing.assert_array_equal(plain, group_normalized(batch.rewards, batch.group_ids))
    dr = firsts(AlgorithmSettings(disable_grpo_std_normalization=True))
    np.testing.assert_allclose(dr, [0.5, -0.5, 0, 0])
    tokens = np.repeat(plain, [2, 1, 1, 3])
    white = firsts(AlgorithmSettings(normalize_advantages=True))
    np.testing.assert_allclose(white, (np.array(plain) - tokens.mean()) / (tokens.std() + 1e-6), atol=1e-15)
    shaped = firsts(
        AlgorithmSettings(kl_coef=1.0, disable_grpo_std_normalization=True), old_log_probs=zeros, ref_log_probs=ref
    )
    np.testing.assert_allclose(shaped, [0.25, -0.25, 0.5, -0.5])  # rewards 0, -0.5, 1.5, 0.5


def test_a_reward_that_is_no_number_names_its_sample() -> None:
    with pytest.raises(ValueError, match="row:1: its reward is nan"):
        advantages_of(batch_of([1.0, float("nan")], [0, 0], [[1], [1]]), AlgorithmSettings())
