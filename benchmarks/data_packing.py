"""How well and how fast samples are packed, against two textbook methods in the same run.

    python benchmarks/data_packing.py

Lengths are log-normal, correlated within a group of 16 responses to one prompt, at most 8k or 32k, the cap equal to
the maximum. Cost is the number of tokens, or the FLOPs of a 4 B model (36 layers, 32 heads of 128). Each figure is
the worst of ``--seeds`` draws, but the time, which is the median of CPU time on one core.

- bins: micro-batches over the lower bound ceil(sum / cap) rounded up to a multiple of the ranks
- over cap: micro-batches above the cap (of Karmarkar-Karp, which knows none)
- ranks: costliest rank over the mean, minus 1
- lock-step: sum over slots of the costliest rank, over the sum of the means, minus 1
"""

import argparse
import heapq
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
from relax_data.packing import CostModel, lower_bound, pack

FOUR_B = CostModel.from_shape(parameters=3.6e9, num_layers=36, num_attention_heads=32, head_dim=128)
Packed = list[list[list[int]]]


def grouped_lengths(n: int, longest: int, seed: int) -> np.ndarray:
    """int64 ``[n]``: log-normal, 16 responses of a group share a centre."""
    rng = np.random.default_rng(seed)
    centre = np.repeat(rng.normal(np.log(longest / 8), 0.7, -(-n // 16)), 16)[:n]
    return np.clip(np.exp(centre + rng.normal(0, 0.5, n)), 32, longest).astype(np.int64)


def ours(lengths: np.ndarray, cap: int, ranks: int, costs: np.ndarray) -> Packed:
    return pack(lengths, cap, dp_size=ranks, cost=costs)


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
        ("first-fit decreasing", first_fit_decreasing),
        ("Karmarkar-Karp", karmarkar_karp),
    ]
    print("| longest | n | ranks | cost | method | bins a rank | bins | over cap | ranks % | lock-step % | ms |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    cases = [(512, 4), (512, 8), (512, 16), (2048, 32)]
    for longest, (n, ranks), by in itertools.product((8192, 32768), cases, ("tokens", "FLOPs")):
        for name, method in methods:
            rows, seconds = [], []
            for seed in seeds:
                lengths = grouped_lengths(n, longest, seed)
                costs = lengths.astype(float) if by == "tokens" else FOUR_B(lengths)
                start = time.process_time()
                packed = method(lengths, longest, ranks, costs)
                seconds.append(time.process_time() - start)
                rows.append(figures(packed, lengths, longest, ranks, costs))
            worst = np.array(rows).max(axis=0)
            print(
                f"| {longest} | {n} | {ranks} | {by} | {name} | {worst[4]:.0f} | {worst[0]:.3f} | {worst[1]:.0f} "
                f"| {worst[2]:.3f} | {worst[3]:.2f} | {1e3 * statistics.median(seconds):.0f} |"
            )


if __name__ == "__main__":
    main()
