"""A rank gets the rows of its own samples and of no other, and what it computes is the same."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.types import ROW_COLUMNS, BatchRows, StepManifest, TrainBatch
from relax_train import settings as s
from relax_train.rows import fetch_rows

N = 12


def make_batch(rollout_id: int = 0, vocab: int = 96) -> TrainBatch:
    rng = np.random.default_rng(rollout_id)
    prompts, responses = rng.integers(2, 9, N), rng.integers(2, 15, N)
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[rng.integers(0, vocab, p + r) for p, r in zip(prompts, responses, strict=True)],
        response_lengths=responses,
        loss_masks=[(rng.random(r) > 0.2).astype(np.float32) for r in responses],
        rollout_log_probs=[(-rng.random(r) - 3).astype(np.float32) for r in responses],
        rewards=rng.random(N).astype(np.float32),
        group_ids=np.arange(N) // 4,
        oldest_versions=np.full(N, rollout_id),
        names=[f"row:{i}" for i in range(N)],
    )


@dataclasses.dataclass
class WatchedRows:
    """Rows of a batch, and which of them were asked for."""

    rows: BatchRows
    asked: list[int] = dataclasses.field(default_factory=list)

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        self.asked += indices
        return self.rows.fetch(indices, columns)


def _train(settings: s.TrainSettings) -> tuple[tuple[int, int], list[int], dict[str, float], dict[str, Any]]:
    from relax_train.trainer import Trainer

    trainer = Trainer(settings)
    trainer.setup()
    try:
        batch = make_batch()
        rows = WatchedRows(BatchRows(batch))
        metrics = trainer.train(StepManifest.of(batch), rows, version=0)
        place = (trainer.parallel.dp_rank, trainer.parallel.tp_rank)
        weights = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
    finally:
        trainer.close()
    return place, rows.asked, metrics, weights


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_each_replica_fetches_its_own_rows_and_all_together_fetch_each_once(
    run_ranks: Callable[..., list[Any]], reference: Callable[[str], Any], kl_coef: float
) -> None:
    """With a KL reward the log-prob pass has rows of its own, of which a rank may need more; the result is the same."""
    settings = s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=str(reference("qwen3").folder), bf16=False),
        optimizer=s.OptimizerSettings(lr=1e-3),
        algorithm=s.AlgorithmSettings(kl_coef=kl_coef, normalize_advantages=True),
        batch=s.BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=48),
    )
    (_, _, one, weights) = run_ranks(_train, 1, settings)[0]
    layout = s.ParallelSettings(tensor_model_parallel_size=2)
    results = run_ranks(_train, 4, dataclasses.replace(settings, parallel=layout))
    asked = {place: indices for place, indices, _, _ in results}
    assert sorted(asked) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for dp in (0, 1):
        assert asked[dp, 0] == asked[dp, 1], "ranks of one replica read the same rows"
        assert len(asked[dp, 0]) == len(set(asked[dp, 0])), "a row is fetched once"
    first, second = set(asked[0, 0]), set(asked[1, 0])
    assert first | second == set(range(N))
    if kl_coef == 0:
        assert not first & second
    for _, _, metrics, found in results:
        assert metrics["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(one["train/grad_norm"], abs=1e-5)
        for name, tensor in weights.items():
            assert (found[name] - tensor).abs().max().item() < 1e-5, name


def test_a_row_of_another_length_names_its_sample() -> None:
    batch = make_batch()
    manifest = StepManifest.of(batch)
    batch.rollout_log_probs[3] = batch.rollout_log_probs[3][:-1]
    with pytest.raises(ValueError, match=r"row:3: its row has \d+ values of rollout_log_probs"):
        fetch_rows(manifest, BatchRows(batch), [1, 3])
    fetch_rows(manifest, BatchRows(batch), [1, 2])


def test_a_selection_keeps_rows_with_their_samples(tmp_path: Path) -> None:
    batch = make_batch()
    part = fetch_rows(StepManifest.of(batch), BatchRows(batch), range(N)).select([5, 2])
    assert part.names == ["row:5", "row:2"]
    np.testing.assert_array_equal(part.tokens[0], batch.tokens[5])
    np.testing.assert_array_equal(part.loss_masks[1], batch.loss_masks[2])
    own = fetch_rows(StepManifest.of(batch), BatchRows(batch), [2]).select([5, 2])
    assert list(own.tokens) == [1]
