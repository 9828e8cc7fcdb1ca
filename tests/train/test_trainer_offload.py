"""Sleep and wake. The mechanism is the same on a CPU, where storages can be emptied and refilled just as well."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train import settings as s

RunRanks = Callable[..., list[Any]]


def make_batch(rollout_id: int) -> TrainBatch:
    rng = np.random.default_rng(rollout_id)
    responses = rng.integers(1, 12, 4)
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[rng.integers(0, 96, 3 + r) for r in responses],
        response_lengths=responses,
        loss_masks=[np.ones(r, np.float32) for r in responses],
        rollout_log_probs=[np.full(r, -4, np.float32) for r in responses],
        rewards=rng.random(4).astype(np.float32),
        group_ids=np.zeros(4, np.int64),
        oldest_versions=np.zeros(4, np.int64),
        names=[f"row:{i}" for i in range(4)],
    )


def make_trainer(folder: Path, bf16: bool) -> Any:
    from relax_train.trainer import Trainer

    trainer = Trainer(
        s.TrainSettings(
            model=s.ModelSettings(hf_checkpoint=str(folder), bf16=bf16),
            optimizer=s.OptimizerSettings(lr=1e-2, adam_eps=1e-3),
        )
    )
    trainer.setup()
    return trainer


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}


def _three_steps(folder: Path, bf16: bool, naps: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights after three steps, and the bytes that the memory of model and optimizer had during each nap."""
    from relax_train.backend import offload

    offload.PIECE = 1000  # several pieces a storage, the last one shorter
    trainer = make_trainer(folder, bf16)
    sizes = []
    for i in range(3):
        trainer.train(make_batch(i), version=i)
        if naps:
            part = trainer._offload
            tensors = [*part._state_tensors(), *part._gradient_tensors()]
            part.sleep()
            part.sleep()
            sizes.append(sum(t.untyped_storage().nbytes() for t in tensors))
            with pytest.raises(RuntimeError, match=r"the trainer sleeps.*call wake\(\) first"):
                trainer.train(make_batch(9), version=9)
            trainer.wake()
            trainer.wake()
    weights = _weights(trainer)
    trainer.close()
    return weights, sizes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_a_nap_frees_everything_and_changes_nothing(
    reference: Any, run_ranks: RunRanks, bf16: bool, world: int
) -> None:
    folder = reference("qwen3").folder
    expected, _ = run_ranks(_three_steps, world, folder, bf16, False)[0]
    for weights, sizes in run_ranks(_three_steps, world, folder, bf16, True):
        assert sizes == [0, 0, 0]
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


def _sleep_on_cpu(folder: Path) -> bool:
    trainer = make_trainer(folder, False)
    trainer.sleep()
    same = len(trainer.log_probs(make_batch(0))) == 4
    trainer.wake()
    trainer.close()
    return same


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to sleep on")
def test_without_a_gpu_the_trainer_does_not_sleep(reference: Any, run_ranks: RunRanks) -> None:
    assert run_ranks(_sleep_on_cpu, 1, reference("qwen3").folder) == [True]
