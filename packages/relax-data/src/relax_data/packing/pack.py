"""Samples to micro-batches: under a hard token cap, as many on every data-parallel rank, evenly loaded.

Ranks of one step run in lock-step (they meet in every all-reduce, and with pipeline parallelism in every round), so
round ``k`` takes as long as the slowest ``k``-th micro-batch. :func:`pack` therefore fills ``m`` bins under the cap,
where ``m`` is the lower bound ``ceil(sum / cap)`` rounded up to what all ranks need, puts bins with samples of like
cost into one round, and exchanges samples until rounds and ranks are even. All of it is deterministic.
"""

from collections.abc import Callable, Sequence

import numpy as np

from relax_data.packing.balance import Bins, even_by_swaps
from relax_data.packing.bins import fill, round_up

Cost = Callable[[np.ndarray], np.ndarray] | Sequence[float] | np.ndarray

_DONORS = 16
"""So many of the bins next in turn give samples to a round."""


def pack(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    *,
    dp_size: int = 1,
    multiple_of: int = 1,
    cost: Cost | None = None,
    lock_step: bool = False,
) -> list[list[list[int]]]:
    """Packs samples into micro-batches of at most ``max_tokens`` tokens.

    Args:
        lengths: tokens of each sample, at least 1.
        max_tokens: hard cap of a micro-batch.
        dp_size: number of data-parallel ranks.
        multiple_of: the number of micro-batches a rank is a multiple of this (pipeline parallelism).
        cost: what is evened out over rounds and ranks: a function of the lengths, such as
            :class:`relax_data.packing.costs.CostModel`, or one number a sample. None is the number of tokens.
        lock_step: the ranks meet in every micro-batch (experts over the data-parallel ranks, sharded parameters), so
            that only rounds count: ranks are evened only as far as no round gets slower. Without it the ranks' sums are
            evened as well, at the expense of rounds where a single long sample forces them apart.

    Returns:
        For each rank a list of micro-batches, each a rising list of sample indices; every sample is in exactly one.
        All ranks have the same number. There are empty micro-batches only when there are fewer samples than
        micro-batches, whose number is a multiple of ``dp_size * multiple_of``.

    Raises:
        ValueError: a sample is longer than ``max_tokens`` (the message names its index), or an argument is no size.
    """
    tokens = _lengths(lengths, max_tokens)
    _positive(dp_size=dp_size, multiple_of=multiple_of)
    if len(tokens) == 0:
        return [[] for _ in range(dp_size)]
    costs = _costs(cost, tokens)
    bins = fill(tokens, costs, max_tokens, dp_size=dp_size, multiple_of=multiple_of)
    return _spread(Bins(bins, tokens, costs, max_tokens), dp_size, lock_step)


