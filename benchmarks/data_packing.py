"""Measures how well and how fast samples are packed, against two textbook methods in the same run.

    python benchmarks/data_packing.py

Lengths are log-normal, correlated within a group of 16 responses to one prompt, at most 8k or 32k, the cap equal to
the maximum. Cost is the number of tokens, or the FLOPs of a 4 B model (36 layers, 32 heads of 128). Each figure is
the worst of ``--seeds`` draws, but the time on one core: CPU time of the best of three rounds (what else runs on the
machine only makes rounds slower), the median of the draws. The limits need scipy.

- bins: micro-batches over the lower bound ceil(sum / cap) rounded up to a multiple of the ranks
- over cap: micro-batches above the cap (of Karmarkar-Karp, which knows none)
- ranks: costliest rank over the mean, minus 1
- lock-step: sum over rounds of the costliest rank, over the sum of the means, minus 1
- limit: what no packing under the cap can undercut in lock-step, whatever its number of micro-batches
- limit, even: the same for a packing whose ranks all cost the same (see :func:`limits`)
"""

import argparse
import heapq
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
from relax_data.packing.costs import CostModel
from relax_data.packing.pack import lower_bound, pack

FOUR_B = CostModel.from_shape(parameters=3.6e9, num_layers=36, num_attention_heads=32, head_dim=128)
Packed = list[list[list[int]]]
ROUNDS = 3


