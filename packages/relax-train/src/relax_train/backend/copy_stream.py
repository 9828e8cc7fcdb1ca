"""Copies beside the computation: a CUDA stream, or on a CPU one thread, with the same rules of order.

Copies of one stream are done one after another, in the order in which they were asked for. They do not wait for what
the device computes, and it does not wait for them, unless told to: :meth:`CopyStream.follow` and the methods of
:class:`Mark`.
"""

import abc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class Mark(abc.ABC):
    """A point in the order of a stream's copies: all that were asked for before it."""

    @abc.abstractmethod
    def block_compute(self) -> None:
        """Lets what is computed from now on begin after these copies; on CUDA the host goes on at once."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits on the host until these copies are done."""


class CopyStream(abc.ABC):
    """Copies tensors beside the computation of one device."""

    @abc.abstractmethod
    def follow(self) -> None:
        """Lets the copies asked for from now on begin after what the device has been told to compute so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes; both tensors must stay until the copy is done."""
        self.run(lambda: target.copy_(source, non_blocking=True))

    @abc.abstractmethod
    def run(self, act: Callable[[], object]) -> None:
        """Does what ``act`` tells the device, in the order of the copies; what it uses must stay until it is done."""

    @abc.abstractmethod
    def mark(self) -> Mark:
        """Marks the copies asked for so far."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for all copies and ends the stream; it may be called twice."""


def copy_stream(device: torch.device) -> CopyStream:
    """A stream of copies for a device."""
    return CudaCopyStream(device) if device.type == "cuda" else ThreadCopyStream()


class CudaCopyStream(CopyStream):
    """A CUDA stream of its own; with pinned memory on the host, copies and kernels run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        """See :class:`CopyStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, act: Callable[[], object]) -> None:
        """See :class:`CopyStream`."""
        with torch.cuda.stream(self._stream):
            act()

    def mark(self) -> "CudaMark":
        """See :class:`CopyStream`."""
        return CudaMark(self._device, self._stream.record_event())

    def close(self) -> None:
        """See :class:`CopyStream`."""
        self._stream.synchronize()


class CudaMark(Mark):
    """An event in the stream."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device, self._event = device, event

    def block_compute(self) -> None:
        """See :class:`Mark`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        """See :class:`Mark`."""
        self._event.synchronize()


class ThreadCopyStream(CopyStream):
    """One thread. What a CPU computes is done when the call returns, so there is nothing to follow."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copies")
        self._pending: list[Future[object]] = []

    def follow(self) -> None:
        """See :class:`CopyStream`."""

    def run(self, act: Callable[[], object]) -> None:
        """See :class:`CopyStream`."""
        self._pending.append(self._pool.submit(act))

    def mark(self) -> "ThreadMark":
        """See :class:`CopyStream`."""
        pending, self._pending = self._pending, []
        return ThreadMark(pending, self._pool.submit(lambda: None))

    def close(self) -> None:
        """See :class:`CopyStream`."""
        self._pool.shutdown(wait=True)


class ThreadMark(Mark):
    """The copies since the mark before, and the thread's place in its queue, which is behind all of them."""

    def __init__(self, copies: "list[Future[object]]", place: "Future[None]") -> None:
        self._copies, self._place = copies, place

    def block_compute(self) -> None:
        """See :class:`Mark`."""
        self.wait()

    def wait(self) -> None:
        """See :class:`Mark`."""
        self._place.result()
        for copy in self._copies:
            copy.result()  # raises what went wrong in it
