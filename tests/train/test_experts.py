"""Grouped products of experts: the same as one expert after another."""

import types
from typing import Any

import pytest
import torch


class _Linear(torch.nn.Module):
    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter((torch.randn(size_out, size_in) / size_in**0.5).bfloat16())


def _experts(count: int, hidden: int, inner: int) -> Any:
    local = [
        types.SimpleNamespace(linear_fc1=_Linear(hidden, 2 * inner), linear_fc2=_Linear(inner, hidden))
        for _ in range(count)
    ]
    return types.SimpleNamespace(local_experts=local, num_local_experts=count)


def _one_by_one(experts: Any, hidden: torch.Tensor, counts: list[int], probs: torch.Tensor) -> torch.Tensor:
    """In float32."""
    outputs = []
    for expert, x, p in zip(experts.local_experts, hidden.split(counts), probs.split(counts), strict=True):
        gate, linear = (x @ expert.linear_fc1.weight.float().T).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * linear * p[:, None]
        outputs.append(inner @ expert.linear_fc2.weight.float().T)
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[5, 0, 11, 1], [0, 0, 0, 3], [8, 8, 8, 8]])
def test_grouped_products_equal_the_experts_one_by_one(counts: list[int]) -> None:
    from relax_train.models.experts import _forward

    torch.manual_seed(0)
    experts, total = _experts(4, 16, 24), sum(counts)
    hidden = torch.randn(total, 16).bfloat16().requires_grad_()
    probs = torch.rand(total).requires_grad_()
    weights = [w for e in experts.local_experts for w in (e.linear_fc1.weight, e.linear_fc2.weight)]
    upstream = torch.randn(total, 16)

    wide, wide_probs = hidden.detach().float().requires_grad_(), probs.detach().clone().requires_grad_()
    expected = _one_by_one(experts, wide, counts, wide_probs)
    expected_grads = torch.autograd.grad(expected, [wide, wide_probs, *weights], upstream)
    got, bias = _forward(experts, hidden, torch.tensor(counts), probs)
    got_grads = torch.autograd.grad(got, [hidden, probs, *weights], upstream.bfloat16())

    assert bias is None
    assert got.dtype == torch.bfloat16
    for a, b in zip((got, *got_grads), (expected, *expected_grads), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-6)
        assert error < 2e-2
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    again, _ = _forward(experts, hidden, torch.tensor(counts), probs)
    again.backward(upstream.bfloat16())
    assert all(torch.equal(w.main_grad, g.float()) for w, g in zip(weights, got_grads[2:], strict=True))
    for expert, count in zip(experts.local_experts, counts, strict=True):
        index = next(i for i, w in enumerate(weights) if w is expert.linear_fc1.weight)
        assert (count == 0) == (not got_grads[2 + index].any())


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_gradients_add_to_the_buffers(order: list[int]) -> None:
    """In whatever order the buffers of the experts lie."""
    from relax_train.models.experts import _add

    flat = torch.zeros(4 * 40)
    weights: list[Any] = [_Linear(4, 6).weight for _ in range(4)]
    for place, index in enumerate(order):
        weights[index].main_grad = flat[place * 40 : place * 40 + 24].view(6, 4)
    grads = torch.randn(4, 6, 4).bfloat16()
    _add(weights, grads)
    _add(weights, grads)
    for weight, grad in zip(weights, grads, strict=True):
        assert torch.equal(weight.main_grad, 2 * grad.float())
    assert (flat != 0).sum() == 4 * 24


def _grouped_layers(folder: Any) -> tuple[int, int, bool, list[float]]:
    from relax_train import settings as s
    from relax_train.backend.mcore import SequentialMLP
    from relax_train.backend.parallel import setup_parallel
    from relax_train.models.build import build_model
    from relax_train.models.experts import _together
    from relax_train.models.hf_mapping import load_hf_weights
    from relax_train.step import ForwardBackward

    settings = s.TrainSettings(model=s.ModelSettings(hf_checkpoint=str(folder), bf16=True))
    model = build_model(settings, setup_parallel(settings.parallel))
    load_hf_weights(model)
    layers = [m for m in model.gpt[0].modules() if isinstance(m, SequentialMLP)]
    grouped = sum("forward" in vars(m) for m in layers)
    weights = [
        [getattr(e, name).weight for e in m.local_experts] for m in layers for name in ("linear_fc1", "linear_fc2")
    ]
    buffers = [[weight.main_grad for weight in some] for some in weights]
    in_place = all(_together(tensors) is not None for tensors in (*weights, *buffers))
    batch = _batch()
    fast = ForwardBackward(model, settings).log_probs(batch)
    for layer in layers:
        del layer.forward
    slow = ForwardBackward(model, settings).log_probs(batch)
    return len(layers), grouped, in_place, [float(abs(a - b).max()) for a, b in zip(fast, slow, strict=True)]


def _batch() -> Any:
    import numpy as np
    from relax_data.types import TrainBatch

    rng = np.random.default_rng(0)
    return TrainBatch(
        rollout_id=0,
        tokens=[rng.integers(0, 96, 20), rng.integers(0, 96, 13)],
        response_lengths=np.array([12, 8]),
        loss_masks=[np.ones(12, np.float32), np.ones(8, np.float32)],
        rollout_log_probs=[np.zeros(12, np.float32), np.zeros(8, np.float32)],
        rewards=np.zeros(2, np.float32),
        group_ids=np.zeros(2, np.int64),
        oldest_versions=np.zeros(2, np.int64),
        names=["row:0", "row:1"],
    )


def test_a_model_in_bfloat16_computes_all_its_experts_grouped(run_ranks: Any, reference: Any) -> None:
    [(layers, grouped, in_place, differences)] = run_ranks(_grouped_layers, 1, reference("qwen3_moe").folder)
    assert layers == grouped == 3
    assert in_place, "weights or gradients of experts are copied"
    assert max(differences) < 0.05
