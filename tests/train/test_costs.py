"""What a sequence costs: against counted FLOPs, and how evenly ranks are loaded by it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train.batching import Split, plan_micro_batches
from relax_train.models.architectures import model_shape
from relax_train.models.costs import cost_model
from relax_train.settings import ParallelSettings
from relax_train.settings.batch import BatchSettings
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("length", [16, 200])
def test_the_cost_is_what_transformers_computes(kind: str, length: int, reference: Callable[[str], Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        reference(kind).folder, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None] % 96)
    cost = cost_model(model_shape(model.config.to_dict()))
    masked = cost.quadratic * length**2  # eager attention computes what the mask throws away, too
    assert counter.get_total_flops() == pytest.approx(float(cost(np.array(length))) + masked, rel=0.01)


def _shape(kind: str) -> Any:
    """Configurations of Qwen3-4B and Qwen3-30B-A3B."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
    if kind == "dense":
        return Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, **common)
    return Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        **common,
    )


def _batch(lengths: np.ndarray) -> TrainBatch:
    n = len(lengths)
    return TrainBatch(
        rollout_id=0,
        tokens=[np.zeros(k, np.int64) for k in lengths],
        response_lengths=lengths - 1,
        loss_masks=[np.ones(k - 1, np.float32) for k in lengths],
        rollout_log_probs=[np.zeros(k - 1, np.float32) for k in lengths],
        rewards=np.zeros(n, np.float32),
        group_ids=np.zeros(n, np.int64),
        oldest_versions=np.zeros(n, np.int64),
        names=[f"row:{i}" for i in range(n)],
    )


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("lock_step", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_ranks_are_evener_in_flops_than_by_tokens_and_the_cap_holds(
    kind: str, cp_size: int, lock_step: bool, forward_only: bool
) -> None:
    cost, cap = cost_model(model_shape(_shape(kind).to_dict())), 16384
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(6.5, 1.5, 64).astype(np.int64), 2, cap)
    lengths[5] = cap  # one sample fills a micro-batch
    settings = BatchSettings(use_dynamic_batch_size=True, max_tokens_per_gpu=cap // cp_size)

    def plan(**options: Any) -> tuple[float, int]:
        """How far the costliest rank (in lock-step: the sum of the costliest rounds) is above the mean; the rounds."""
        split = Split(dp_size=2, cp_size=cp_size, **options)
        rows = plan_micro_batches(_batch(lengths), settings, split, forward_only=forward_only)
        padded = split.padded(lengths)
        assert all(padded[row].sum() <= cap for rank in rows for row in rank)
        costs = np.array([[cost(padded[row]).sum() for row in rank] for rank in rows])
        longest = costs.max(0).sum() if lock_step else costs.sum(1).max()
        return float(longest / costs.sum(1).mean() - 1), costs.shape[1]

    by_tokens, rounds = plan()
    by_flops, rounds_of_flops = plan(cost=cost, lock_step=lock_step)
    # In lock-step the longest sample bounds its round, whatever is done.
    assert by_flops < by_tokens * (0.9 if lock_step else 0.5)
    assert rounds_of_flops == rounds


def _experts_span(sizes: dict[str, Any]) -> tuple[bool, bool]:
    import torch.distributed as dist
    from relax_train.backend.parallel import setup_parallel

    parallel = setup_parallel(ParallelSettings(**sizes))
    places: list[Any] = [None] * parallel.world_size
    dist.all_gather_object(places, parallel.dp_rank)
    met = {*dist.get_process_group_ranks(parallel.ep_group), *dist.get_process_group_ranks(parallel.etp_group)}
    return parallel.experts_span_data_parallel, len({places[rank] for rank in met}) > 1


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, False),
        ({"expert_model_parallel_size": 2}, True),
        ({"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, True),
        ({"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, True),
        (
            {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            False,
        ),
        ({"expert_model_parallel_size": 2, "context_parallel_size": 2}, False),
    ],
)
def test_which_layouts_let_data_parallel_ranks_meet_in_every_micro_batch(
    parallel: dict[str, Any], expected: bool, run_ranks: Callable[..., Any]
) -> None:
    assert set(run_ranks(_experts_span, 4, parallel)) == {(expected, expected)}
