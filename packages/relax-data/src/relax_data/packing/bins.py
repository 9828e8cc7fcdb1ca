"""Bins under a hard cap: as few as the cap allows, those that one long sample makes costly filled first."""

import heapq
from bisect import bisect_left, insort

import numpy as np

from relax_data.packing.balance import Bins

_TRIES = 3
"""Numbers of bins that are tried before the best-fit packing decides."""
_HEAVY = 1.05
"""A round is heavy when its longest sample costs this many times an average bin: less is evened without help."""


def fill(tokens: np.ndarray, costs: np.ndarray, cap: int, *, dp_size: int, multiple_of: int) -> list[list[int]]:
    """Bins under the cap, their number a multiple of ``dp_size * multiple_of`` and as small as found.

    Args:
        tokens: int64 ``[n]``, each between 1 and ``cap``; n is at least 1.
        costs: float64 ``[n]``, not negative.
        cap: most tokens of a bin.

    Returns:
        Sample indices of each bin.
    """
    order = np.argsort(-tokens, kind="stable").tolist()
    fitted = _best_fit(tokens.tolist(), order, cap)
    multiple = dp_size * multiple_of
    most = round_up(len(fitted), multiple)
    # Two samples of more than half the cap never share a bin.
    least = max(-(-int(tokens.sum()) // cap), int((2 * tokens > cap).sum()))
    count = round_up(least, multiple)
    for _ in range(_TRIES):
        bins = _fill_count(tokens, costs, order, cap, dp_size, count)
        if bins is not None:
            return bins
        if count >= most:
            break
        count += multiple
    return _add_bins(fitted, most)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least ``n``."""
    return -(-n // multiple) * multiple


def _fill_count(
    tokens: np.ndarray, costs: np.ndarray, order: list[int], cap: int, dp_size: int, count: int
) -> list[list[int]] | None:
    """``count`` bins: first the heavy rounds, as many as leave room for the rest, then even ones. None: none found."""
    heavy = _heavy_rounds(tokens, costs, order, cap, dp_size, count) if dp_size > 1 else []
    while True:
        taken = {i for b in heavy for i in b}
        rest = [i for i in order if i not in taken]
        bins = Bins(_longest_first(tokens.tolist(), rest, count - len(heavy)), tokens, tokens.astype(np.float64), cap)
        if bins.push_under_cap():
            return heavy + bins.items
        if not heavy:
            return None
        heavy = heavy[: len(heavy) // dp_size // 2 * dp_size]


def _heavy_rounds(
    tokens: np.ndarray, costs: np.ndarray, order: list[int], cap: int, dp_size: int, count: int
) -> list[list[int]]:
    """The bins of the rounds whose longest sample alone costs more than an average bin of what is left (by ``_HEAVY``).

    Such a round waits for that sample. Its other bins get the next longest ones, and each the longest others that fit,
    since under a cap on tokens those cost most. What one round does not lose here no exchange has to win back later.
    """
    size, cost = tokens.tolist(), costs.tolist()
    left, work = count, float(costs.sum())
    heavy: list[list[int]] = []
    while left > dp_size and len(order) > dp_size and cost[order[0]] > _HEAVY * work / left:
        target = cost[order[0]]
        bins, loads = [[i] for i in order[:dp_size]], [cost[i] for i in order[:dp_size]]
        rooms = sorted((cap - size[b[0]], k) for k, b in enumerate(bins))
        others = []
        for i in order[dp_size:]:
            # The fullest bin that has room, and stays below the cost of the longest sample.
            at = bisect_left(rooms, (size[i], -1))
            while at < len(rooms) and loads[rooms[at][1]] + cost[i] > target:
                at += 1
            if at == len(rooms):
                others.append(i)
                continue
            room, k = rooms.pop(at)
            bins[k].append(i)
            loads[k] += cost[i]
            insort(rooms, (room - size[i], k))
        left, work, order = left - dp_size, work - sum(loads), others
        if len(order) < left:  # every bin is to have a sample
            break
        heavy += bins
    return heavy


def _longest_first(tokens: list[int], order: list[int], count: int) -> list[list[int]]:
    """Each sample, longest first, into the emptiest bin (Graham 1969), whatever the cap."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, b) for b in range(count)]
    for i in order:
        load, b = loads[0]
        bins[b].append(i)
        heapq.heapreplace(loads, (load + tokens[i], b))
    return bins


def _best_fit(tokens: list[int], order: list[int], cap: int) -> list[list[int]]:
    """Best-fit decreasing: each sample, longest first, into the fullest bin that has room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for i in order:
        at = bisect_left(rooms, (tokens[i], -1))
        if at == len(rooms):
            bins.append([i])
            insort(rooms, (cap - tokens[i], len(bins) - 1))
        else:
            room, b = rooms.pop(at)
            bins[b].append(i)
            insort(rooms, (room - tokens[i], b))
    return bins


def _add_bins(bins: list[list[int]], count: int) -> list[list[int]]:
    """Takes samples out of the bins that have most, until there are ``count`` bins."""
    bins = [list(b) for b in bins]
    while len(bins) < count:
        donor = max(range(len(bins)), key=lambda b: len(bins[b]))
        bins.append([bins[donor].pop()] if len(bins[donor]) > 1 else [])
    return bins
