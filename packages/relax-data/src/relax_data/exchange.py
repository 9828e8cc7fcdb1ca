"""Bins of samples that exchange members until their loads are even, never above the token cap."""

from collections.abc import Sequence

import numpy as np

_GOOD = 5e-4
"""Relative gap within a slot, and between ranks, below which nothing more is to be won."""
_PARTNERS = 12
"""So many of the lightest bins are tried as partners of the heaviest one."""


class Bins:
    """Some bins of sample indices with two loads each: tokens, which are capped, and cost, which is evened out.

    Args:
        items: sample indices of each bin; taken over and changed.
        tokens: int64 ``[n]`` of the samples.
        cost: float64 ``[n]`` of the samples.
        cap: most tokens of a bin.
    """

    def __init__(self, items: list[list[int]], tokens: np.ndarray, cost: np.ndarray, cap: int):
        self.items = items
        self.cap = cap
        self._tokens, self._cost = tokens, cost
        self.tokens = np.array([int(tokens[b].sum()) for b in items], dtype=np.int64)
        self.costs = np.array([float(cost[b].sum()) for b in items])

    def __len__(self) -> int:
        return len(self.items)

    def push_under_cap(self) -> bool:
        """Exchanges samples of bins over the cap with lighter ones; False when that leads nowhere."""
        for _ in range(20 * len(self.items) + 20):
            heaviest = int(self.tokens.argmax())
            if self.tokens[heaviest] <= self.cap:
                return True
            lightest = np.argsort(self.tokens, kind="stable")[:_PARTNERS]
            if not any(self._even_tokens(heaviest, int(b)) for b in lightest if b != heaviest):
                return False
        return False

    def even_out(self, chosen: Sequence[int]) -> None:
        """Evens the cost of the chosen bins, costliest against cheapest first."""
        group = np.array(chosen)
        for _ in range(6 * len(group)):
            by_cost = group[np.argsort(self.costs[group], kind="stable")]
            top = int(by_cost[-1])
            if self.costs[top] - self.costs[by_cost[0]] <= _GOOD * self.costs[top]:
                return
            partners = [int(b) for b in by_cost[:_PARTNERS] if b != top]
            if not any(self._even_costs(top, b, self.costs[top] - self.costs[b]) for b in partners):
                return

    def even_ranks(self, slots: Sequence[Sequence[int]]) -> None:
        """Evens the sum of each rank's bins by exchanges within slots, which keeps the slots about as even.

        Args:
            slots: for each slot the bin of each rank.
        """
        table = np.array(slots)
        for _ in range(8 * table.shape[1]):
            loads = self.costs[table].sum(axis=0)
            order = np.argsort(loads, kind="stable")
            top = int(order[-1])
            if loads[top] - loads[order[0]] <= _GOOD * loads[top]:
                return
            if not any(self._even_rank_pair(table, top, int(r), loads[top] - loads[r]) for r in order[:-1][:_PARTNERS]):
                return

    def _even_rank_pair(self, table: np.ndarray, top: int, low: int, gap: float) -> bool:
        """The one exchange, in whatever slot, that evens the two ranks best."""
        best: tuple[float, int, int, int] | None = None
        for k in range(len(table)):
            found = self._best_exchange(int(table[k, top]), int(table[k, low]), gap, self._cost)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], k, found[1], found[2])
                if best[0] <= 0.05 * gap:
                    break
        if best is None:
            return False
        _, k, i, j = best
        self._exchange(int(table[k, top]), int(table[k, low]), i, j)
        return True

    def _even_tokens(self, heavy: int, light: int) -> bool:
        gap = float(self.tokens[heavy] - self.tokens[light])
        found = self._best_exchange(heavy, light, gap, self._tokens, capped=False)
        if found is None:
            return False
        self._exchange(heavy, light, found[1], found[2])
        return True

    def _even_costs(self, heavy: int, light: int, gap: float) -> bool:
        found = self._best_exchange(heavy, light, gap, self._cost)
        if found is None:
            return False
        self._exchange(heavy, light, found[1], found[2])
        return True

    def _best_exchange(
        self, heavy: int, light: int, gap: float, weight: np.ndarray, *, capped: bool = True
    ) -> tuple[float, int, int] | None:
        """The exchange that makes ``gap`` (heavy minus light) smallest: the gap left, and a position in each bin.

        A position equal to the number of members stands for none: the other member just moves.
        """
        a, b = self.items[heavy], self.items[light]
        if not a:
            return None
        weight_a, weight_b = np.append(weight[a], 0), np.append(weight[b], 0)
        left = np.abs(gap - 2.0 * (weight_a[:, None] - weight_b[None, :]))
        if capped:
            moved = np.append(self._tokens[a], 0)[:, None] - np.append(self._tokens[b], 0)[None, :]
            left[(self.tokens[light] + moved > self.cap) | (self.tokens[heavy] - moved > self.cap)] = np.inf
        if len(a) == 1:
            left[0, -1] = np.inf
        if len(b) == 1:
            left[-1, 0] = np.inf
        at = int(left.argmin())
        i, j = divmod(at, left.shape[1])
        value = float(left[i, j])
        return (value, i, j) if value < abs(gap) * (1 - 1e-9) else None

    def _exchange(self, heavy: int, light: int, i: int, j: int) -> None:
        a, b = self.items[heavy], self.items[light]
        out = [a.pop(i)] if i < len(a) else []
        back = [b.pop(j)] if j < len(b) else []
        a += back
        b += out
        for which in (heavy, light):
            # Summed anew: differences would drift.
            self.tokens[which] = self._tokens[self.items[which]].sum()
            self.costs[which] = self._cost[self.items[which]].sum()


def even_by_swaps(bins: list[list[int]], costs: np.ndarray) -> None:
    """Swaps single members between the costliest bin and others, so that no bin's number of members changes.

    Args:
        bins: sample indices, changed in place.
        costs: float64 ``[n]`` of the samples.
    """
    loads = np.array([costs[b].sum() for b in bins])
    for _ in range(20 * len(bins)):
        order = np.argsort(loads, kind="stable")
        top = int(order[-1])
        if loads[top] - loads[order[0]] <= 1e-6 * loads[top]:
            return
        if not any(_swap(bins, costs, loads, top, int(b)) for b in order[:-1][:_PARTNERS]):
            return


def _swap(bins: list[list[int]], costs: np.ndarray, loads: np.ndarray, top: int, low: int) -> bool:
    a, b = bins[top], bins[low]
    gap = float(loads[top] - loads[low])
    if not a or not b or gap <= 0:
        return False
    # For each member of the costly bin the partner that is half the gap cheaper, found in sorted order.
    cost_a, order_b = costs[a], np.argsort(costs[b], kind="stable")
    sorted_b = costs[b][order_b]
    at = np.searchsorted(sorted_b, cost_a - gap / 2)
    best = (gap * (1 - 1e-9), -1, -1)
    for shift in (-1, 0):
        partner = np.clip(at + shift, 0, len(b) - 1)
        left = np.abs(gap - 2 * (cost_a - sorted_b[partner]))
        i = int(left.argmin())
        if left[i] < best[0]:
            best = (float(left[i]), i, int(order_b[partner[i]]))
    _, i, j = best
    if i < 0:
        return False
    a[i], b[j] = b[j], a[i]
    loads[top], loads[low] = costs[a].sum(), costs[b].sum()
    return True
