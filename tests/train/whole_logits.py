"""Log-probabilities from logits that are there as a whole: the arithmetic of the output head, without its chunks."""

from typing import Any

import torch
import torch.distributed as dist
from relax_train.algorithms.logprobs import Scoring


def token_log_probs(  # tensors and switches of one kernel
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: "dist.ProcessGroup | None" = None,
    vocab_size: int | None = None,
    entropy_grad: bool = False,
    overwrite_logits: bool = False,
    with_entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(logits / temperature)[labels]`` and the entropy of that distribution, in nats.

    The arithmetic is float32 (float64 for float64 logits), on
    :data:`relax_train.algorithms.logprobs.CHUNK_ELEMENTS` logits at a time; nothing of the
    size of the logits is kept for the backward pass but the logits themselves.

    Args:
        logits: ``[tokens, vocabulary / tensor-parallel size]``, any floating type; this rank's slice of the vocabulary.
        labels: int64 ``[tokens]``, ids in the whole vocabulary.
        temperature: positive divisor of the logits.
        group: tensor-parallel group; None when the vocabulary is whole.
        vocab_size: real vocabulary size; columns from there on are padding and take no part. None: no padding.
        entropy_grad: whether the entropy is differentiated; without, no gradient flows from it.
        overwrite_logits: let the backward pass write the gradient into the memory of ``logits``, which saves a tensor
            of their size. Only when nothing reads the logits afterwards and the graph is used once.
        with_entropy: False leaves the entropies 0, which saves a third of the time of a forward-only pass.

    Returns:
        log-probabilities and entropies, ``[tokens]`` each, float32 (float64 for float64 logits), equal on all ranks of
        the group.
    """
    assert logits.dim() == 2, logits.shape
    assert labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    assert with_entropy or not entropy_grad
    scoring = Scoring.of(logits.shape[1], temperature, group, vocab_size)
    log_probs, entropy = _TokenLogProbs.apply(logits, labels, scoring, entropy_grad, overwrite_logits, with_entropy)
    return log_probs, entropy if entropy_grad else entropy.detach()


class _TokenLogProbs(torch.autograd.Function):
    """See :func:`token_log_probs`."""

    @staticmethod
    def forward(  # tensors and switches of one kernel
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        scoring: Scoring,
        entropy_grad: bool,
        overwrite: bool,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy, log_z = scoring.forward(logits, labels, with_entropy=with_entropy)
        ctx.save_for_backward(logits, labels, log_z, entropy)
        ctx.plan = (scoring, entropy_grad, overwrite)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, log_z, entropy = ctx.saved_tensors
        scoring, entropy_grad, overwrite = ctx.plan
        out = logits.detach() if overwrite else torch.empty_like(logits)
        scoring.backward(logits, out, labels, log_z, grads[0], entropy, grads[1] if entropy_grad else None)
        return out, None, None, None, None, None
