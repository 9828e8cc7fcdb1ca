"""Log-probabilities of given tokens, and entropy, from logits whose vocabulary is split over tensor-parallel ranks.

What SGLang returns, and what this module therefore computes (sglang 0.5.17, ``srt/layers/sampler.py`` and
``srt/sampling/sampling_params.py``): logits are divided by the temperature in place and the log of their softmax over
the WHOLE vocabulary is returned. top-p, top-k and min-p choose the token but do not renormalise the log-probability.
Temperature 0 becomes top-k 1 with temperature 1, see :func:`effective_temperature`. Two cases differ and are not ours:
a decode batch of nothing but top-k 1 requests is scored at temperature 1 whatever temperature was asked for, and
``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` in the environment of the server scores at temperature 1.
"""

from typing import Any

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 25
"""Logits that are widened to the compute type at a time: 128 MiB in float32, whatever the length of the micro-batch."""

GREEDY_BELOW = 1e-6
"""SGLang's ``_SAMPLING_EPS``: a lower temperature is greedy sampling."""


def effective_temperature(temperature: float) -> float:
    """The divisor of the logits that SGLang uses when asked for ``temperature``.

    Raises:
        ValueError: it is negative or not finite.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"--rollout-temperature {temperature} must be a finite number that is not negative")
    return 1.0 if temperature < GREEDY_BELOW else temperature


def token_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: "dist.ProcessGroup | None" = None,
    vocab_size: int | None = None,
    entropy_grad: bool = False,
    overwrite_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log softmax(logits / temperature)[labels]`` and the entropy of that distribution, in nats.

    The arithmetic is float32 (float64 for float64 logits), on :data:`CHUNK_ELEMENTS` logits at a time; nothing of the
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

    Returns:
        log-probabilities and entropies, ``[tokens]`` each, float32 (float64 for float64 logits), equal on all ranks of
        the group.
    """
    assert logits.dim() == 2, logits.shape
    assert labels.shape == logits.shape[:1], (logits.shape, labels.shape)
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    start = 0 if group is None else dist.get_rank(group) * logits.shape[1]
    width = logits.shape[1] if vocab_size is None else min(max(vocab_size - start, 0), logits.shape[1])
    log_probs, entropy = _TokenLogProbs.apply(
        logits, labels, temperature, group, start, width, entropy_grad, overwrite_logits
    )
    return log_probs, entropy if entropy_grad else entropy.detach()


class _TokenLogProbs(torch.autograd.Function):
    """See :func:`token_log_probs`. ``start``: first id of this rank's slice; ``width``: its columns without padding."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        group: "dist.ProcessGroup | None",
        start: int,
        width: int,
        entropy_grad: bool,
        overwrite: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, wide = logits.shape[0], _compute_type(logits)
        top = torch.full((n,), torch.finfo(wide).min, dtype=wide, device=logits.device)
        # Per row of this slice: sum exp(x - top), sum exp(x - top) (x - top), x[label]; x = logits / temperature.
        sums = torch.zeros((3, n), dtype=wide, device=logits.device)
        column, here = _local_columns(labels, start, width)
        for rows in _chunks(n, logits.shape[1]):
            if width == 0:
                break
            x = logits[rows, :width].to(wide, copy=True).div_(temperature)
            sums[2, rows] = x.gather(1, column[rows, None]).squeeze(1).masked_fill_(~here[rows], 0)
            top[rows] = x.amax(1)
            x.sub_(top[rows, None])
            p = x.exp()
            sums[0, rows] = p.sum(1)
            sums[1, rows] = p.mul_(x).sum(1)
        if group is not None:
            # Move every slice's sums to the common maximum, then add: two collectives however many chunks.
            local_top = top.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            shift = local_top - top
            sums[1].add_(shift.clamp_min(-1e4) * sums[0])  # -1e4: no overflow; exp() of it is 0 all the same
            sums[:2].mul_(shift.exp())
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        log_z = top + log_sum
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, labels, log_z, entropy)
        ctx.plan = (temperature, start, width, entropy_grad, overwrite)
        return sums[2] - log_z, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, log_z, entropy = ctx.saved_tensors
        temperature, start, width, entropy_grad, overwrite = ctx.plan
        grad_log_prob, grad_entropy = grads
        out = logits.detach() if overwrite else torch.empty_like(logits)
        wide = _compute_type(logits)
        column, here = _local_columns(labels, start, width)
        for rows in _chunks(logits.shape[0], logits.shape[1]):
            g = grad_log_prob[rows, None]
            # d log p[label] / d x = onehot - p;   d H / d x = -p (log p + H).
            log_p = logits[rows, :width].to(wide, copy=True).div_(temperature).sub_(log_z[rows, None])
            p = log_p.exp()
            factor = -g
            if entropy_grad:
                factor = factor - grad_entropy[rows, None] * (log_p + entropy[rows, None])
            d = p.mul_(factor)
            if width:
                d.scatter_add_(1, column[rows, None], g * here[rows, None])
            out[rows, :width] = d.div_(temperature).to(logits.dtype)
            out[rows, width:] = 0
        return out, None, None, None, None, None, None, None


def _compute_type(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _local_columns(labels: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each label in this slice (0 where it lies elsewhere), and whether it lies here."""
    column = labels - start
    here = (column >= 0) & (column < width)
    return column.masked_fill(~here, 0), here


def _chunks(rows: int, columns: int) -> list[slice]:
    """Row ranges of at most :data:`CHUNK_ELEMENTS` elements."""
    size = max(1, CHUNK_ELEMENTS // max(columns, 1))
    return [slice(a, min(a + size, rows)) for a in range(0, rows, size)]
