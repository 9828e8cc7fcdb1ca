"""Every estimator by hand, its properties on random rollouts, and over ranks that hold parts of the samples."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relax_train.algorithms import estimators
from relax_train.algorithms.advantages import compute_advantages
from relax_train.algorithms.estimators import AdvantageInputs
from relax_train.algorithms.registry import ADVANTAGES
from relax_train.settings.algorithm import AlgorithmSettings

RESPONSES = [3, 1, 2, 4]


def inputs_of(
    rewards: list[float],
    groups: list[int],
    masks: list[list[int]],
    kl: list[list[float]] | None = None,
    **settings: Any,
) -> AdvantageInputs:
    columns = [np.array(m, np.float32) for m in masks]
    return AdvantageInputs(
        rewards=np.array(rewards, np.float64),
        group_ids=np.array(groups),
        trained_tokens=np.array([m.sum() for m in columns], np.float64),
        own=np.arange(len(rewards)),
        masks=columns,
        kl=None if kl is None else [np.array(k, np.float64) for k in kl],
        settings=AlgorithmSettings(**settings),
    )


MASKS = [[1, 0, 1], [1], [1, 1], [0, 1, 1, 0]]
KL = [[0.5, 9.0, -0.25], [1.0], [0.0, 0.5], [7.0, 0.25, 0.25, -8.0]]


def random_inputs(seed: int, **settings: Any) -> AdvantageInputs:
    """5 groups of 1 to 6 samples, mixed up, with masks and divergences."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat([3, 14, 15, 92, 65], rng.integers(1, 7, 5)))
    lengths = rng.integers(1, 9, len(groups))
    return inputs_of(
        list(rng.normal(size=len(groups))),
        list(groups),
        [list((rng.random(n) > 0.3).astype(int)) for n in lengths],
        [list(rng.normal(size=n)) for n in lengths] if settings.get("kl_coef") else None,
        **settings,
    )


def equal(found: list[np.ndarray], expected: list[list[float]], atol: float = 1e-12) -> None:
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# ---------------------------------------------------------------------- by hand


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_grpo_and_gspo_by_hand(name: str) -> None:
    # Group 0: rewards 1, 0, 1 with mean 2/3 and variance (1/9 + 4/9 + 1/9) / 2 = 1/3. Group 1: alone.
    found = ADVANTAGES[name](inputs_of([1.0, 0.0, 5.0, 1.0], [0, 0, 1, 0], MASKS))
    std = (1 / 3) ** 0.5 + 1e-6
    up, down = (1 / 3) / std, (-2 / 3) / std
    equal(found, [[up] * 3, [down], [0.0, 0.0], [up] * 4])


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_without_the_deviation_by_hand(name: str) -> None:
    found = ADVANTAGES[name](inputs_of([1.0, 0.0, 5.0, 1.0], [0, 0, 1, 0], MASKS, disable_grpo_std_normalization=True))
    equal(found, [[1 / 3] * 3, [-2 / 3], [0.0, 0.0], [1 / 3] * 4])


def test_rloo_by_hand() -> None:
    # 1 - (0 + 4) / 2, 0 - (1 + 4) / 2, 4 - (1 + 0) / 2; alone: nothing to leave out.
    found = estimators.rloo(inputs_of([1.0, 0.0, 5.0, 4.0], [0, 0, 1, 0], MASKS))
    equal(found, [[-1.0] * 3, [-2.5], [0.0, 0.0], [3.5] * 4])


def test_rloo_takes_the_divergence_of_the_whole_response_from_the_reward() -> None:
    # Masked sums of KL: 0.25, 1, 0.5, 0.5; times 2: rewards 0.5, -2, 4, 3.
    found = estimators.rloo(inputs_of([1.0, 0.0, 5.0, 4.0], [0, 0, 1, 0], MASKS, KL, kl_coef=2.0))
    equal(found, [[0.5 - 0.5] * 3, [-2 - 1.75], [0.0, 0.0], [3 + 0.75] * 4])


