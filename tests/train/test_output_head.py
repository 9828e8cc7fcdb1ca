"""Log-probs and losses straight from hidden states against the path over whole logits, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from relax_train.algorithms import output_head
from relax_train.algorithms.output_head import head_log_probs, head_loss
from train.whole_logits import token_log_probs

VOCAB, REAL, HIDDEN, ROWS = 24, 21, 6, 17


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, HIDDEN, generator=g, dtype=torch.float64).to(dtype) for n in (ROWS, VOCAB))
    return hidden, weight, torch.randint(REAL, (ROWS,), generator=g), torch.linspace(-1, 1, ROWS, dtype=dtype)


def loss_of(log_probs: torch.Tensor, entropy: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Not linear in the log-probs, as a clipped ratio is not."""
    return ((log_probs - log_probs.detach() + 0.1 * factor).exp() * factor - 0.3 * entropy * factor.square()).sum()


def by_logits(temperature: float) -> list[torch.Tensor]:
    hidden, weight, labels, factor = problem()
    hidden.requires_grad_()
    weight.requires_grad_()
    lp, h = token_log_probs(
        hidden @ weight.t(), labels, temperature=temperature, vocab_size=REAL, entropy_grad=True, with_entropy=True
    )
    loss = loss_of(lp, h, factor)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [lp.detach(), h.detach(), loss.detach(), hidden.grad, weight.grad]


def by_head(temperature: float, *, whole: bool, buffer: bool, group: Any = None) -> list[torch.Tensor]:
    """The same by the head; gradients of ``weight`` are those of this rank's part of the vocabulary."""
    hidden, weight, labels, factor = problem()
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    mine: Any = weight.chunk(world)[rank].clone().requires_grad_()
    if buffer:
        mine.main_grad = torch.ones_like(mine)
    hidden.requires_grad_()
    options: dict[str, Any] = dict(temperature=temperature, vocab_size=REAL, group=group)
    columns: list[list[torch.Tensor]] = []
    if whole:
        lp, h = head_log_probs(hidden, mine, labels, entropy_grad=True, **options)
        loss = loss_of(lp, h, factor)
        columns.append([lp.detach(), h.detach()])
    else:

        def chunk(rows: slice, lp: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            columns.append([lp.detach(), h.detach()])
            return loss_of(lp, h, factor[rows])

        loss = head_loss(hidden, mine, labels, chunk, **options)
    loss.backward()
    assert hidden.grad is not None
    assert (mine.grad is None) == buffer
    grad_weight = mine.main_grad - 1 if buffer else mine.grad
    return [*(torch.cat(c) for c in zip(*columns, strict=True)), loss.detach(), hidden.grad, grad_weight]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("whole", [False, True], ids=["by chunk", "whole"])
@pytest.mark.parametrize("rows", [1, 5, ROWS])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, temperature: float, whole: bool, rows: int) -> None:
    monkeypatch.setattr(output_head, "CHUNK_BYTES", rows * VOCAB * 8)
    expected = by_logits(temperature)
    for buffer in (False, True):
        for got, want in zip(by_head(temperature, whole=whole, buffer=buffer), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def _two_ranks() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    output_head.CHUNK_BYTES = 5 * VOCAB * 4
    both = (False, True)
    return [by_head(0.6, whole=whole, buffer=buffer, group=dist.group.WORLD) for whole in both for buffer in both]


def test_a_vocabulary_that_two_ranks_share(run_ranks: Callable[..., list[Any]]) -> None:
    *expected, grad_hidden, grad_weight = by_logits(0.6)
    for cases in zip(*run_ranks(_two_ranks, 2), strict=True):
        for rank, got in enumerate(cases):
            for value, want in zip(got[:3], expected, strict=True):
                torch.testing.assert_close(value, want, rtol=0, atol=1e-12)
            torch.testing.assert_close(got[4], grad_weight.chunk(2)[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(cases[0][3] + cases[1][3], grad_hidden, rtol=0, atol=1e-12)


def test_without_gradient_and_without_rows() -> None:
    hidden, weight, labels, _ = problem(torch.float32)
    with torch.no_grad():
        lp, entropy = head_log_probs(hidden, weight, labels, with_entropy=False)
    assert lp.dtype == torch.float32
    torch.testing.assert_close(lp, token_log_probs(hidden @ weight.t(), labels)[0])
    assert (entropy == 0).all()
    empty, _ = head_log_probs(hidden[:0], weight, labels[:0])
    assert empty.shape == (0,)


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    """What is kept between forward and backward has the size of the hidden states."""
    hidden, weight, labels, factor = problem()
    hidden.requires_grad_()
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        head_log_probs(hidden, weight, labels)
        head_loss(hidden, weight, labels, lambda rows, lp, h: loss_of(lp, h, factor[rows]))
    assert max(kept) <= max(hidden.numel(), weight.numel())
