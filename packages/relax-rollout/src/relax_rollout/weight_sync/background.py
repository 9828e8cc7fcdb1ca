"""What runs beside the thread of the trainer that makes buckets: an event loop, and calls that may block."""

import asyncio
import collections
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread of its own, while the ``with`` block runs."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(),), name="relax-weight-push", daemon=True)

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._end.wait()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Starts a coroutine there; its result, or error, is in what is returned."""
        assert self._loop is not None, "only inside the block"
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def __exit__(self, *exc: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()


class Underway:
    """Steps of a push that run in the loop while the trainer's thread makes the next bucket; the oldest ends first."""

    def __init__(self, loop: BackgroundLoop, begin: Coroutine[Any, Any, None]) -> None:
        """Starts the step that comes before all others.

        Args:
            loop: where the steps run.
            begin: has to be over before anything is sent.
        """
        self._loop = loop
        self._begin = loop.submit(begin)
        self._sends: collections.deque[concurrent.futures.Future[None]] = collections.deque()

    def start(self, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts to send a bucket, once the first step is over.

        Raises:
            Exception: that of the first step.
        """
        self._begin.result()
        self._sends.append(self._loop.submit(send()))

    def wait(self, left: int = 0) -> None:
        """Waits until at most so many sends are under way; without any, for the first step.

        Raises:
            Exception: that of the oldest step that failed.
        """
        if not left:
            self._begin.result()
        while len(self._sends) > left:
            self._sends.popleft().result()

    def rest(self) -> list[BaseException]:
        """Waits for all, whatever becomes of them; the errors of those that nobody has waited for yet."""
        futures = [self._begin, *self._sends]
        self._sends.clear()
        errors: list[BaseException] = []
        for future in futures:
            try:
                error = future.exception()
            except concurrent.futures.CancelledError as cancelled:
                error = cancelled
            if error is not None:
                errors.append(error)
        return errors

    def cancel(self) -> None:
        """Ends all at once."""
        for future in (self._begin, *self._sends):
            future.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    """What a call that may block gives, called in a thread of its own.

    A call that is stuck in a library for ever keeps neither the event loop nor the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)
        del error  # its frames hold this one, and what the call was given

    threading.Thread(target=run, name="relax-weight-call", daemon=True).start()
    return await future


@contextlib.asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Gives a block of waiting its deadline.

    Raises:
        TimeoutError: ``"<what> within <seconds> s"``.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{what} within {seconds:g} s") from None
        raise


async def both(asked: Coroutine[Any, Any, Any], own: Coroutine[Any, Any, Any], *, hear_s: float) -> None:
    """Waits for an engine's answer and for this side's part of the same thing; the first error ends both.

    Args:
        asked: waits for the answer.
        own: does this side's part.
        hear_s: after an error of ``own``, how long to wait for the answer still: the engine knows better why.
    """
    answer, part = asyncio.ensure_future(asked), asyncio.ensure_future(own)
    try:
        await asyncio.wait({answer, part}, return_when=asyncio.FIRST_EXCEPTION)
        if not answer.done():
            await asyncio.wait({answer}, timeout=hear_s)
        for task in (answer, part):
            if task.done():
                task.result()
    finally:
        for task in (answer, part):
            task.cancel()
        await asyncio.gather(answer, part, return_exceptions=True)
