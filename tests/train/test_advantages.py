"""GRPO advantages against the formulas written out."""

import numpy as np
import pytest
from relax_data.types import TrainBatch
from relax_train.algorithms.advantages import compute_advantages, group_normalized, rewards_minus_kl, whitened
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


def test_whitening_weights_samples_by_their_trained_tokens() -> None:
    advantages, counts = np.array([1.0, -1.0, 3.0]), [4, 2, 0]
    per_token = np.repeat(advantages, counts)
    got = whitened(advantages, counts)
    np.testing.assert_allclose(got, (advantages - per_token.mean()) / (per_token.std() + 1e-6))
    white = np.repeat(got, counts)
    assert white.mean() == pytest.approx(0, abs=1e-12)
    assert white.std() == pytest.approx(1, abs=1e-5)


def test_whitening_without_a_trained_token_changes_nothing() -> None:
    np.testing.assert_array_equal(whitened([1.0, 2.0], [0, 0]), [1.0, 2.0])


def test_kl_in_the_reward_counts_trained_tokens_only() -> None:
    batch = batch_of([1.0, 0.0], [0, 0], [[1, 0, 1], [1]])
    old = [np.array([-1.0, -5.0, -2.0]), np.array([-0.5])]
    ref = [np.array([-1.5, -1.0, -2.5]), np.array([-0.25])]
    np.testing.assert_allclose(rewards_minus_kl(batch, old, ref, 0.1), [1.0 - 0.1 * 1.0, 0.0 + 0.1 * 0.25])


def test_compute_advantages_follows_the_settings() -> None:
    batch = batch_of([1.0, 0.0, 2.0, 2.0], [0, 0, 1, 1], [[1, 1], [1], [1], [1, 1, 1]])
    zeros = [np.zeros(len(m)) for m in batch.loss_masks]
    ref = [np.full(len(m), -0.5) for m in batch.loss_masks]
    plain = compute_advantages(batch, AlgorithmSettings())
    np.testing.assert_allclose(plain, group_normalized(batch.rewards, batch.group_ids))
    dr = compute_advantages(batch, AlgorithmSettings(disable_grpo_std_normalization=True))
    np.testing.assert_allclose(dr, [0.5, -0.5, 0, 0])
    white = compute_advantages(batch, AlgorithmSettings(normalize_advantages=True))
    np.testing.assert_allclose(white, whitened(plain, [2, 1, 1, 3]))
    shaped = compute_advantages(
        batch,
        AlgorithmSettings(kl_coef=1.0, disable_grpo_std_normalization=True),
        old_log_probs=zeros,
        ref_log_probs=ref,
    )
    np.testing.assert_allclose(shaped, [0.25, -0.25, 0.5, -0.5])  # rewards 0, -0.5, 1.5, 0.5


def test_a_reward_that_is_no_number_names_its_sample() -> None:
    with pytest.raises(ValueError, match="row:1: its reward is nan"):
        compute_advantages(batch_of([1.0, float("nan")], [0, 0], [[1], [1]]), AlgorithmSettings())