def test_reinforce_plus_plus_by_hand() -> None:
    # Divergence still to come, of trained tokens: (0.25, -0.25, -0.25), (1), (0.5, 0.5), (0.5, 0.5, 0.25, 0).
    found = estimators.reinforce_plus_plus(inputs_of([1.0, 0.0, 5.0, 4.0], [0, 0, 1, 0], MASKS, KL, kl_coef=2.0))
    raw = [[0.5, 1.5, 1.5], [-2.0], [4.0, 4.0], [3.0, 3.0, 3.5, 4.0]]
    trained = np.array([0.5, 1.5, -2.0, 4.0, 4.0, 3.0, 3.5])  # masks: 1 0 1, 1, 1 1, 0 1 1 0
    mean = 14.5 / 7
    std = (sum((x - mean) ** 2 for x in trained) / 7) ** 0.5 + 1e-6
    equal(found, [[(x - mean) / std for x in row] for row in raw])


def test_reinforce_plus_plus_needs_no_groups() -> None:
    rewards = [1.0, 0.0, 5.0, 4.0]
    first = estimators.reinforce_plus_plus(inputs_of(rewards, [0, 0, 1, 0], MASKS))
    equal(first, [list(a) for a in estimators.reinforce_plus_plus(inputs_of(rewards, [0, 1, 2, 3], MASKS))])


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Group 0: 1, 0, 5 with mean 2; the sample alone is its own mean. Tokens: 2, 1, 2, 2.
    found = estimators.reinforce_plus_plus_baseline(inputs_of([1.0, 0.0, 7.0, 5.0], [0, 0, 1, 0], MASKS))
    raw = [-1.0, -2.0, 0.0, 3.0]
    mean = (2 * -1 - 2 + 0 + 2 * 3) / 7
    std = ((2 * (-1 - mean) ** 2 + (-2 - mean) ** 2 + 2 * mean**2 + 2 * (3 - mean) ** 2) / 7) ** 0.5 + 1e-6
    equal(found, [[(x - mean) / std] * n for x, n in zip(raw, RESPONSES, strict=True)])


def test_the_baseline_form_takes_the_divergence_to_come_from_the_centred_reward() -> None:
    inputs = inputs_of([1.0, 0.0, 7.0, 5.0], [0, 0, 1, 0], MASKS, KL, kl_coef=2.0)
    raw = [[-1.5, -0.5, -0.5], [-4.0], [-1.0, -1.0], [2.0, 2.0, 2.5, 3.0]]
    trained = [-1.5, -0.5, -4.0, -1.0, -1.0, 2.0, 2.5]
    mean, std = float(np.mean(trained)), float(np.std(trained)) + 1e-6
    equal(estimators.reinforce_plus_plus_baseline(inputs), [[(x - mean) / std for x in row] for row in raw])


# ---------------------------------------------------------------------- properties


