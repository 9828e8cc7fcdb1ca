"""Vocabulary-parallel log-probs and entropy against torch's log_softmax."""

from collections.abc import Callable
from typing import Any

import pytest
import relax_train.algorithms.logprobs as logprobs
import torch
import torch.distributed as dist
from relax_train.algorithms.logprobs import effective_temperature
from train.whole_logits import token_log_probs


def naive(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def problem(tokens: int = 37, vocab: int = 50, scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=g, dtype=torch.float64) * scale
    return logits, torch.randint(vocab, (tokens,), generator=g)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 200, 1 << 25])
@pytest.mark.parametrize("overwrite", [False, True])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, temperature: float, chunk: int, overwrite: bool) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    logits, labels = problem()
    weight = torch.linspace(-1, 1, len(labels), dtype=torch.float64)
    expected = logits.clone().requires_grad_()
    e_lp, e_h = naive(expected, labels, temperature)
    (e_lp * weight + e_h * weight.flip(0)).sum().backward()

    got = logits.clone().requires_grad_()
    # A step between leaf and function, as in a model: the leaf's own memory may not be overwritten.
    lp, h = token_log_probs(got * 1.0, labels, temperature=temperature, entropy_grad=True, overwrite_logits=overwrite)
    (lp * weight + h * weight.flip(0)).sum().backward()
    torch.testing.assert_close(lp, e_lp, rtol=0, atol=1e-12)
    torch.testing.assert_close(h, e_h, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.grad, expected.grad, rtol=0, atol=1e-12)
    assert torch.equal(got.detach(), logits)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_entry_without_probability_adds_nothing(temperature: float, overwrite: bool) -> None:
    """A masked entry has the logit -inf: p log p is 0 there, as in the limit, and so is each gradient."""
    logits, labels = problem()
    masked = torch.zeros_like(logits, dtype=torch.bool)
    masked[::2, 7:20] = True
    masked[torch.arange(len(labels)), labels] = False
    weight = torch.linspace(-1, 1, len(labels), dtype=torch.float64)
    rest = logits.clone().requires_grad_()
    log_p = (rest / temperature).masked_fill(masked, -1e9).log_softmax(-1)
    expected = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (expected[0] * weight + expected[1] * weight.flip(0)).sum().backward()

    got = logits.masked_fill(masked, -torch.inf).requires_grad_()
    lp, h = token_log_probs(got * 1.0, labels, temperature=temperature, entropy_grad=True, overwrite_logits=overwrite)
    (lp * weight + h * weight.flip(0)).sum().backward()
    torch.testing.assert_close(lp, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(h, expected[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(got.grad, rest.grad, rtol=0, atol=1e-12)


def _slice_without_probability() -> Any:
    rank, world, group = _world_group()
    logits, labels = problem()
    logits[:, 25:] = -torch.inf
    mine = logits.chunk(world, 1)[rank].clone().requires_grad_()
    lp, h = token_log_probs(mine, labels % 25, group=group, entropy_grad=True)
    (lp + h).sum().backward()
    assert mine.grad is not None
    return lp.detach(), h.detach(), bool(mine.grad.isfinite().all())


def test_a_rank_may_have_a_slice_without_any_probability(run_ranks: Callable[..., list[Any]]) -> None:
    logits, labels = problem()
    expected = naive(logits[:, :25], labels % 25, 1.0)
    for lp, h, finite in run_ranks(_slice_without_probability, 2):
        torch.testing.assert_close(lp, expected[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(h, expected[1], rtol=0, atol=1e-12)
        assert finite


def test_the_entropy_is_a_metric_only_unless_asked() -> None:
    logits, labels = problem()
    lp, h = token_log_probs(logits.requires_grad_(), labels)
    assert lp.requires_grad
    assert not h.requires_grad


@pytest.mark.parametrize("world", [1, 2])
def test_without_entropy_the_log_probs_are_the_same(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    for lp, h in run_ranks(_without_entropy, world):
        torch.testing.assert_close(lp, naive(*problem(), 0.7)[0], rtol=0, atol=1e-12)
        assert not h.any()


def _without_entropy() -> list[Any]:
    rank, world, group = _world_group()
    logits, labels = problem()
    mine = logits.chunk(world, 1)[rank].clone()
    return list(token_log_probs(mine, labels, temperature=0.7, group=group, with_entropy=False))


def test_the_gradient_of_a_likely_token_keeps_its_precision() -> None:
    """``1 - p`` is computed before it is rounded to bfloat16."""
    logits = torch.zeros(3, 64, dtype=torch.bfloat16)
    logits[:, 5] = torch.tensor([4.0, 8.0, 12.0])
    labels = torch.full((3,), 5)
    half, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    token_log_probs(half, labels)[0].sum().backward()
    naive(wide, labels, 1.0)[0].sum().backward()
    assert half.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(half.grad[:, 5].double(), wide.grad[:, 5], rtol=1e-2, atol=0)


def test_padding_of_the_vocabulary_takes_no_part() -> None:
    logits, labels = problem(vocab=50)
    padded = torch.cat([logits, torch.full((37, 14), 99.0, dtype=torch.float64)], 1).requires_grad_()
    lp, h = token_log_probs(padded, labels, vocab_size=50, entropy_grad=True)
    (lp.sum() + h.sum()).backward()
    e_lp, e_h = naive(logits, labels, 1.0)
    torch.testing.assert_close(lp, e_lp)
    torch.testing.assert_close(h, e_h)
    assert padded.grad is not None
    assert (padded.grad[:, 50:] == 0).all()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels = problem(vocab=4000)
    half = logits.bfloat16().requires_grad_()
    lp, h = token_log_probs(half, labels, temperature=0.8)
    assert lp.dtype == h.dtype == torch.float32
    e_lp, _ = naive(half.detach().double(), labels, 0.8)
    torch.testing.assert_close(lp.double(), e_lp, rtol=0, atol=2e-5)
    lp.sum().backward()
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16


def test_huge_logits_do_not_overflow() -> None:
    logits, labels = problem(scale=1e4)
    lp, h = token_log_probs(logits.float(), labels)
    e_lp, e_h = naive(logits.float().double(), labels, 1.0)
    torch.testing.assert_close(lp.double(), e_lp, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(h.double(), e_h, rtol=0, atol=1e-3)


def _world_group() -> tuple[int, int, Any]:
    """Joins the ranks; here the whole world shares the vocabulary."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def _split_vocabulary() -> list[Any]:
    rank, world, group = _world_group()
    logits, labels = problem(vocab=50)
    padded = torch.cat([logits, torch.full((37, 10), 7.0, dtype=torch.float64)], 1)
    mine = padded.chunk(world, 1)[rank].clone().requires_grad_()
    lp, h = token_log_probs(mine, labels, temperature=0.7, group=group, vocab_size=50, entropy_grad=True)
    (lp.sum() + 2 * h.sum()).backward()
    return [lp.detach(), h.detach(), mine.grad]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_the_vocabulary_get_the_whole_result(world: int, run_ranks: Callable[..., list[Any]]) -> None:
    parts = run_ranks(_split_vocabulary, world)
    logits, labels = problem(vocab=50)
    whole = logits.requires_grad_()
    e_lp, e_h = naive(whole, labels, 0.7)
    (e_lp.sum() + 2 * e_h.sum()).backward()
    for lp, h, _ in parts:
        torch.testing.assert_close(lp, e_lp.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(h, e_h.detach(), rtol=0, atol=1e-12)
    grad = torch.cat([g for _, _, g in parts], 1)
    torch.testing.assert_close(grad[:, :50], whole.grad, rtol=0, atol=1e-12)
    assert (grad[:, 50:] == 0).all()


def test_a_rank_with_nothing_but_padding_agrees(run_ranks: Callable[..., list[Any]]) -> None:
    parts = run_ranks(_all_padding_on_last, 3)
    e_lp, e_h = naive(problem(vocab=50)[0], problem(vocab=50)[1], 1.0)
    for lp, h in parts:
        torch.testing.assert_close(lp, e_lp)
        torch.testing.assert_close(h, e_h)


def _all_padding_on_last() -> list[Any]:
    rank, world, group = _world_group()
    logits, labels = problem(vocab=50)
    padded = torch.cat([logits, torch.zeros(37, 25, dtype=torch.float64)], 1)
    return list(token_log_probs(padded.chunk(world, 1)[rank], labels, group=group, vocab_size=50))


def test_temperature_zero_is_scored_as_the_engine_does() -> None:
    assert effective_temperature(0.0) == 1.0
    assert effective_temperature(0.6) == 0.6
    with pytest.raises(ValueError, match="--rollout-temperature -1"):
        effective_temperature(-1.0)
