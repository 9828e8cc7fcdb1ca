"""Log-probabilities of given tokens, and entropy, from logits whose vocabulary is split over tensor-parallel ranks.

What SGLang returns, and what this module therefore computes (sglang 0.5.17, ``srt/layers/sampler.py`` and
``srt/sampling/sampling_params.py``): logits are divided by the temperature in place and the log of their softmax over
the WHOLE vocabulary is returned. top-p, top-k and min-p choose the token but do not renormalise the log-probability.
Temperature 0 becomes top-k 1 with temperature 1, see :func:`effective_temperature`. Two cases differ and are not ours:
a decode batch of nothing but top-k 1 requests is scored at temperature 1 whatever temperature was asked for, and
``SGLANG_RETURN_ORIGINAL_LOGPROB=1`` in the environment of the server scores at temperature 1.
"""

import dataclasses

import torch
import torch.distributed as dist

from relax_train.backend.device import fuses

CHUNK_ELEMENTS = 1 << 25
"""Logits that are widened to the compute type at a time: 128 MiB in float32, whatever the length of the micro-batch."""

_NO_PROBABILITY = -1e4
"""Log-probability that stands for -inf: its ``exp`` is 0 in every type, and p log p is 0 rather than not a number."""

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


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How rows of logits are scored: one rank's slice of a vocabulary, and the temperature.

    Attributes:
        temperature: positive divisor of the logits.
        group: tensor-parallel group that the vocabulary is cut over; None when it is whole.
        start: first id of this rank's slice.
        width: columns of the slice that are no padding.
    """

    temperature: float
    group: "dist.ProcessGroup | None"
    start: int
    width: int

    @classmethod
    def of(
        cls, columns: int, temperature: float, group: "dist.ProcessGroup | None", vocab_size: int | None
    ) -> "Scoring":
        """The scoring of a slice of that many columns; ``vocab_size`` is the real size, None without padding."""
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        start = 0 if group is None else dist.get_rank(group) * columns
        width = columns if vocab_size is None else min(max(vocab_size - start, 0), columns)
        return cls(temperature, group, start, width)

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives log-probabilities, entropies and ``log sum exp`` of rows, ``[rows]`` each, equal on all ranks."""
        log_z, p_log_p, chosen = self._slice(logits, labels, with_entropy)
        if self.group is not None:
            # With z of the whole vocabulary, a slice's part of sum p log p is exp(log_z - z) (p_log_p + log_z - z).
            top = log_z.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
            # A slice of padding: no overflow; exp() of it is 0 all the same.
            shift = (log_z - top).clamp_min(_NO_PROBABILITY)
            share = shift.exp()
            sums = torch.stack([share, share * (p_log_p + shift), chosen])
            dist.all_reduce(sums, group=self.group)
            log_sum = sums[0].log()
            log_z, chosen = top + log_sum, sums[2]
            p_log_p = sums[1] / sums[0] - log_sum
        entropy = -p_log_p if with_entropy else torch.zeros_like(p_log_p)
        return chosen - log_z, entropy, log_z

    def _slice(
        self, logits: torch.Tensor, labels: torch.Tensor, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives for each row of this slice three numbers of x = logits / temperature.

        They are log sum exp(x), sum p log p with p = softmax over the slice, and x[label], 0 where that lies elsewhere.
        """
        n, wide, width = logits.shape[0], _compute_type(logits), self.width
        log_z = torch.full((n,), torch.finfo(wide).min, dtype=wide, device=logits.device)
        p_log_p, chosen = (torch.zeros(n, dtype=wide, device=logits.device) for _ in range(2))
        if width == 0 or n == 0:
            return log_z, p_log_p, chosen
        column, here = _local_columns(labels, self.start, width)
        if fuses(logits):
            from relax_train.kernels import softmax

            chosen = logits.gather(1, column[:, None]).squeeze(1).to(wide).div_(self.temperature)
            return *softmax.statistics(logits, width, self.temperature), chosen.masked_fill_(~here, 0)
        for rows in _chunks(n, logits.shape[1]):
            x = logits[rows, :width]
            if self.temperature != 1:
                x = x.to(wide, copy=True).div_(self.temperature)
            # The likeliest entry loses least in the difference.
            top, at = x.max(1, keepdim=True)
            # A slice of nothing but -inf has no softmax; its share of the vocabulary is 0.
            log_p = x.log_softmax(1, dtype=wide).masked_fill_(top == -torch.inf, _NO_PROBABILITY)
            log_z[rows] = (top.to(wide) - log_p.gather(1, at)).squeeze(1)
            chosen[rows] = x.gather(1, column[rows, None]).squeeze(1).to(wide).masked_fill_(~here[rows], 0)
            if with_entropy:
                log_p.clamp_min_(_NO_PROBABILITY)
                p_log_p[rows] = torch.linalg.vecdot(log_p.exp(), log_p)
        return log_z, p_log_p, chosen

    def backward(  # columns of the same rows
        self,
        logits: torch.Tensor,
        out: torch.Tensor,
        labels: torch.Tensor,
        log_z: torch.Tensor,
        grad_log_prob: torch.Tensor,
        entropy: torch.Tensor,
        grad_entropy: torch.Tensor | None,
    ) -> None:
        """Writes the gradient of the logits into ``out``, which may be their own memory.

        Args:
            log_z: what :meth:`forward` gave for these rows; ``entropy`` likewise.
            grad_log_prob: ``[rows]``, of the log-probabilities.
            grad_entropy: ``[rows]``; None when nothing flows from the entropy.
        """
        wide, width, temperature = _compute_type(logits), self.width, self.temperature
        column, here = _local_columns(labels, self.start, width)
        if fuses(logits) and width and len(labels):
            from relax_train.kernels import softmax

            own = None if grad_entropy is None else entropy.contiguous()
            flow = None if grad_entropy is None else grad_entropy.contiguous()
            softmax.write_gradient(
                logits, out, column.masked_fill(~here, -1), log_z, grad_log_prob.contiguous(),
                width=width, temperature=temperature, entropy=own, grad_entropy=flow,
            )  # fmt: skip
            return
        for rows in _chunks(logits.shape[0], logits.shape[1]):
            g = grad_log_prob[rows, None]
            # d log p[label] / d x = onehot - p;   d H / d x = -p (log p + H).
            x = logits[rows, :width]
            if temperature != 1:
                x = x.to(wide, copy=True).div_(temperature)
            log_p = (x - log_z[rows, None]).clamp_min_(_NO_PROBABILITY)
            at_label = log_p.gather(1, column[rows, None]) if width else log_p
            factor = -g
            label_factor = factor
            if grad_entropy is not None:
                h, h_grad = entropy[rows, None], grad_entropy[rows, None]
                factor = factor - h_grad * (log_p + h)
                label_factor = label_factor - h_grad * (at_label + h)
            torch.mul(log_p.exp_(), factor / temperature, out=out[rows, :width])
            if width:
                # In full precision: p may be close to 1.
                label = (at_label.exp() * label_factor + g) / temperature
                at = column[rows, None]
                out[rows].scatter_(1, at, label.to(out.dtype).where(here[rows, None], out[rows].gather(1, at)))
            out[rows, width:] = 0


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