def grouped_lengths(n: int, longest: int, seed: int) -> np.ndarray:
    """int64 ``[n]``: log-normal, 16 responses of a group share a centre."""
    rng = np.random.default_rng(seed)
    centre = np.repeat(rng.normal(np.log(longest / 8), 0.7, -(-n // 16)), 16)[:n]
    return np.clip(np.exp(centre + rng.normal(0, 0.5, n)), 32, longest).astype(np.int64)


def ours(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> Packed:
    return pack(lengths, cap, dp_size=ranks, cost=costs)


def ours_in_lock_step(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> Packed:
    return pack(lengths, cap, dp_size=ranks, cost=costs, lock_step=True)


def first_fit_decreasing(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> Packed:
    """First-fit decreasing, bins dealt to the ranks in turn, costliest first; empty ones fill up the last turn."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for i in np.argsort(-lengths, kind="stable").tolist():
        at = next((b for b, room in enumerate(rooms) if room >= lengths[i]), None)
        if at is None:
            bins.append([i])
            rooms.append(cap - int(lengths[i]))
        else:
            bins[at].append(i)
            rooms[at] -= int(lengths[i])
    bins.sort(key=lambda b: -float(costs[b].sum()))
    bins += [[]] * (-len(bins) % ranks)
    return [bins[r::ranks] for r in range(ranks)]


def karmarkar_karp(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> Packed:
    """Largest differencing of costs into as many sets as the lower bound says; it knows no cap."""
    count = lower_bound(lengths, cap, ranks)
    tie = itertools.count()
    heap = []
    for i, cost in enumerate(costs.tolist()):
        heap.append((-cost, next(tie), [(cost, [i])] + [(0.0, [])] * (count - 1)))
    heapq.heapify(heap)
    while len(heap) > 1:
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(tie), merged))
    sets = [s for _, s in heap[0][2]]
    return [sets[r::ranks] for r in range(ranks)]


def most_cost(lengths: np.ndarray, cap: int, costs: np.ndarray, bins: int) -> float:
    """An upper bound of what ``bins`` bins under the cap can cost together.

    A linear program over the fraction of each sample that is in them. Its constraints are dual feasible functions of
    the share ``x`` of the cap that a sample takes, which sum to at most 1 over a bin (Fekete and Schepers 2001,
    "New classes of fast lower bounds for bin packing problems", theorems 1 and 2): at most k samples of more than
    ``1 / (k + 1)``; a sample of more than ``1 - e`` excludes those of ``e`` and more.
    """
    from scipy.optimize import linprog

    share = lengths / cap
    rows = [share]
    for k in range(1, 6):
        # In integers, so that (k + 1) * x is known to be whole.
        whole, rest = np.divmod((k + 1) * lengths, cap)
        rows.append(np.where(rest == 0, share, whole / k))
    for e in range(1, 21):  # fortieths of the cap
        rows.append(np.where(40 * lengths < e * cap, 0.0, np.where(40 * lengths > (40 - e) * cap, 1.0, share)))
    scale = costs.sum()
    found = linprog(-costs / scale, A_ub=np.array(rows), b_ub=np.full(len(rows), bins), bounds=(0, 1), method="highs")
    return -float(found.fun) * float(scale)


def limits(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> tuple[float, float]:
    """Lower bounds of the lock-step loss, in percent: of any packing, and of one with even ranks.

    Samples of more than half the cap are in bins of their own, so the costliest bins of ``j`` slowest rounds cost at
    least what samples 1, 1 + ranks, 1 + 2 * ranks, ... cost, while all bins of these rounds together cost at most
    :func:`most_cost`: the difference is lost. In the round of the costliest sample some bin holds none of the
    ``ranks - 1`` longest and costs at most ``h``; when its rank is to come out even, the other rounds make up for it,
    and they are no shorter than the rest of that rank: all rounds take at least the mean and the costliest sample less
    ``h``.
    """
    order = np.argsort(-lengths, kind="stable")
    total, slowest, any_packing = float(costs.sum()), 0.0, 0.0
    for j, first in enumerate(order[::ranks].tolist(), start=1):
        if j > 1 and 2 * lengths[first] <= cap:
            break
        slowest += float(costs[first])
        any_packing = max(any_packing, (ranks * slowest - most_cost(lengths, cap, costs, j * ranks)) / total)
    others = order[ranks - 1 :]
    lowest = most_cost(lengths[others], cap, costs[others], 1)
    even_ranks = (float(costs[order[0]]) - lowest) * ranks / total
    return 100 * any_packing, 100 * max(any_packing, even_ranks)


def figures(packed: Packed, lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> list[float]:
    loads = np.array([[costs[b].sum() if b else 0.0 for b in rank] for rank in packed])
    tokens = np.array([[lengths[b].sum() if b else 0 for b in rank] for rank in packed])
    by_rank = loads.sum(axis=1)
    return [
        loads.size / lower_bound(lengths, cap, ranks),
        float((tokens > cap).sum()),
        100 * (by_rank.max() / by_rank.mean() - 1),
        100 * (loads.max(axis=0).sum() / loads.mean(axis=0).sum() - 1),
        loads.shape[1],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    methods: list[tuple[str, Callable[..., Packed]]] = [
        ("ours", ours),
        ("ours, lock_step", ours_in_lock_step),
        ("first-fit decreasing", first_fit_decreasing),
        ("Karmarkar-Karp", karmarkar_karp),
    ]
    print(
        "| longest | n | ranks | cost | method | bins a rank | bins | over cap | ranks % | lock-step % | limit % "
        "| limit, even % | above limit | above limit, even | ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    cases = [(512, 4), (512, 8), (512, 16), (2048, 32)]
    for longest, (n, ranks), by in itertools.product((8192, 32768), cases, ("tokens", "FLOPs")):
        draws = [grouped_lengths(n, longest, seed) for seed in seeds]
        costs = [lengths.astype(float) if by == "tokens" else FOUR_B(lengths) for lengths in draws]
        bounds = np.array([limits(lengths, longest, ranks, c) for lengths, c in zip(draws, costs, strict=True)])
        for name, method in methods:
            rows, seconds = [], []
            for lengths, c in zip(draws, costs, strict=True):
                times = []
                for _ in range(ROUNDS):
                    start = time.process_time()
                    packed = method(lengths, longest, ranks, c)
                    times.append(time.process_time() - start)
                seconds.append(min(times))
                rows.append(figures(packed, lengths, longest, ranks, c))
            worst = np.array(rows).max(axis=0)
            above = (np.array(rows)[:, 3:4] - bounds).max(axis=0)
            print(
                f"| {longest} | {n} | {ranks} | {by} | {name} | {worst[4]:.0f} | {worst[0]:.3f} | {worst[1]:.0f} "
                f"| {worst[2]:.3f} | {worst[3]:.2f} | {bounds[:, 0].max():.2f} | {bounds[:, 1].max():.2f} "
                f"| {above[0]:.2f} | {above[1]:.2f} | {1e3 * statistics.median(seconds):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
