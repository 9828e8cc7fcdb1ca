"""Rows of a token's experts brought together: the adjoint of giving each of its experts a copy of the token."""

import torch
import triton
import triton.language as tl


@triton.jit
def _sums(rows, places, out, size, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + number).to(tl.int64)
        total += tl.load(rows + place * size + columns, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * size + columns, total, mask=inside)


def sums(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``out[t] = sum over k of rows[places[t, k]]``, added in float32.

    Args:
        rows: contiguous ``[n, size]``.
        places: int64 contiguous ``[tokens, k]``.
    """
    tokens, per_token = places.shape
    out = rows.new_empty(tokens, rows.shape[1])
    block = min(1024, triton.next_power_of_2(rows.shape[1]))
    if tokens:
        _sums[(tokens, triton.cdiv(rows.shape[1], block))](
            rows, places, out, rows.shape[1], PER_TOKEN=per_token, BLOCK=block
        )
    return out
