"""Samples into micro-batches under a token cap, with equal work for every rank.

Door: :func:`pack`, :func:`pack_static`, :func:`balance` and :class:`CostModel`.
"""

from relax_data.packing.costs import CostModel
from relax_data.packing.pack import balance, lower_bound, pack, pack_static

__all__ = ["CostModel", "balance", "lower_bound", "pack", "pack_static"]
