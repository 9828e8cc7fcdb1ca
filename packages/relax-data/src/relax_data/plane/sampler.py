"""The order in which TransferQueue gives out rows. Imports TransferQueue; its controller imports this by name."""

from typing import Any

from transfer_queue import BaseSampler


class OldestFirst(BaseSampler):
    """Gives out the rows that were put first.

    TransferQueue's own order is that of its internal indexes, and those of cleared rows are used again: a new row could
    pass an older one, which would go stale behind it. Our row ids rise with time.
    """

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, partition: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Picks the ``batch_size`` oldest of the ready rows; returns them as taken and as consumed."""
        keys = partition.revert_keys_mapping
        oldest = sorted(ready_indexes, key=lambda index: int(keys[index]))[:batch_size]
        return oldest, oldest