def pack_static(
    n_samples: int, micro_batch_size: int, *, dp_size: int = 1, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Micro-batches of at most ``micro_batch_size`` samples, in order; the same shape as :func:`pack`.

    Counts differ by at most one over ranks, and over the micro-batches of a rank.
    """
    _positive(micro_batch_size=micro_batch_size, dp_size=dp_size, multiple_of=multiple_of)
    if n_samples < 0:
        raise ValueError(f"n_samples is {n_samples}: must not be negative")
    per_rank = _cut(list(range(n_samples)), dp_size)
    count = -(-max(len(r) for r in per_rank) // micro_batch_size)
    count = -(-count // multiple_of) * multiple_of
    return [_cut(r, count) for r in per_rank]


def lower_bound(lengths: Sequence[int] | np.ndarray, max_tokens: int, multiple: int = 1) -> int:
    """``ceil(sum / max_tokens)`` rounded up to ``multiple``: no packing under the cap has fewer micro-batches."""
    return round_up(-(-int(np.sum(lengths, dtype=np.int64)) // max_tokens), multiple)


def _lengths(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> np.ndarray:
    given = np.asarray(lengths)
    integers = given.ndim == 1 and (not given.size or given.dtype.kind in "iu")
    if not integers or (given.size and max(int(given.max()), given.size * max_tokens) >= 1 << 62):
        # Half a token cut off would be over the cap unseen, and so would a sum beyond 64 bits.
        raise ValueError(
            f"lengths must be a list of integers whose sum fits 64 bits, not {given.dtype} of shape {given.shape}"
        )
    tokens = given.astype(np.int64)
    _positive(max_tokens=max_tokens)
    if len(tokens) and tokens.min() < 1:
        raise ValueError(f"sample {int(tokens.argmin())} has {int(tokens.min())} tokens: at least 1 is needed")
    if len(tokens) and tokens.max() > max_tokens:
        worst = int(tokens.argmax())
        more = int((tokens > max_tokens).sum()) - 1
        raise ValueError(
            f"sample {worst} has {int(tokens[worst])} tokens and a micro-batch holds {max_tokens}"
            + (f" (and {more} more samples are too long)" if more else "")
            + ": raise --max-tokens-per-gpu or the context-parallel size, or shorten prompts or responses"
        )
    return tokens


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: must be at least 1")


def _costs(cost: Cost | None, tokens: np.ndarray) -> np.ndarray:
    if cost is None:
        return tokens.astype(np.float64)
    costs = np.asarray(cost(tokens) if callable(cost) else cost, dtype=np.float64)
    if costs.shape != tokens.shape:
        raise ValueError(f"cost has shape {costs.shape}, there are {len(tokens)} samples")
    if not np.isfinite(costs).all() or (costs < 0).any():
        raise ValueError("cost must be finite and not negative for every sample")
    return costs


def _cut(items: list[int], n: int) -> list[list[int]]:
    """``n`` runs of neighbours whose lengths differ by at most one."""
    return [items[len(items) * i // n : len(items) * (i + 1) // n] for i in range(n)]


def _spread(bins: Bins, dp_size: int, lock_step: bool) -> list[list[list[int]]]:
    """Bins of like cost into one round, evened there, then dealt so that the ranks come out even."""
    rounds = _rounds(bins, dp_size)
    if dp_size > 1:
        rounds = _deal(bins, rounds, dp_size)
        bins.even_ranks(rounds, lock_step=lock_step)
    return [[sorted(bins.items[row[r]]) for row in rounds] for r in range(dp_size)]


def _rounds(bins: Bins, dp_size: int) -> list[list[int]]:
    """The ``dp_size`` bins with the costliest samples make a round, which is evened; then the next ones.

    What a full bin of one long sample costs cannot be had with short ones, so rounds differ in cost; within a round the
    cheaper bins are filled up to the costliest one at the expense of the rounds that follow.
    """

    def stiffest_first(b: int) -> tuple[float, float, int]:
        # A bin costs at least what its costliest sample does. Bins of small samples can become anything: they go last.
        return -bins.largest(b), -float(bins.costs[b]), b

    rest = sorted(range(len(bins)), key=stiffest_first)
    rounds = []
    while rest:
        first, rest = rest[:dp_size], rest[dp_size:]
        if dp_size > 1:
            bins.even_out(first)
            target = float(bins.costs[first].max())
            for b in sorted(first, key=stiffest_first):
                bins.raise_to(b, target, rest[:_DONORS])
            rest.sort(key=stiffest_first)
        rounds.append(first)
    return rounds


def _deal(bins: Bins, rounds: list[list[int]], dp_size: int) -> list[list[int]]:
    """In each round the costliest bin goes to the rank with least so far; the most uneven rounds are dealt first."""
    loads = np.zeros(dp_size)
    dealt: dict[int, list[int]] = {}
    spread = [float(bins.costs[s].max() - bins.costs[s].min()) for s in map(np.array, rounds)]
    for k in sorted(range(len(rounds)), key=lambda k: (-spread[k], k)):
        ranks = np.argsort(loads, kind="stable")
        by_cost = sorted(rounds[k], key=lambda b: (-bins.costs[b], b))
        row = [0] * dp_size
        for rank, b in zip(ranks.tolist(), by_cost, strict=True):
            row[rank] = b
            loads[rank] += bins.costs[b]
        dealt[k] = row
    return [dealt[k] for k in range(len(rounds))]


def balance(
    costs: Sequence[float] | np.ndarray, ranks: int, *, groups: Sequence[int] | np.ndarray | None = None
) -> list[list[int]]:
    """Deals samples to ranks so that costs are even and counts differ by at most one.

    Args:
        costs: of each sample, not negative.
        ranks: number of data-parallel ranks.
        groups: group of each sample; samples of one group stay together, and the counts of groups differ by at most
            one instead.

    Returns:
        For each rank a rising list of sample indices; every sample is in exactly one. Ranks without any are possible
        when there are fewer samples (or groups) than ranks.
    """
    _positive(ranks=ranks)
    values = _costs(costs, np.zeros(len(costs), dtype=np.int64))
    if groups is None:
        return [sorted(r) for r in _deal_evenly(values, ranks)]
    ids = np.asarray(groups)
    if ids.shape != values.shape:
        raise ValueError(f"groups has shape {ids.shape}, there are {len(values)} samples")
    _, of_sample = np.unique(ids, return_inverse=True)
    members: dict[int, list[int]] = {}
    for i, g in enumerate(of_sample.tolist()):
        members.setdefault(g, []).append(i)
    totals = np.array([values[members[g]].sum() for g in range(len(members))])
    return [sorted(i for g in r for i in members[g]) for r in _deal_evenly(totals, ranks)]


def _deal_evenly(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Turns of one sample a rank, costliest first, each turn's costliest to the cheapest rank; then exchanges."""
    order = np.argsort(-costs, kind="stable").tolist()
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    for k in range(0, len(order), ranks):
        cheapest = np.argsort(loads, kind="stable").tolist()
        for i, rank in zip(order[k : k + ranks], cheapest, strict=False):
            dealt[rank].append(i)
            loads[rank] += costs[i]
    even_by_swaps(dealt, costs)
    return dealt
