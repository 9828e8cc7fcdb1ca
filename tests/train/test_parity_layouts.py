"""The same numbers as transformers, under every parallel layout: loss, gradient norm and weights of three steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from relax_train.models.hf_mapping import SafetensorsFolder

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

CASES = {
    "qwen3": ("qwen3", 1, {}),
    "qwen2": ("qwen2", 1, {}),
    "moe": ("qwen3_moe", 1, {}),
    "llama-tied": ("llama", 1, {}),
    "llama-linear": ("llama+linear", 1, {}),
    "qwen3-yarn": ("qwen3+yarn", 1, {}),
    "tp2-sp": ("qwen3", 2, SP),
    "tp2-padded-vocabulary": ("qwen2", 2, {"tensor_model_parallel_size": 2}),
    "pp2-tied": ("qwen3", 2, {"pipeline_model_parallel_size": 2}),
    "cp2": ("qwen3", 2, {"context_parallel_size": 2}),
    "ep2": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
    "dp2": ("qwen3", 2, {}),
    "llama3-tp2-sp": ("llama+llama3", 2, SP),
    "llama-pp2-tied": ("llama", 2, {"pipeline_model_parallel_size": 2}),
    "llama3-cp2": ("llama+llama3", 2, {"context_parallel_size": 2}),
    "moe-yarn-ep2": ("qwen3_moe+yarn", 2, {"expert_model_parallel_size": 2}),
    "tp2-sp-full-recompute": ("qwen3", 2, {**SP, **FULL}),
    "selective-recompute": ("qwen3", 2, {**SP, "recompute_granularity": "selective"}),
    "selective-modules": (
        "qwen3_moe",
        1,
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp", "moe", "layernorm")},
    ),
    "chunks-recompute": ("qwen3", 1, {**FULL, "recompute_num_layers": 2}),
    "moe-ep2-full-recompute": ("qwen3_moe", 2, {**FULL, "expert_model_parallel_size": 2}),
    "cpu-offload": ("qwen3", 2, {"optimizer_cpu_offload": True}),
    "tp2-sp-pp2": ("qwen2", 4, {**SP, "pipeline_model_parallel_size": 2}),
    "tp2-sp-cp2": ("qwen3", 4, {**SP, "context_parallel_size": 2}),
    "llama3-tp2-sp-pp2": ("llama+llama3", 4, {**SP, "pipeline_model_parallel_size": 2}),
    "qwen2-yarn-tp2-sp-cp2": ("qwen2+yarn", 4, {**SP, "context_parallel_size": 2}),
    "pp2-dp2-block-recompute": (
        "qwen3",
        4,
        {**FULL, "recompute_method": "block", "pipeline_model_parallel_size": 2},
    ),
    "ep2-tp2-sp": ("qwen3_moe", 4, {**SP, "expert_model_parallel_size": 2}),
    "ep2-pp2-etp1": (
        "qwen3_moe",
        4,
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
}


def _train(harness: Any, reference: Any, parallel: dict[str, Any]) -> Any:
    run = harness(reference.folder, parallel)
    before = run.weights()
    steps = [run.step(rows) for rows in reference.rows]
    return steps, before, run.weights()


def _compare(got: dict[str, torch.Tensor], folder: Any, tolerance: float) -> None:
    expected = SafetensorsFolder(str(folder))
    for name, tensor in got.items():
        difference = (tensor - expected.read(name)).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


@pytest.mark.parametrize(
    # Two ranks show each kind of parallelism alone; the slow ones show two kinds together.
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (ranks > 2)) for case, (_, ranks, _) in CASES.items()],
)
def test_three_steps(case: str, run_ranks: Callable[..., Any], harness: Any, reference: Any) -> None:
    kind, world, parallel = CASES[case]
    oracle = reference(kind)
    results = run_ranks(_train, world, harness, oracle, parallel)
    for steps, before, after in results:
        assert [loss for loss, _ in steps] == pytest.approx(oracle.losses, abs=1e-5)
        assert [norm for _, norm in steps] == pytest.approx(oracle.grad_norms, rel=1e-4)
        assert set(before) == set(SafetensorsFolder(str(oracle.folder)).names())
        _compare(before, oracle.folder, 0.0)
        _compare(after, oracle.after, 2e-5)
