"""Bins of samples that exchange members until their loads are even, never above the token cap."""

from collections.abc import Sequence

import numpy as np

_GOOD = 2e-3
"""Relative gap within a round, and between ranks, below which nothing more is to be won."""
_RANKS_GOOD, _RANKS_GOOD_FEW, _FEW_ROUNDS = 9e-4, 1.8e-2, 8
"""How far the costliest rank may be above the mean, with at least so many rounds, and with fewer: evening the ranks
further costs more in lock-step than it wins."""
_RANKS_LEFT = 0.98
"""An exchange is worth it when it leaves at most this much of the gap between two ranks."""
_ALLOWANCES = ((0.01, False), (0.05, False), (np.inf, False), (np.inf, True))
"""By how much a round's costliest bin may become costlier for the sake of even ranks, and whether one sample may be
exchanged for two: under a tight cap on tokens that is what makes a full bin cheaper."""
_MOST_EXCHANGES = 1 << 20
"""Bins with more exchanges of one sample for two are fine-grained enough without, and the table of them is memory."""
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
        # A sample of no tokens and no cost behind the others stands for no member.
        self._tokens, self._cost = np.append(tokens, 0), np.append(cost, 0.0)
        self._none = [len(tokens)]
        self._members: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._largest: dict[int, float] = {}
        self.tokens = np.array([int(tokens[b].sum()) for b in items], dtype=np.int64)
        self.costs = np.array([float(cost[b].sum()) for b in items])

    def __len__(self) -> int:
        return len(self.items)

    def largest(self, which: int) -> float:
        """Cost of the costliest member of a bin; 0 for an empty one."""
        if which not in self._largest:
            self._largest[which] = float(self._with_none(which)[1].max())
        return self._largest[which]

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

    def raise_to(self, low: int, target: float, donors: Sequence[int]) -> None:
        """Brings the cost of bin ``low`` up to ``target``, never above, with members of other bins."""
        for _ in range(6):
            gap = target - float(self.costs[low])
            if gap <= _GOOD * target or not self._raise_once(low, gap, donors):
                return

    def _raise_once(self, low: int, gap: float, donors: Sequence[int]) -> bool:
        own = sorted(self.items[low], key=lambda i: (self._tokens[i], i))
        theirs = np.array([i for d in donors for i in self.items[d]], dtype=np.int64)
        if not len(theirs):
            return False
        sizes = [len(self.items[d]) for d in donors]
        bin_of = np.repeat(np.array(donors), sizes)
        # What goes back for a member of theirs: nothing, one of ours, or our two, three, ... shortest. The last kind
        # raises a bin that is full: one long sample costs more than short ones of as many tokens.
        backs = [[], *([i] for i in own), *(own[:k] for k in range(2, len(own)))]
        back_cost = _sums_of_backs(self._cost[own])
        back_tokens = _sums_of_backs(self._tokens[own])
        gain = self._cost[theirs][None, :] - back_cost[:, None]
        moved = self._tokens[theirs][None, :] - back_tokens[:, None]
        fits = (gain > 0) & (gain <= gap) & (self.tokens[low] + moved <= self.cap)
        fits &= self.tokens[bin_of][None, :] - moved <= self.cap
        fits[0] &= np.repeat(np.array(sizes), sizes) > 1
        gain = np.where(fits, gain, 0.0)
        i, at = divmod(int(gain.argmax()), len(theirs))
        if gain[i, at] <= 0:
            return False
        self._give(low, int(bin_of[at]), backs[i], [int(theirs[at])])
        return True

    def even_ranks(self, rounds: list[list[int]], *, lock_step: bool = False) -> None:
        """Evens the sum of each rank's bins: by swaps of whole bins within a round, then by exchanges of samples there.

        An exchange that makes a round's costliest bin costlier costs time in lock-step, so those that do so by little
        come first.

        Args:
            rounds: for each round the bin of each rank; changed in place.
            lock_step: no round's costliest bin may become costlier.
        """
        table = np.array(rounds)
        good = _RANKS_GOOD if len(table) >= _FEW_ROUNDS else _RANKS_GOOD_FEW
        for allowance, pairs in ((0.0, False),) if lock_step else _ALLOWANCES:
            for _ in range(10 * table.shape[1]):
                loads = self.costs[table].sum(axis=0)
                order = np.argsort(loads, kind="stable")
                top = int(order[-1])
                if loads[top] <= (1 + good) * loads.mean():
                    rounds[:] = table.tolist()
                    return
                others = order[:-1][:_PARTNERS]
                gaps = loads[top] - loads[others]
                if not self._swap_bins(table, top, others, gaps) and not any(
                    self._even_rank_pair(table, top, int(r), float(gap), allowance, pairs)
                    for r, gap in zip(others, gaps, strict=True)
                ):
                    break
        rounds[:] = table.tolist()

    def _swap_bins(self, table: np.ndarray, top: int, others: np.ndarray, gaps: np.ndarray) -> bool:
        """Swaps the bins of two ranks in the round where that evens them best; the rounds stay as they are.

        The partner is the first of ``others`` with whom that leaves less than 0.7 of their gap.
        """
        left = np.abs(gaps - 2.0 * (self.costs[table[:, [top]]] - self.costs[table[:, others]]))
        good = np.flatnonzero(left.min(axis=0) < 0.7 * gaps)
        if not len(good):
            return False
        partner = int(good[0])
        k = int(left[:, partner].argmin())
        pair = [top, int(others[partner])]
        table[k, pair] = table[k, pair[::-1]]
        return True

    def _even_rank_pair(self, table: np.ndarray, top: int, low: int, gap: float, allowance: float, pairs: bool) -> bool:
        """The one exchange, in whatever round, that evens the two ranks best."""
        best: tuple[float, int, list[int], list[int]] | None = None
        # A sum, not a product: an allowance without bound on a round without cost.
        costliest = self.costs[table].max(axis=1)
        ceilings = costliest + (allowance * costliest if np.isfinite(allowance) else np.inf)
        for k, ceiling in enumerate(ceilings.tolist()):
            a, b = int(table[k, top]), int(table[k, low])
            if ceiling - self.costs[b] < 0.5 * (1 - _RANKS_LEFT) * gap:  # too little can go there
                continue
            found = self._best_exchange(a, b, gap, ceiling=ceiling, pairs=pairs)
            if found is not None and (best is None or found[0] < best[0]):
                best = (found[0], k, found[1], found[2])
                if best[0] <= 0.1 * gap:
                    break
        if best is None or best[0] > _RANKS_LEFT * gap:
            return False
        _, k, given, taken = best
        self._give(int(table[k, top]), int(table[k, low]), given, taken)
        return True

    def _even_tokens(self, heavy: int, light: int) -> bool:
        gap = float(self.tokens[heavy] - self.tokens[light])
        found = self._best_exchange(heavy, light, gap, by_cost=False, capped=False)
        return found is not None and self._give(heavy, light, *found[1:])

    def _even_costs(self, heavy: int, light: int, gap: float) -> bool:
        found = self._best_exchange(heavy, light, gap)
        return found is not None and self._give(heavy, light, *found[1:])

    def _best_exchange(
        self,
        heavy: int,
        light: int,
        gap: float,
        *,
        by_cost: bool = True,
        capped: bool = True,
        ceiling: float | None = None,
        pairs: bool = False,
    ) -> tuple[float, list[int], list[int]] | None:
        """The exchange that makes ``gap`` (heavy minus light) smallest: the gap left, what heavy gives, what it gets.

        One of the two may be nothing: then the other's member just moves. ``ceiling`` bounds the cost that the light
        bin may come to; with ``pairs`` the light bin may give two.
        """
        a, b = self.items[heavy], self.items[light]
        if not a:
            return None
        tokens_a, cost_a = self._with_none(heavy)
        tokens_b, cost_b = self._with_none(light)
        pairs = pairs and (len(a) + 1) * len(b) * (len(b) - 1) // 2 <= _MOST_EXCHANGES
        if pairs:
            first, second = np.triu_indices(len(b), 1)
            tokens_b = np.concatenate([tokens_b, tokens_b[first] + tokens_b[second]])
            cost_b = np.concatenate([cost_b, cost_b[first] + cost_b[second]])
        loads_a, loads_b = (cost_a, cost_b) if by_cost else (tokens_a, tokens_b)
        left = (gap - 2.0 * loads_a)[:, None] + 2.0 * loads_b
        np.abs(left, out=left)
        if ceiling is not None:
            np.putmask(left, cost_a[:, None] - cost_b > ceiling - self.costs[light], np.inf)
        if capped:
            moved = tokens_a[:, None] - tokens_b
            np.putmask(left, moved > self.cap - self.tokens[light], np.inf)
            np.putmask(left, moved < self.tokens[heavy] - self.cap, np.inf)
        if len(a) == 1:
            left[0, -1] = np.inf
        if len(b) == 1:
            left[-1, 0] = np.inf
        if len(b) == 2 and pairs:
            left[-1, -1] = np.inf
        i, j = divmod(int(left.argmin()), left.shape[1])
        if not left[i, j] < abs(gap) * (1 - 1e-9):
            return None
        taken = b[j : j + 1] if j <= len(b) else [b[k[j - len(b) - 1]] for k in (first, second)]
        return float(left[i, j]), a[i : i + 1], taken

    def _with_none(self, which: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and costs of the members of a bin, and a zero behind them that stands for no member."""
        if which not in self._members:
            index = np.array(self.items[which] + self._none)
            self._members[which] = (self._tokens[index], self._cost[index])
        return self._members[which]

    def _give(self, a: int, b: int, from_a: list[int], from_b: list[int]) -> bool:
        """Bin ``a`` gives ``from_a`` and gets ``from_b``; True, as an exchange that was made."""
        self.items[a] = [i for i in self.items[a] if i not in from_a] + from_b
        self.items[b] = [i for i in self.items[b] if i not in from_b] + from_a
        for which in (a, b):
            self._members.pop(which, None)
            self._largest.pop(which, None)
            # Summed anew: differences would drift.
            tokens, cost = self._with_none(which)
            self.tokens[which], self.costs[which] = tokens.sum(), cost.sum()
        return True


def _sums_of_backs(own: np.ndarray) -> np.ndarray:
    """Nothing, each one, the first two, the first three, ... but not all."""
    return np.concatenate([np.zeros(1, own.dtype), own, np.cumsum(own)[1:-1]])


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
