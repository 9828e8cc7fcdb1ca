"""However samples are grouped into micro-batches and dealt to ranks, the gradient of a step is the same (float64)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import StepManifest, TrainBatch
from relax_train.algorithms.advantages import advantage_inputs, compute_advantages
from relax_train.algorithms.estimators import group_normalized
from relax_train.algorithms.losses import Documents, metric_names, policy_loss, token_weights
from relax_train.algorithms.output_head import head_log_probs
from relax_train.algorithms.registry import ADVANTAGES, LOSSES
from relax_train.batching import Split, build_micro_batch
from relax_train.settings.algorithm import AlgorithmSettings
from train.whole_logits import token_log_probs

N = 6
VOCAB = 11


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    """Samples of unlike lengths, one of them without a trained token."""
    rng = np.random.default_rng(5)
    responses = [3, 9, 1, 6, 4, 2]
    masks = [(rng.random(r) > 0.3).astype(np.float32) for r in responses]
    masks[2][:] = 1
    masks[5][:] = 0
    return TrainBatch(
        rollout_id=0,
        tokens=[rng.integers(0, VOCAB, 2 + r) for r in responses],
        response_lengths=np.array(responses),
        loss_masks=masks,
        rollout_log_probs=[-rng.random(r).astype(np.float32) * 3 for r in responses],
        rewards=rng.random(N).astype(np.float32),
        group_ids=np.array([0, 0, 0, 1, 1, 1]),
        oldest_versions=np.zeros(N, np.int64),
        names=[f"row:{i}" for i in range(N)],
    )


def partitions(items: list[int], blocks: int) -> Iterator[list[list[int]]]:
    """All ways to put ``items`` into ``blocks`` non-empty sets."""
    if blocks == 0:
        if not items:
            yield []
        return
    if len(items) < blocks:
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest, blocks - 1):
        yield [[first], *smaller]
    for same in partitions(rest, blocks):
        for i in range(blocks):
            yield [*same[:i], [first, *same[i]], *same[i + 1 :]]


class TinyModel(torch.nn.Module):
    """Causal, mixes a document's tokens by a running mean, and is float64."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.embedding = torch.nn.Parameter(torch.randn(VOCAB, 8, generator=g, dtype=torch.float64))
        self.output = torch.nn.Parameter(torch.randn(8, VOCAB, generator=g, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.hidden(tokens, cu_seqlens) @ self.output

    def hidden(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding[tokens].tanh()
        parts = hidden.split(cu_seqlens.diff().tolist())
        means = [p.cumsum(0) / torch.arange(1, len(p) + 1, dtype=p.dtype)[:, None] for p in parts]
        return torch.cat(means)


def flat_gradient(model: TinyModel) -> torch.Tensor:
    """The gradients of all parameters, one behind the other; each must have one."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.flatten())
    return torch.cat(found)


Columns = list[np.ndarray]


def other_log_probs(batch: TrainBatch) -> tuple[Columns, Columns]:
    """Log-probs of the policy before the step and of the reference."""
    rng = np.random.default_rng(9)
    old, ref = ([-rng.random(r) * 3 for r in batch.response_lengths] for _ in range(2))
    return old, ref


def step(
    model: TinyModel,
    batch: TrainBatch,
    groups: list[list[int]],
    settings: AlgorithmSettings,
    others: tuple[Columns, Columns] | None = None,
    *,
    logits: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient (flat) and metric sums of one optimizer step; ranks add up their gradients as micro-batches do.

    ``logits`` takes all logits of a micro-batch, where the product takes hidden states of response positions.
    """
    old, ref = others or other_log_probs(batch)
    inputs = advantage_inputs(
        StepManifest.of(batch),
        settings,
        own=range(N),
        masks=batch.loss_masks,
        old_log_probs=old,
        ref_log_probs=ref,
    )
    columns: dict[str, list[np.ndarray]] = {
        "weights": list(token_weights(batch.loss_masks, per_token=settings.calculate_per_token_loss)),
        "mask": batch.loss_masks,
        "advantages": compute_advantages(inputs),
        "rollout_log_probs": batch.rollout_log_probs,
        "old_log_probs": old,
        "ref_log_probs": ref,
    }
    model.zero_grad()
    totals: dict[str, float] = {}
    for group in groups:
        row = build_micro_batch(batch, group, Split(), columns).to(torch.device("cpu"), torch.float64)
        hidden, at = model.hidden(row["tokens"][0], row["cu_seqlens"]), row["selected"]
        if logits:
            at = torch.arange(len(hidden))
            log_probs, entropy = token_log_probs(hidden @ model.output, row["labels"], entropy_grad=True)
        else:
            log_probs, entropy = head_log_probs(hidden[at], model.output.t(), row["labels"][at], entropy_grad=True)
        documents = Documents(row["documents"][at], len(row["cu_seqlens"]) - 1)
        given: dict[str, Any] = {name: row[name][at] for name in columns}
        loss, sums = policy_loss(log_probs, entropy, documents=documents, settings=settings, **given)
        loss.backward()
        for name, value in sums.items():
            combine = max if name.endswith("_max") else float.__add__
            totals[name] = combine(totals.get(name, 0.0), value.item())
    return flat_gradient(model), totals


def test_response_positions_are_enough(batch: TrainBatch) -> None:
    model = TinyModel()
    for estimator, loss in COMBINATIONS:
        settings = all_terms(estimator, loss, False, entropy_coef=0.01)
        grad, sums = step(model, batch, [[0, 1, 2], [3, 4, 5]], settings)
        expected, totals = step(model, batch, [[0, 1, 2], [3, 4, 5]], settings, logits=True)
        assert (grad - expected).abs().max() < 1e-12
        assert sums == pytest.approx(totals, abs=1e-12)


@pytest.mark.parametrize("per_token", [False, True])
def test_every_partition_into_micro_batches_and_ranks(batch: TrainBatch, per_token: bool) -> None:
    settings = AlgorithmSettings(
        calculate_per_token_loss=per_token, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01, use_tis=True
    )
    model = TinyModel()
    whole, totals = step(model, batch, [list(range(N))], settings)
    assert whole.abs().max() > 1e-3
    assert {*metric_names(settings), "tokens"} == set(totals)
    count = 0
    # A partition into 2m sets is one into m micro-batches on each of two ranks: ranks are summed like micro-batches.
    for blocks in (2, 3, 4, 5):
        for groups in partitions(list(range(N)), blocks):
            grad, sums = step(model, batch, groups, settings)
            assert (grad - whole).abs().max() < 1e-9, groups
            for name, value in sums.items():
                assert value == pytest.approx(totals[name], abs=1e-9), (name, groups)
            count += 1
    assert count == 31 + 90 + 65 + 15


COMBINATIONS = [
    (estimator, loss)
    for estimator, facts in ADVANTAGES.items()
    for loss, of in LOSSES.items()
    if not (facts.sequence_ratio and of.token_ratio)
]


def all_terms(estimator: str, loss: str, per_token: bool, entropy_coef: float = 0.0) -> AlgorithmSettings:
    """Settings with every term that an estimator and a loss can have."""
    return AlgorithmSettings(
        advantage_estimator=estimator,
        loss_type=loss,
        calculate_per_token_loss=per_token,
        kl_coef=0.2,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coef=entropy_coef,
        use_tis=True,
    )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("estimator", "loss"), COMBINATIONS)
def test_every_estimator_and_loss(batch: TrainBatch, estimator: str, loss: str, per_token: bool) -> None:
    settings = all_terms(estimator, loss, per_token)
    model = TinyModel()
    whole, totals = step(model, batch, [list(range(N))], settings)
    assert whole.abs().max() > 1e-3
    for blocks in (2, 5):
        for groups in partitions(list(range(N)), blocks):
            grad, sums = step(model, batch, groups, settings)
            assert (grad - whole).abs().max() < 1e-9, groups
            for name, value in sums.items():
                assert value == pytest.approx(totals[name], abs=1e-9), (name, groups)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("estimator", "loss"), COMBINATIONS)
def test_masked_off_policy_tokens_are_as_good_as_part_of_the_prompt(
    batch: TrainBatch, estimator: str, loss: str, per_token: bool
) -> None:
    """`--mask-offpolicy-in-partial-rollout` masks what older weights have sampled: the beginning of a response."""
    settings = all_terms(estimator, loss, per_token, entropy_coef=0.01)
    older = [1, 4, 0, 2, 3, 1]

    def without(column: Columns) -> Columns:
        return [row[n:] for row, n in zip(column, older, strict=True)]

    masks = [np.concatenate([np.zeros(n), m[n:]]).astype(m.dtype) for m, n in zip(batch.loss_masks, older, strict=True)]
    masked = dataclasses.replace(batch, loss_masks=masks)
    shorter = dataclasses.replace(
        batch,
        response_lengths=batch.response_lengths - older,
        loss_masks=without(batch.loss_masks),
        rollout_log_probs=without(batch.rollout_log_probs),
    )
    old, ref = other_log_probs(batch)
    model = TinyModel()
    whole, _ = step(model, batch, [list(range(N))], settings, (old, ref))
    expected, sums = step(model, shorter, [list(range(N))], settings, (without(old), without(ref)))
    assert (expected - whole).abs().max() > 1e-3, "the older tokens matter when they are not masked"
    for groups in ([list(range(N))], [[0, 3], [1], [2, 4, 5]]):
        grad, masked_sums = step(model, masked, groups, settings, (old, ref))
        assert (grad - expected).abs().max() < 1e-9
        assert masked_sums == pytest.approx(sums, abs=1e-9)


def test_algorithms_differ(batch: TrainBatch) -> None:
    """Guards the test above: each combination has a gradient of its own."""
    grads = []
    for estimator, loss in COMBINATIONS:
        settings = AlgorithmSettings(advantage_estimator=estimator, loss_type=loss, kl_coef=0.2)
        grads.append(step(TinyModel(), batch, [list(range(N))], settings)[0])
    for i, first in enumerate(grads):
        for second in grads[:i]:
            assert (first - second).abs().max() > 1e-4


def test_dr_grpo_up_to_one_factor_of_the_step(batch: TrainBatch) -> None:
    """arXiv:2503.20783 section 3.2: a sum over tokens with ``r - mean(r)``, by responses times a fixed length."""
    settings = AlgorithmSettings(
        disable_grpo_std_normalization=True, calculate_per_token_loss=True, eps_clip=0.9, eps_clip_high=1e6
    )
    model, fixed_length = TinyModel(), 16
    got, _ = step(model, batch, [[0, 3], [1, 2, 4, 5]], settings)
    rng = np.random.default_rng(9)
    olds = [-rng.random(r) * 3 for r in batch.response_lengths]
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(N):
        tokens, r = torch.from_numpy(batch.tokens[i]), int(batch.response_lengths[i])
        log_p = model(tokens, torch.tensor([0, len(tokens)])).log_softmax(-1)
        ratio = (log_p[-r - 1 : -1].gather(1, tokens[-r:, None]).squeeze(1) - torch.from_numpy(olds[i])).exp()
        group = batch.rewards[batch.group_ids == batch.group_ids[i]].astype(np.float64)
        a = float(batch.rewards[i]) - group.mean()
        objective = torch.minimum(ratio * a, ratio.clamp(0.1, 1e6) * a)
        total = total - (objective * torch.from_numpy(batch.loss_masks[i])).sum() / (N * fixed_length)
    total.backward()
    dr_grpo = flat_gradient(model)
    mean_length = sum(float(m.sum()) for m in batch.loss_masks) / N
    torch.testing.assert_close(got, dr_grpo * fixed_length / mean_length, rtol=0, atol=1e-9)


def test_the_mean_over_samples_is_written_out(batch: TrainBatch) -> None:
    """Against the formula, sample by sample: a mean of means over the samples that train something."""
    model = TinyModel()
    got, _ = step(model, batch, [[0, 3], [1, 2, 4, 5]], AlgorithmSettings(eps_clip=0.9, eps_clip_high=1e6))
    rng = np.random.default_rng(9)
    advantages = group_normalized(batch.rewards, batch.group_ids)
    olds = [-rng.random(r) * 3 for r in batch.response_lengths]
    model.zero_grad()
    means = []
    for i in range(N):
        mask = torch.from_numpy(batch.loss_masks[i]).double()
        if mask.sum() == 0:
            continue
        tokens = torch.from_numpy(batch.tokens[i])
        log_p = model(tokens, torch.tensor([0, len(tokens)])).log_softmax(-1)
        r = int(batch.response_lengths[i])
        lp = log_p[-r - 1 : -1].gather(1, tokens[-r:, None]).squeeze(1)
        ratio = (lp - torch.from_numpy(olds[i])).exp()
        a = advantages[i]
        token_loss = -torch.minimum(ratio * a, ratio.clamp(0.1, 1e6) * a)
        means.append((token_loss * mask).sum() / mask.sum())
    torch.stack(means).mean().backward()
    expected = flat_gradient(model)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
