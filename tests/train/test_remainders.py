"""A master weight comes back from its parameter and 16 bits, bit for bit, whatever the bits are."""

from typing import Any, cast

import pytest
import torch

SPECIAL = (0x0000, 0x0001, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xEDCC, 0xFFFE, 0xFFFF)
"""Lower halves of a master: at both ends, and on and beside the tie."""


def shard(master: torch.Tensor, weight: torch.Tensor, start: int = 0) -> Any:
    """A shard with these masters, that begins at an element of its parameter."""
    from relax_train.backend.optimizer import StateShard

    assert weight.dtype == torch.bfloat16
    whole = torch.zeros(start + len(weight) + 3, dtype=torch.bfloat16)
    whole[start : start + len(weight)] = weight
    param = cast(Any, torch.nn.Parameter(whole))
    param.main_grad = torch.full(whole.shape, 7.0)
    return StateShard(param, start, {"master": master})


def floats(bits: torch.Tensor) -> torch.Tensor:
    """float32 with these bits, int64 below 2**32."""
    return torch.where(bits < 2**31, bits, bits - 2**32).to(torch.int32).view(torch.float32)


def every_upper_half() -> torch.Tensor:
    """float32 of all upper halves with the special lower ones: zeros, denormals, infinities, NaNs, ties."""
    bits = (torch.arange(65536)[:, None] << 16) + torch.tensor(SPECIAL)
    return floats(bits.flatten())


def comes_back(found: Any, cut: int) -> bool:
    """Whether the master is the same after it was lost; the lower half returns in parts of ``cut`` elements."""
    before, low = found.master.view(torch.int32).clone(), found.low.clone()
    found.master.view(torch.int32).fill_(-1)
    found.low.fill_(-1)
    found.begin()
    found.weight.fill_(-1)  # as a reference model takes its place
    for start in range(0, len(low), cut):
        found.add(start, low[start : start + cut])
    found.finish()
    return torch.equal(found.master.view(torch.int32), before)


def test_every_rounding_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_train.backend import remainders

    monkeypatch.setattr(remainders, "SMALLEST", 1)
    monkeypatch.setattr(remainders, "LISTED", 1)
    monkeypatch.setattr(remainders, "PIECE", 999)
    master = every_upper_half()
    found = remainders.remainder(shard(master, master.bfloat16(), start=5))
    assert found is not None
    assert found.overflow == 0
    assert found.low.nbytes * 2 == master.nbytes
    # Only ties that were rounded down to even are on the list, and what is not a number.
    bits = master.view(torch.int32)
    ties = ((bits & 0xFFFF) == 0x8000) & ((bits >> 16) % 2 == 0) & ~master.isnan()
    listed = torch.zeros(len(master), dtype=torch.bool)
    listed[found.places] = True
    listed[0] = False  # what is left of the list
    assert torch.equal(listed & ~master.isnan(), ties)
    assert comes_back(found, cut=4096)


def test_any_bits_come_back_from_any_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_train.backend import remainders

    monkeypatch.setattr(remainders, "SMALLEST", 1)
    monkeypatch.setattr(remainders, "LISTED", 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        master, other = (floats(torch.randint(0, 2**32, (100_001,), generator=generator)) for _ in range(2))
        for weight in (master.bfloat16(), other.bfloat16()):
            found = remainders.remainder(shard(master.clone(), weight))
            assert found is not None
            assert comes_back(found, cut=30_000)
    # All pairs of one master's lower half and the parameters around it.
    master = floats((0x3F80 << 16) + torch.arange(65536))
    for near in (0x3F7F, 0x3F80, 0x3F81, 0x3F82):
        weight = torch.full((65536,), near, dtype=torch.int16).view(torch.bfloat16)
        found = remainders.remainder(shard(master.clone(), weight))
        assert found is not None
        assert comes_back(found, cut=65536)


@pytest.mark.parametrize(("wrong", "full"), [(0, False), (1, False), (5, False), (6, True), (20, True)])
def test_a_full_list_is_told(monkeypatch: pytest.MonkeyPatch, wrong: int, full: bool) -> None:
    from relax_train.backend import remainders

    monkeypatch.setattr(remainders, "SMALLEST", 100)
    monkeypatch.setattr(remainders, "LISTED", 25)  # a list of six
    master = torch.linspace(-3, 3, 100)
    weight = master.bfloat16()
    weight[:wrong] += 1
    found = remainders.remainder(shard(master, weight))
    assert found is not None
    assert bool(found.overflow) == full
    if not full:
        assert comes_back(found, cut=64)
    assert remainders.remainder(shard(master[:99], weight[:99])) is None, "not worth it"
