"""Host memory that the device copies to and from at full speed: made once, in the background, used again and again.

What takes long of pinned memory is not the pinning but the first touch of its pages, tens of GiB of them. That needs no
device, so it can begin while an engine still measures the free memory of the GPU; pinning follows when there is one.
"""

import logging
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

log = logging.getLogger(__name__)

CHUNK = 256 << 20
"""Bytes of one allocation: small enough that the first copies need not wait for the last page."""
ALIGN = 512
"""Where things begin, in bytes: copies of aligned memory are faster."""
THREADS = 8
"""Most threads that touch pages; the kernel clears 2 to 4 GB/s for each."""

Place = tuple[int, int, int, int]
"""A part of a thing: where it begins in the thing, its length, its chunk and where it begins there, in bytes."""


class _Pages(mmap.mmap):
    """Memory that is unpinned before it goes, whoever was the last to use it.

    Otherwise the driver keeps its address for pinned, and refuses it to the next allocation that gets it, whose error
    (cudaErrorAlreadyMapped) then stands where nothing is wrong.
    """

    _address = 0
    """Where it is pinned; 0: it is not."""

    def pin(self) -> None:
        """Pins it for the current device, and for those whose context is made later."""
        address, portable = torch.frombuffer(self, dtype=torch.uint8).data_ptr(), 1  # cudaHostRegisterPortable
        code = torch.cuda.cudart().cudaHostRegister(address, len(self), portable)
        if int(code) != 0:
            raise RuntimeError(f"cudaHostRegister: {code}")
        self._address = address

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)


class HostMemory:
    """Chunks of host memory that belong to one owner until :meth:`close`.

    Args:
        pinned: pin the chunks, for a CUDA device. They can be touched without one, and are pinned by :meth:`pin`.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="host-memory")
        self._sizes: list[int] = []
        self._touched: list[Future[_Pages]] = []
        self._ready: list[Future[_Pages]] = []
        self._device: torch.device | None = None
        self._started = 0.0
        self._told = False

    # ------------------------------------------------------------------ in the background

    def begin(self, total: int) -> None:
        """Starts to make chunks until there are ``total`` bytes; does not wait. What is there already counts."""
        if not self._sizes:
            self._started = time.perf_counter()
        while (missing := total - sum(self._sizes)) > 0:
            size = min(CHUNK, -(-missing // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._sizes.append(size)
            self._touched.append(self._pool.submit(_touched, size))
            self._told = False
        if self._device is not None or not self._pinned:
            self._finish_chunks()

    def pin(self, device: torch.device) -> None:
        """Starts to pin what :meth:`begin` makes, for ``device``, which must be usable; does not wait."""
        self._device = device
        self._finish_chunks()

    def _finish_chunks(self) -> None:
        for touched in self._touched[len(self._ready) :]:
            ready = touched if self._device is None else self._pool.submit(_pinned, touched, self._device)
            self._ready.append(ready)
            ready.add_done_callback(lambda _: self._tell())

    def _tell(self) -> None:
        """Says once that the memory is there."""
        if self.ready and not self._told:
            self._told = True
            seconds, size = time.perf_counter() - self._started, sum(self._sizes) / 2**30
            what = "pinned host memory" if self._pinned else "host memory"
            log.info("%.1f GiB of %s made in the background in %.1f s", size, what, seconds)

    @property
    def size(self) -> int:
        """Bytes that are there or on their way."""
        return sum(self._sizes)

    @property
    def ready(self) -> bool:
        """Whether all of it is there, so that nothing would wait for a chunk now.

        False for ever where the host has no room for it; :meth:`view` says so to who needs it first.
        """
        return len(self._ready) == len(self._sizes) and all(map(_made, self._ready))

    # ------------------------------------------------------------------ in use

    def places(self, sizes: Sequence[int]) -> list[list[Place]]:
        """Lays things of these sizes (bytes) out one after another; a thing may lie in several chunks.

        Chunks that are missing are started.
        """
        self.begin(sum(-(-size // ALIGN) * ALIGN for size in sizes))
        result: list[list[Place]] = []
        chunk, offset = 0, 0
        for size in sizes:
            parts: list[Place] = []
            done = 0
            while done < size:
                if offset >= self._sizes[chunk]:
                    chunk, offset = chunk + 1, 0
                length = min(size - done, self._sizes[chunk] - offset)
                parts.append((done, length, chunk, offset))
                done, offset = done + length, offset + length
            offset = -(-offset // ALIGN) * ALIGN
            result.append(parts)
        return result

    def view(self, place: Place) -> torch.Tensor:
        """The bytes of a place, uint8; waits until its chunk is there.

        Raises:
            MemoryError: the host has no room for it.
        """
        _, length, chunk, offset = place
        if len(self._ready) <= chunk:
            assert self._device is not None, "pin() comes before the first use"
            self._finish_chunks()
        try:
            pages = self._ready[chunk].result()
        except (MemoryError, OSError, RuntimeError) as error:
            raise MemoryError(
                f"the host has no room for {self.size / 2**30:.1f} GiB of memory, where the trainer's weights and "
                "optimizer are while the engines use the GPU: give the run more host memory, or more GPUs to share "
                f"them; without --colocate nothing is moved ({error})"
            ) from error
        return torch.frombuffer(pages, dtype=torch.uint8)[offset : offset + length]

    def close(self) -> None:
        """Gives the memory back; no copy may be under way, and no view is used after it. May be called twice."""
        for future in [*self._touched, *self._ready]:
            future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)
        wait([future for future in self._ready if not future.cancelled()])
        self._sizes, self._touched, self._ready = [], [], []


def _made(chunk: "Future[_Pages]") -> bool:
    return chunk.done() and not chunk.cancelled() and chunk.exception() is None


def _touched(size: int) -> _Pages:
    """Memory whose pages are all there."""
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # two MiB a page: fewer faults now, fewer entries to pin
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            log.debug("no huge pages here")
    torch.frombuffer(pages, dtype=torch.uint8).zero_()
    return pages


def _pinned(touched: "Future[_Pages]", device: torch.device) -> _Pages:
    pages = touched.result()
    torch.cuda.set_device(device)
    pages.pin()
    return pages
