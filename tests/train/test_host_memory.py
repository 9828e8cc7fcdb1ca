"""Host memory for weights and optimizer: pinned as long as it is there, and not a moment longer."""

import gc

import pytest
import torch
from relax_train.backend.host_memory import HostMemory


class Driver:
    """Stands for the CUDA runtime, which this machine may lack; remembers what is pinned."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.taken_back: list[int] = []

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        assert address not in self.pinned, "cudaErrorHostMemoryAlreadyRegistered"
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        self.taken_back.append(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    return found


def pinned_memory(size: int) -> tuple[HostMemory, torch.Tensor]:
    """Host memory of these bytes, and a view of all of them."""
    memory = HostMemory(pinned=True)
    ((place,),) = memory.places([size])
    memory.pin(torch.device("cuda", 0))
    return memory, memory.view(place)


def test_memory_is_unpinned_when_it_is_closed(driver: Driver) -> None:
    memory, view = pinned_memory(5000)
    assert list(driver.pinned) == [view.data_ptr()]
    assert driver.pinned[view.data_ptr()] >= 5000
    address = view.data_ptr()
    del view
    memory.close()
    assert driver.taken_back == [address]
    assert driver.pinned == {}


def test_memory_that_nobody_closed_is_unpinned_when_it_goes(driver: Driver) -> None:
    memory, view = pinned_memory(5000)
    address = view.data_ptr()
    del memory
    gc.collect()
    assert list(driver.pinned) == [address], "a view still uses it"
    del view
    gc.collect()
    assert driver.taken_back == [address]


def test_memory_that_cannot_be_pinned_is_an_error_of_who_needs_it(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(MemoryError, match=r"more host memory.*cudaHostRegister: 2"):
        pinned_memory(5000)


def test_memory_without_a_device_is_touched_and_never_pinned(driver: Driver) -> None:
    memory = HostMemory(pinned=False)
    ((place,),) = memory.places([5000])
    assert torch.equal(memory.view(place), torch.zeros(5000, dtype=torch.uint8))
    memory.close()
    assert (driver.pinned, driver.taken_back) == ({}, [])
