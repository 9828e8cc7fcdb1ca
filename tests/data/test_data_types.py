"""The types that packages exchange: a manifest says of every sample what a rank may know, rows come one by one."""

import pickle
from typing import Any

import numpy as np
import pytest
from relax_data.types import BatchRows, Prompt, SampleGroup, SampleStatus, StepManifest, TrainBatch


def batch(n: int = 3) -> TrainBatch:
    return TrainBatch(
        rollout_id=7,
        tokens=[np.arange(5 + i) for i in range(n)],
        response_lengths=np.arange(2, 2 + n),
        loss_masks=[np.array([0.0] + [1.0] * (1 + i), np.float32) for i in range(n)],
        rollout_log_probs=[np.full(2 + i, -0.5, np.float32) for i in range(n)],
        rewards=np.arange(n, dtype=np.float32),
        group_ids=np.array([4, 4, 9][:n] + [11] * (n - 3)),
        oldest_versions=np.full(n, 6),
        names=[f"a.jsonl:{i} sample 0" for i in range(n)],
    )


def test_a_manifest_knows_lengths_and_counts_but_no_token() -> None:
    manifest = StepManifest.of(batch())
    assert len(manifest) == 3
    assert manifest.total_lengths.tolist() == [5, 6, 7]
    assert manifest.prompt_lengths.tolist() == [3, 3, 3]
    assert manifest.trained_tokens.tolist() == [1, 2, 3]
    part = manifest.select([2, 0])
    assert part.names == ["a.jsonl:2 sample 0", "a.jsonl:0 sample 0"]
    assert part.trained_tokens.tolist() == [3, 1]
    assert part.group_ids.tolist() == [9, 4]
    assert part.rollout_id == 7


def test_a_manifest_is_small() -> None:
    many = StepManifest.of(batch(256))
    assert len(pickle.dumps(many)) <= 100 * 256 + 1000


def test_rows_of_a_batch_come_in_the_order_asked_for() -> None:
    rows = BatchRows(batch()).fetch([2, 0], ["tokens", "loss_masks"])
    assert list(rows) == ["tokens", "loss_masks"]
    assert [len(t) for t in rows["tokens"]] == [7, 5]
    assert rows["loss_masks"][1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("loss_mask", [1]),
        ("loss_mask", None),
        ("loss_mask", [1, 2, 1]),
        ("log_probs", [-1.0] * 4),
        ("versions", []),
        ("tokens", [5, -6, 7]),
    ],
)
def test_columns_that_do_not_fit_together_make_no_batch(column: str, values: list[Any]) -> None:
    group = SampleGroup.start(Prompt(prompt_id=0, epoch=0, source="a.jsonl:1", text="", input_ids=[4]), 1)
    sample = group.samples[0]
    sample.append([5, 6, 7], [-1.0] * 3, 0, loss_mask=[1, 0, 1])
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    assert TrainBatch.from_groups([group], 0).tokens[0].tolist() == [4, 5, 6, 7]
    setattr(sample, column, values)
    with pytest.raises(ValueError, match=rf"a\.jsonl:1 response 0: .*\b{column}\b"):
        TrainBatch.from_groups([group], 0)
