"""Samples to micro-batches: caps, alignment, padding, context-parallel parts."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_data.types import TrainBatch
from relax_train.batching import Split, build_micro_batch, optimizer_steps, plan_micro_batches, split_responses
from relax_train.models.context_parallel import zigzag_positions
from relax_train.settings.batch import BatchSettings


def make_batch(shapes: list[tuple[int, int]]) -> TrainBatch:
    """Samples of (prompt, response) lengths whose tokens are all different."""
    rng = np.random.default_rng(0)
    starts = np.cumsum([0, *(p + r for p, r in shapes)])
    return TrainBatch(
        rollout_id=3,
        tokens=[np.arange(a, a + p + r) + 1000 for a, (p, r) in zip(starts, shapes, strict=False)],
        response_lengths=np.array([r for _, r in shapes]),
        loss_masks=[np.ones(r, np.float32) for _, r in shapes],
        rollout_log_probs=[rng.normal(size=r).astype(np.float32) for _, r in shapes],
        rewards=rng.random(len(shapes)).astype(np.float32),
        group_ids=np.arange(len(shapes)) // 2,
        oldest_versions=np.zeros(len(shapes), np.int64),
        names=[f"row:{i}" for i in range(len(shapes))],
    )


SPLITS = st.builds(
    Split, dp_size=st.integers(1, 4), cp_size=st.sampled_from([1, 2, 3, 4]), sequence_size=st.sampled_from([1, 2, 4])
)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=30),
    split=SPLITS,
    cap=st.integers(100, 200),
    balance=st.booleans(),
)
def test_no_micro_batch_exceeds_its_cap_and_every_sample_is_in_one(
    shapes: list[tuple[int, int]], split: Split, cap: int, balance: bool
) -> None:
    batch = make_batch(shapes)
    config = BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_data=balance)
    plan = plan_micro_batches(batch, config, split)
    assert len(plan) == split.dp_size
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for row in rank for i in row) == list(range(len(batch)))
    for indices in (row for rank in plan for row in rank):
        parts = [
            build_micro_batch(batch, indices, Split(**{**vars(split), "cp_rank": r})) for r in range(split.cp_size)
        ]
        for r, part in enumerate(parts):
            held = zigzag_positions(part.cu_seqlens, split.cp_size, r)
            np.testing.assert_array_equal(part.documents, np.searchsorted(part.cu_seqlens, held, side="right") - 1)
            assert len(part.tokens) <= cap  # padding included, on every GPU
            assert len(part.tokens) == len(parts[0].tokens)
            assert len(part.tokens) % split.sequence_size == 0
        assert (np.diff(parts[0].cu_seqlens) % split.document_multiple == 0).all()
        assert parts[0].cu_seqlens[-1] == sum(len(p.tokens) for p in parts)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize(("n", "size", "dp"), [(8, 1, 2), (7, 3, 2), (1, 2, 4), (16, 4, 1)])
def test_static_micro_batches(n: int, size: int, dp: int, balance: bool) -> None:
    batch = make_batch([(2, 1 + 5 * i) for i in range(n)])
    config = BatchSettings(micro_batch_size=size, balance_data=balance)
    plan = plan_micro_batches(batch, config, Split(dp_size=dp))
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for row in rank for i in row) == list(range(n))
    assert all(len(row) <= size for rank in plan for row in rank)
    counts = [sum(len(row) for row in rank) for rank in plan]
    assert max(counts) - min(counts) <= 1


def test_balancing_evens_out_steps_and_ranks() -> None:
    # In order, the first step and the first rank would get the short ones.
    batch = make_batch([(1, 1 + 10 * i) for i in range(16)])
    config = BatchSettings(num_steps_per_rollout=2, balance_data=True)
    steps = optimizer_steps(batch, config)
    assert [len(s) for s in steps] == [8, 8]
    tokens = [batch.total_lengths[s].sum() for s in steps]
    assert max(tokens) - min(tokens) <= 20
    plan = plan_micro_batches(batch, config, Split(dp_size=4))
    loads = [sum(batch.total_lengths[i] for row in rank for i in row) for rank in plan]
    assert max(loads) - min(loads) <= 20


def test_values_lie_where_their_token_is_predicted() -> None:
    batch = make_batch([(3, 2), (2, 4), (1, 1)])
    values = [np.arange(r, dtype=np.float64) + 10 * i for i, r in enumerate([2, 4, 1])]
    row = build_micro_batch(batch, [1, 0], Split(sequence_size=4), {"v": values})
    np.testing.assert_array_equal(row.cu_seqlens, [0, 6, 12])  # 6 + 5, and 1 for the multiple of 4
    np.testing.assert_array_equal(row.position_ids, [*range(6), *range(6)])
    np.testing.assert_array_equal(row.tokens[:11], np.concatenate([batch.tokens[1], batch.tokens[0]]))
    for at, target in enumerate(row.targets):
        if target < 0:
            assert row.columns["v"][at] == 0
            continue
        sample, j = (0, target) if target < 2 else (1, target - 2)
        response = batch.tokens[sample][-batch.response_lengths[sample] :]
        assert row.labels[at] == response[j]
        assert row.columns["v"][at] == values[sample][j]
    assert sorted(row.targets[row.targets >= 0]) == [0, 1, 2, 3, 4, 5]
    assert row.max_seqlen == 6
    assert row.indices == (1, 0)


def test_context_parallel_parts_make_up_the_row() -> None:
    batch = make_batch([(3, 6), (5, 2)])
    values = {"v": [np.arange(6.0), np.arange(2.0) + 6]}
    whole = build_micro_batch(batch, [0, 1], Split(), values)
    parts = [build_micro_batch(batch, [0, 1], Split(cp_size=2, cp_rank=r), values) for r in range(2)]
    np.testing.assert_array_equal(parts[0].cu_seqlens, [0, 12, 20])
    # Rank r holds chunks r and 3 - r of each document.
    np.testing.assert_array_equal(parts[0].position_ids, [0, 1, 2, 9, 10, 11, 0, 1, 6, 7])
    np.testing.assert_array_equal(parts[1].position_ids, [3, 4, 5, 6, 7, 8, 2, 3, 4, 5])
    for name in ("labels", "tokens"):
        found = {s: v for p in parts for s, v in zip(p.targets, getattr(p, name), strict=True) if s >= 0}
        expected = {s: v for s, v in zip(whole.targets, getattr(whole, name), strict=True) if s >= 0}
        assert found == expected
    assert sorted(s for p in parts for s in p.targets if s >= 0) == list(range(8))


def test_zigzag_gives_each_rank_an_early_and_a_late_piece_of_every_document() -> None:
    cu = [0, 12, 20]
    assert zigzag_positions(cu, 1, 0).tolist() == list(range(20))
    assert zigzag_positions(cu, 2, 0).tolist() == [0, 1, 2, 9, 10, 11, 12, 13, 18, 19]
    assert zigzag_positions(np.array(cu), 2, 1).tolist() == [3, 4, 5, 6, 7, 8, 14, 15, 16, 17]


def test_a_row_without_samples_trains_nothing() -> None:
    split = Split(cp_size=2, cp_rank=1, sequence_size=2)
    row = build_micro_batch(make_batch([(2, 2)]), [], split, {"v": [np.ones(2)]})
    assert len(row.tokens) == 2
    assert (row.targets == -1).all()
    assert not row.columns["v"].any()


def test_responses_come_back_in_order() -> None:
    batch = make_batch([(3, 2), (2, 4), (1, 1)])
    pieces = split_responses(np.arange(7), batch)
    assert [p.tolist() for p in pieces] == [[0, 1], [2, 3, 4, 5], [6]]


def test_a_sample_beyond_the_cap_is_named_with_the_arithmetic() -> None:
    batch = make_batch([(3, 2), (5, 60)])
    config = BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=32)
    with pytest.raises(ValueError, match=r"row:1 has 65 tokens \(padded 68\).*--max-tokens-per-gpu 32 x --context-par"):
        plan_micro_batches(batch, config, Split(cp_size=2))
    config = BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=100, log_probs_max_tokens_per_gpu=20)
    plan_micro_batches(batch, config, Split())
    with pytest.raises(ValueError, match=r"row:1 .*--log-probs-max-tokens-per-gpu 20"):
        plan_micro_batches(batch, config, Split(), forward_only=True)
    config = BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=1)
    with pytest.raises(ValueError, match="--max-tokens-per-gpu 1 is less than the 16 tokens"):
        plan_micro_batches(batch, config, Split(cp_size=2, sequence_size=8))


def test_a_sample_without_prompt_is_named() -> None:
    with pytest.raises(ValueError, match="row:0 has an empty prompt"):
        plan_micro_batches(make_batch([(0, 3)]), BatchSettings(), Split())


@pytest.mark.parametrize(
    ("flags", "n", "expected"),
    [
        ({}, 6, [[0, 1, 2, 3, 4, 5]]),
        ({"global_batch_size": 2}, 6, [[0, 1], [2, 3], [4, 5]]),
        ({"num_steps_per_rollout": 2}, 6, [[0, 1, 2], [3, 4, 5]]),
        ({"num_steps_per_rollout": 2, "global_batch_size": 3}, 6, [[0, 1, 2], [3, 4, 5]]),
        # The last rollout of an epoch has fewer samples: each is trained once all the same.
        ({"num_steps_per_rollout": 2, "global_batch_size": 3}, 5, [[0, 1, 2], [3, 4]]),
        ({"num_steps_per_rollout": 2, "global_batch_size": 3}, 2, [[0, 1]]),
        ({"num_steps_per_rollout": 1, "global_batch_size": 6}, 4, [[0, 1, 2, 3]]),
        ({"global_batch_size": 4}, 6, [[0, 1, 2, 3], [4, 5]]),
        ({"num_steps_per_rollout": 4}, 6, [[0], [1, 2], [3], [4, 5]]),
        ({"num_steps_per_rollout": 4}, 2, [[0], [1]]),
    ],
)
def test_steps_of_a_rollout(flags: dict[str, Any], n: int, expected: list[list[int]]) -> None:
    assert optimizer_steps(make_batch([(1, 1)] * n), BatchSettings(**flags)) == expected


@pytest.mark.parametrize("n", range(1, 13))
def test_balanced_steps_of_a_short_rollout_hold_every_sample_and_no_step_is_too_large(n: int) -> None:
    config = BatchSettings(num_steps_per_rollout=3, global_batch_size=4, balance_data=True)
    steps = optimizer_steps(make_batch([(1, 1 + i % 5) for i in range(n)]), config)
    assert sorted(i for step in steps for i in step) == list(range(n))
    assert len(steps) == -(-n // 4)
    assert max(map(len, steps)) <= 4


def test_more_samples_than_a_rollout_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 x --global-batch-size 2 = 4 samples.*has 6"):
        optimizer_steps(make_batch([(1, 1)] * 6), BatchSettings(num_steps_per_rollout=2, global_batch_size=2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"global_batch_size": 4}, r"rollout of 6 samples .* is 1 x --global-batch-size 4 \+ 2"),
        ({"num_steps_per_rollout": 4}, "6 samples .* --num-steps-per-rollout 4 equal steps: 2 samples are left over"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 2}, "2 x --global-batch-size 2 = 4 samples.*has 6"),
    ],
)
def test_whole_rollouts_that_do_not_divide_show_the_arithmetic(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSettings(**flags).samples_per_step(6)