def members_of(inputs: AdvantageInputs) -> list[np.ndarray]:
    return [np.flatnonzero(inputs.group_ids == g) for g in np.unique(inputs.group_ids)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo"])
def test_the_advantages_of_a_group_add_up_to_nothing(name: str, seed: int) -> None:
    inputs = random_inputs(seed)
    per_sample = np.array([a[0] for a in ADVANTAGES[name](inputs)])
    assert np.abs(per_sample).max() > 0.1
    for members in members_of(inputs):
        assert per_sample[members].sum() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_rloo_is_the_centred_reward_times_n_over_n_minus_1(seed: int) -> None:
    inputs = random_inputs(seed)
    per_sample = np.array([a[0] for a in estimators.rloo(inputs)])
    for members in members_of(inputs):
        n, r = len(members), inputs.rewards[members]
        expected = n / (n - 1) * (r - r.mean()) if n > 1 else np.zeros(1)
        np.testing.assert_allclose(per_sample[members], expected, atol=1e-12)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", [n for n, e in ADVANTAGES.items() if e.whitens])
def test_normalised_advantages_have_mean_0_and_deviation_1_over_trained_tokens(name: str, kl_coef: float) -> None:
    inputs = random_inputs(2, kl_coef=kl_coef)
    found = ADVANTAGES[name](inputs)
    tokens = np.concatenate([a[m > 0] for a, m in zip(found, inputs.masks, strict=True)])
    assert tokens.mean() == pytest.approx(0, abs=1e-12)
    assert tokens.std() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_teach_nothing(name: str) -> None:
    found = ADVANTAGES[name](inputs_of([0.1] * 4, [0, 0, 1, 0], MASKS))
    assert all(np.abs(a).max() < 1e-9 for a in found)
    if not ADVANTAGES[name].whitens:
        assert all((a == 0).all() for a in found)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_that_differ_by_rounding_teach_nothing(name: str, size: float) -> None:
    above = float(np.nextafter(np.float32(size), np.float32(np.inf)))
    found = ADVANTAGES[name](inputs_of([size, above, size, above], [0, 0, 0, 0], MASKS))
    assert all((a == 0).all() for a in found)
    found = ADVANTAGES[name](inputs_of([size, size * 1.00001, size, size], [0, 0, 0, 0], MASKS))
    assert found[1][0] > 0


@pytest.mark.parametrize("name", [n for n, e in ADVANTAGES.items() if e.compares_group])
def test_those_that_compare_give_0_to_a_response_that_is_alone(name: str) -> None:
    found = ADVANTAGES[name](inputs_of([0.0, 1.0, 5.0, 4.0], [0, 1, 2, 3], MASKS))
    assert all((a == 0).all() for a in found)


def test_the_others_do_not() -> None:
    for name, estimator in ADVANTAGES.items():
        if not estimator.compares_group:
            found = estimator(inputs_of([0.0, 1.0, 5.0, 4.0], [0, 1, 2, 3], MASKS))
            assert all((a != 0).all() for a in found), name


@pytest.mark.parametrize("name", [n for n, e in ADVANTAGES.items() if not e.divides_by_std])
def test_the_facts_of_the_table_are_true_of_the_switch(name: str) -> None:
    on, off = (random_inputs(0, disable_grpo_std_normalization=switch) for switch in (True, False))
    equal(ADVANTAGES[name](on), [list(a) for a in ADVANTAGES[name](off)])


# ---------------------------------------------------------------------- over ranks


def over_ranks(whole: AdvantageInputs, deal: list[list[int]], call: Callable[[AdvantageInputs], Any]) -> list[Any]:
    """What ``call`` gives on ranks that hold the samples of ``deal``: threads whose sums wait for each other."""
    barrier = threading.Barrier(len(deal), timeout=30)
    parts: list[Any] = [None] * len(deal)
    results: list[Any] = [None] * len(deal)

    def rank(r: int) -> None:
        def all_reduce(values: np.ndarray) -> np.ndarray:
            parts[r] = values
            barrier.wait()
            total: np.ndarray = np.sum(parts, axis=0)
            barrier.wait()
            return total

        results[r] = call(
            AdvantageInputs(
                rewards=whole.rewards,
                group_ids=whole.group_ids,
                trained_tokens=whole.trained_tokens,
                own=np.array(deal[r], np.int64),
                masks=[whole.masks[i] for i in deal[r]],
                kl=None if whole.kl is None else [whole.kl[i] for i in deal[r]],
                settings=whole.settings,
                all_reduce=all_reduce,
            )
        )

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(deal))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_ranks_with_a_part_of_the_samples_get_the_same_advantages(name: str, normalize: bool) -> None:
    normalize = normalize and not ADVANTAGES[name].whitens
    whole = random_inputs(4, kl_coef=0.2, advantage_estimator=name, normalize_advantages=normalize)
    n = len(whole.rewards)
    expected = compute_advantages(whole)
    for deal in ([list(range(0, n, 2)), list(range(1, n, 2))], [list(range(n)), [], []]):
        for own, found in zip(deal, over_ranks(whole, deal, compute_advantages), strict=True):
            equal(found, [list(expected[i]) for i in own])
