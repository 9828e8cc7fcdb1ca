"""Cut of a packed row over context-parallel ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def zigzag_positions(cu_seqlens: Sequence[int] | np.ndarray, cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Positions of the full packed row that a context-parallel rank holds, in the order it holds them.

    Each document is cut into 2 x cp_size equal pieces and rank r takes pieces r and 2 x cp_size - 1 - r, so that under
    a causal mask all ranks have equal work.

    Args:
        cu_seqlens: int ``[documents + 1]``, borders of the documents in the full row, starting with 0; each length is
            a multiple of 2 x cp_size.

    Returns:
        int64 ``[cu_seqlens[-1] / cp_size]``.
    """
    if cp_size == 1:
        return np.arange(int(cu_seqlens[-1]), dtype=np.int64)
    borders = np.asarray(cu_seqlens)
    parts = []
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        piece, rest = divmod(end - start, 2 * cp_size)
        assert rest == 0, f"{end - start} tokens do not divide by 2 x CP {cp_size}"
        for k in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(np.arange(start + k * piece, start + (k + 1) * piece, dtype=np.int64))
    return np.concatenate(parts)
