"""Log-probabilities and losses from hidden states, without the logits of a micro-batch ever being whole in memory.

The output layer is multiplied with a number of tokens at a time (:data:`CHUNK_BYTES` of logits), at the positions that
are asked for and no others. What is kept for the backward pass is of the size of the hidden states.

:func:`head_log_probs` gives log-probabilities; its backward pass computes the logits a second time. :func:`head_loss`
is for a loss that is a sum over tokens: each chunk's loss is differentiated while its logits are there, so that
nothing is computed twice (the idea of liger-kernel's fused linear cross-entropy, arXiv 2410.10989 section 3.2, for
any such loss).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from relax_train.algorithms.logprobs import Scoring
from relax_train.backend.device import add_product
from relax_train.models.costs import CHUNK_BYTES

ChunkLoss = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a range of rows, their log-probabilities and entropies to the loss of these rows, a scalar."""


def head_log_probs(  # noqa: PLR0913  # tensors and switches of one kernel
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: "dist.ProcessGroup | None" = None,
    vocab_size: int | None = None,
    entropy_grad: bool = False,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(hidden @ weight.T / temperature)[labels]`` and the entropy of that distribution, in nats.

    Args:
        hidden: ``[rows, hidden size]``, the same on all ranks of ``group``, each of which gets the gradient of its own
            part of the vocabulary: sum them.
        weight: ``[vocabulary / tensor-parallel size, hidden size]``. Where megatron-core gave it a buffer for its
            gradient (``main_grad``), the gradient is added there, else it is returned to autograd.
        labels: int64 ``[rows]``, ids in the whole vocabulary.
        temperature: positive divisor of the logits.
        group: tensor-parallel group; None when the vocabulary is whole.
        vocab_size: real vocabulary size; columns from there on are padding and take no part. None: no padding.
        entropy_grad: whether the entropy is differentiated; without, no gradient flows from it.
        with_entropy: False leaves the entropies 0.

    Returns:
        ``[rows]`` each, float32 (float64 for float64 weights), equal on all ranks of the group.
    """
    assert with_entropy or not entropy_grad
    scoring = Scoring.of(weight.shape[0], temperature, group, vocab_size)
    log_probs, entropy = _HeadLogProbs.apply(hidden, weight, labels, scoring, entropy_grad, with_entropy)
    return log_probs, entropy if entropy_grad else entropy.detach()


def head_loss(  # tensors and switches of one kernel
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    loss_of: ChunkLoss,
    *,
    temperature: float = 1.0,
    group: "dist.ProcessGroup | None" = None,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """Loss that is a sum over rows, from the hidden states of the rows.

    Args:
        hidden, weight, labels, temperature, group, vocab_size: as for :func:`head_log_probs`.
        loss_of: is called once for each chunk, with its rows; may keep what it computed beside the loss. It must be a
            sum over rows. Where ``weight`` has a buffer for its gradient, the result must be differentiated with
            factor 1, as megatron-core does without a loss scale: the buffer has the gradient already.

    Returns:
        scalar.
    """
    scoring = Scoring.of(weight.shape[0], temperature, group, vocab_size)
    loss: torch.Tensor = _HeadLoss.apply(hidden, weight, labels, scoring, loss_of)
    return loss


class _HeadLogProbs(torch.autograd.Function):
    """See :func:`head_log_probs`."""

    @staticmethod
    def forward(  # tensors and switches of one kernel
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scoring: Scoring,
        entropy_grad: bool,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            scoring.forward(hidden[rows] @ weight.t(), labels[rows], with_entropy=with_entropy)
            for rows in _chunks(hidden, weight)
        ]
        log_probs, entropy, log_z = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        ctx.plan = (scoring, entropy_grad)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        scoring, entropy_grad = ctx.plan
        total, grad_hidden = _WeightGradient(weight), torch.empty_like(hidden)
        for rows in _chunks(hidden, weight):
            logits = hidden[rows] @ weight.t()
            flow = grads[1][rows] if entropy_grad else None
            scoring.backward(logits, logits, labels[rows], log_z[rows], grads[0][rows], entropy[rows], flow)
            torch.mm(logits, weight, out=grad_hidden[rows])
            total.add(logits, hidden[rows])
        return grad_hidden, total.result(), None, None, None, None


class _HeadLoss(torch.autograd.Function):
    """See :func:`head_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        scoring: Scoring,
        loss_of: ChunkLoss,
    ) -> torch.Tensor:
        total, grad_hidden, losses = _WeightGradient(weight), torch.empty_like(hidden), []
        for rows in _chunks(hidden, weight):
            logits = hidden[rows] @ weight.t()
            log_probs, entropy, log_z = scoring.forward(logits, labels[rows], with_entropy=True)
            with torch.enable_grad():
                leaves = log_probs.detach().requires_grad_(), entropy.detach().requires_grad_()
                loss = loss_of(rows, *leaves)
            flow, entropy_flow = torch.autograd.grad(loss, leaves, allow_unused=True)
            losses.append(loss.detach())
            flow = torch.zeros_like(log_probs) if flow is None else flow
            scoring.backward(logits, logits, labels[rows], log_z, flow, entropy, entropy_flow)
            torch.mm(logits, weight, out=grad_hidden[rows])
            total.add(logits, hidden[rows])
            del logits
        ctx.save_for_backward(grad_hidden)
        ctx.grad_weight = total.result()
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        grad_weight, ctx.grad_weight = ctx.grad_weight, None
        factor = grads[0]
        return grad_hidden * factor, None if grad_weight is None else grad_weight * factor, None, None, None


class _WeightGradient:
    """Adds up the gradient of the output layer over chunks: in megatron-core's buffer where there is one."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._dtype = weight.dtype
        buffer = getattr(weight, "main_grad", None)
        self._own = buffer is None
        wide = torch.float32 if weight.dtype in (torch.bfloat16, torch.float16) else weight.dtype
        self._total = torch.zeros_like(weight, dtype=wide) if buffer is None else buffer

    def add(self, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
        add_product(self._total, grad_logits, hidden)

    def result(self) -> torch.Tensor | None:
        """What is left for autograd to add: nothing when the buffer has it."""
        return self._total.to(self._dtype) if self._own else None


def _chunks(hidden: torch.Tensor, weight: torch.Tensor) -> list[slice]:
    """Ranges of rows whose logits take at most :data:`CHUNK_BYTES`; an empty one where there are no rows."""
    most = max(1, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))
    if most > 256:  # whole tiles of a matrix product
        most -= most % 256
    n = hidden.shape[0]
    return [slice(first, min(first + most, n)) for first in range(0, max(n, 1), most)]
