"""Packing and balance: nothing lost, nothing above the cap, counts equal, loads even."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_data.packing.costs import CostModel
from relax_data.packing.pack import balance, lower_bound, pack, pack_static


def members(packed: list[list[list[int]]]) -> list[int]:
    return sorted(i for rank in packed for batch in rank for i in batch)


@given(
    lengths=st.lists(st.integers(1, 100), max_size=80),
    cap=st.integers(100, 400),
    dp=st.integers(1, 9),
    multiple=st.integers(1, 4),
    quadratic=st.booleans(),
    lock_step=st.booleans(),
)
def test_every_sample_once_under_the_cap_and_equal_counts(
    lengths: list[int], cap: int, dp: int, multiple: int, quadratic: bool, lock_step: bool
) -> None:
    cost = CostModel(linear=1.0, quadratic=0.02) if quadratic else None
    packed = pack(lengths, cap, dp_size=dp, multiple_of=multiple, cost=cost, lock_step=lock_step)
    assert len(packed) == dp
    assert members(packed) == list(range(len(lengths)))
    assert len({len(rank) for rank in packed}) == 1
    assert len(packed[0]) % multiple == 0
    batches = [batch for rank in packed for batch in rank]
    assert all(sum(lengths[i] for i in batch) <= cap for batch in batches)
    assert all(batch == sorted(batch) for batch in batches)
    if len(lengths) >= len(batches):
        assert all(batches)
    assert packed == pack(lengths, cap, dp_size=dp, multiple_of=multiple, cost=cost, lock_step=lock_step)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), cap=st.integers(100, 300))
def test_never_worse_than_first_fit(lengths: list[int], cap: int) -> None:
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, load in enumerate(bins) if load + length <= cap), None)
        if at is None:
            bins.append(length)
        else:
            bins[at] += length
    assert len(pack(lengths, cap)[0]) <= len(bins) + 1


def test_a_sample_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"sample 2 has 30 tokens and a micro-batch holds 20 \(and 1 more"):
        pack([5, 21, 30, 4], 20)
    with pytest.raises(ValueError, match="sample 1 has 0 tokens"):
        pack([5, 0], 20)
    with pytest.raises(ValueError, match="dp_size is 0"):
        pack([5], 20, dp_size=0)
    with pytest.raises(ValueError, match="cost has shape"):
        pack([5, 6], 20, cost=[1.0])
    with pytest.raises(ValueError, match="finite"):
        pack([5, 6], 20, cost=[1.0, float("nan")])


def test_no_samples_is_no_micro_batch() -> None:
    assert pack([], 10, dp_size=3, multiple_of=2) == [[], [], []]
    assert pack_static(0, 4, dp_size=2) == [[], []]
    assert balance([], 3) == [[], [], []]


def test_awkward_sizes_reach_the_bound() -> None:
    # Three of 0.34 never share a bin, two always do: the bound by tokens is out of reach.
    assert len(pack([34] * 40, 100)[0]) == 20
    assert len(pack([51] * 7, 100)[0]) == 7
    # A perfect fit that longest-first alone misses.
    assert len(pack([6, 5, 5, 4, 4, 4, 4, 4, 4], 20)[0]) == 2


def grouped_lengths(n: int, longest: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centre = np.repeat(rng.normal(np.log(longest / 8), 0.7, n // 16), 16)
    return np.clip(np.exp(centre + rng.normal(0, 0.5, n)), 32, longest).astype(int)


@pytest.mark.parametrize("dp", [1, 4, 8])
def test_quality_on_the_lengths_of_a_rollout(dp: int) -> None:
    lengths = grouped_lengths(512, 8192, 0)
    packed = pack(lengths, 8192, dp_size=dp)
    loads = np.array([[lengths[batch].sum() for batch in rank] for rank in packed])
    assert loads.size <= 1.01 * lower_bound(lengths, 8192, dp)
    rank = loads.sum(axis=1)
    assert rank.max() / rank.mean() - 1 <= 0.001
    assert loads.max(axis=0).sum() / loads.mean(axis=0).sum() - 1 <= 0.01


def test_many_tiny_samples_beside_a_giant_take_little_memory() -> None:
    """Nothing makes these ranks even, so that exchanges for two are tried too: the table of all would be gigabytes."""
    tracemalloc.start()
    try:
        packed = pack([30000] + [16] * 2000, 32768, dp_size=2, cost=lambda n: n + n**2 / 1e4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert members(packed) == list(range(2001))
    assert peak < 256e6


@pytest.mark.parametrize("seed", range(3))
def test_lock_step_comes_close_to_what_the_long_samples_allow(seed: int) -> None:
    """With the FLOPs cost the round of the longest sample waits for it, whatever is packed beside it."""
    cap, dp = 32768, 8
    lengths = grouped_lengths(512, cap, seed)
    costs = CostModel.from_shape(parameters=3.6e9, num_layers=36, num_attention_heads=32, head_dim=128)(lengths)
    # The other bins of that round cost at most what the longest samples of as many tokens do, cut where they end.
    longest_first = np.argsort(-lengths)
    filled = np.cumsum(lengths[longest_first])
    most = np.interp(dp * cap, filled, np.cumsum(costs[longest_first]))
    limit = (dp * costs.max() - most) / costs.sum()

    def losses(**how: bool) -> tuple[float, float]:
        packed = pack(lengths, cap, dp_size=dp, cost=costs, **how)
        loads = np.array([[costs[batch].sum() for batch in rank] for rank in packed])
        by_rank = loads.sum(axis=1)
        return loads.max(axis=0).sum() / loads.mean(axis=0).sum() - 1, by_rank.max() / by_rank.mean() - 1

    rounds, _ = losses(lock_step=True)
    assert max(limit, 0.0) - 1e-9 <= rounds <= max(limit, 0.0) + 0.01
    rounds_when_ranks_are_even, ranks = losses()
    assert ranks <= 0.001
    assert rounds <= rounds_when_ranks_are_even


def test_cost_model_is_the_flops_of_a_forward_pass() -> None:
    cost = CostModel.from_shape(parameters=100, num_layers=2, num_attention_heads=3, head_dim=4)
    # 2 * 100 a token; 2 layers * 12 wide * L^2 / 2 pairs * 4 operations.
    assert cost(np.array([10])).tolist() == [200 * 10 + 2 * 12 * 10**2 / 2 * 4]


@given(n=st.integers(0, 50), size=st.integers(1, 7), dp=st.integers(1, 5), multiple=st.integers(1, 3))
def test_static_micro_batches(n: int, size: int, dp: int, multiple: int) -> None:
    packed = pack_static(n, size, dp_size=dp, multiple_of=multiple)
    assert members(packed) == list(range(n))
    assert len({len(rank) for rank in packed}) == 1
    assert len(packed[0]) % multiple == 0
    assert all(len(batch) <= size for rank in packed for batch in rank)


def test_static_keeps_the_order() -> None:
    assert pack_static(8, 2, dp_size=2) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        pack_static(4, 0)


@given(costs=st.lists(st.floats(0, 1e6), max_size=70), ranks=st.integers(1, 9))
def test_balance_counts_differ_by_at_most_one(costs: list[float], ranks: int) -> None:
    dealt = balance(costs, ranks)
    assert len(dealt) == ranks
    assert sorted(i for r in dealt for i in r) == list(range(len(costs)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(data=st.data(), ranks=st.integers(1, 5))
def test_balance_keeps_groups_together(data: Any, ranks: int) -> None:
    groups = data.draw(st.lists(st.integers(-3, 6), max_size=40))
    dealt = balance([float(i % 7) for i in range(len(groups))], ranks, groups=groups)
    assert sorted(i for r in dealt for i in r) == list(range(len(groups)))
    of_rank = [{groups[i] for i in r} for r in dealt]
    assert sum(map(len, of_rank)) == len(set(groups))
    assert max(map(len, of_rank)) - min(map(len, of_rank)) <= 1


def test_balance_is_even_on_real_lengths() -> None:
    lengths = grouped_lengths(512, 8192, 3)
    loads = np.array([lengths[r].sum() for r in balance(lengths, 8)])
    assert loads.max() / loads.mean() - 1 <= 1e-4
    with pytest.raises(ValueError, match="groups has shape"):
        balance([1.0, 2.0], 2, groups=[1])


@pytest.mark.parametrize(
    "lengths", [[1.9] * 10, np.array([2.0]), [True, True], ["3"], [[1, 2], [2, 1]], [None], [float("nan")], [2**63]]
)
def test_lengths_that_are_no_integers_are_refused(lengths: Any) -> None:
    """Cut to integers, ten samples of 1.9 tokens would lie two by two under a cap of 2."""
    with pytest.raises(ValueError, match="lengths must be a list of integers"):
        pack(lengths, 2)


def test_sums_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="whose sum fits 64 bits"):
        pack([2**61] * 9, 2**62)
