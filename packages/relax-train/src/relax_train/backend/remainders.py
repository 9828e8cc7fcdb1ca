"""Halves what a float32 master weight needs to leave the device, where its bfloat16 parameter is kept anyway.

Of a master weight its parameter is the rounding: the bits of the master are those of the parameter, shifted to the
upper half, plus a small difference. The lower 16 bits of the master, read as a signed number, are that difference::

    parameter + 0x0000   0x3f81|0000   + (+0x1234)  =  0x3f81|1234      it was rounded down
                         0x3f81|0000   + (-0x1234)  =  0x3f80|edcc      it was rounded up

A few masters do not come back so, and are kept as they are, with their places, on the device. There are the ties that
were rounded down, whose difference +0x8000 is one too large for 16 bits (about one weight in 131,072); beside them
whatever else is not the rounding. Which they are is not reasoned about: each master is tried. When they are too many
for their list, the master has to travel whole.
"""

import dataclasses
from typing import Any

import torch

from relax_train.backend.optimizer import StateShard

SMALLEST = 1 << 20
"""Elements of a master weight that is worth the handful of kernels."""
LISTED = 1 << 14
"""One master in so many may be on the list: eight times what ties need."""
PIECE = 1 << 24
"""Elements that come back at a time, through 2 bytes of device memory for each."""


@dataclasses.dataclass(frozen=True)
class Remainder:
    """What brings a master weight back, together with its parameter, which must be the same then.

    Attributes:
        master: float32 ``[elements]``.
        weight: the parameter's bits for these elements, int16.
        low: the lower half of the master's bits, int16. It lies in the gradient: it is good until that changes.
        places: where masters are that do not come back from ``weight`` and ``low``; what is left of the list is 0.
        values: the bits of the masters there, int32.
    """

    master: torch.Tensor
    weight: torch.Tensor
    low: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor

    @property
    def overflow(self) -> torch.Tensor:
        """Not 0 when the list is full, and the master may not come back; it is on the device."""
        return self.places[-1]

    def begin(self) -> None:
        """Makes the master anew, from its parameter alone, which may change after it."""
        shift = torch.full((1,), 16, dtype=torch.int32, device=self.master.device)
        torch.bitwise_left_shift(self.weight, shift, out=self.master.view(torch.int32))

    def add(self, start: int, low: torch.Tensor) -> None:
        """Adds a part of the lower half, which begins at an element and lies on the host; in pieces."""
        bits = self.master.view(torch.int32)
        for piece in low.split(PIECE):
            bits[start : start + len(piece)] += piece.to(bits.device, non_blocking=True)
            start += len(piece)

    def finish(self) -> None:
        """Puts in the masters that were kept as they are."""
        self.master.view(torch.int32)[self.places] = self.values


def remainder(shard: StateShard) -> Remainder | None:
    """The remainder of a shard's master weight; None when the master is small. The gradient is lost.

    Nothing here waits for the device, and nothing is allocated but the short list: the gradient of these elements has
    as many bytes as the two halves that are needed.
    """
    parameter: Any = shard.param  # megatron adds its gradient
    master = shard.tensors["master"]
    size = len(master)
    if size < SMALLEST:
        return None
    assert parameter.dtype == torch.bfloat16
    assert parameter.main_grad.dtype == master.dtype == torch.float32
    weight, gradient = (
        whole.detach().view(-1)[shard.start : shard.start + size].view(torch.int16)
        for whole in (parameter, parameter.main_grad)
    )
    halves = master.view(torch.int16)
    low, wrong = gradient[:size], gradient[size:]
    low.copy_(halves[0::2])
    torch.bitwise_right_shift(low, 15, out=wrong)  # what a sum with it carries into the upper half: -1 or 0
    wrong += weight
    wrong -= halves[1::2]
    places = torch.nonzero_static(wrong, size=size // LISTED + 2, fill_value=0).squeeze(1)
    return Remainder(master, weight, low, places, master.view(torch.int32)[places])
