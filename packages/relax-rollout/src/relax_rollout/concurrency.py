"""Small pieces of asyncio that the rollout loop, evaluation and rewards share."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from relax_rollout.errors import describe

T = TypeVar("T")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; at the first exception the others are cancelled and awaited, then it is raised."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel_all(tasks)
        raise


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancels the tasks and waits until each has ended, whatever it ends with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class UserFunctionError(RuntimeError):
    """A function of the user raised what is no error (``sys.exit()``) and would end the event loop, or is not async."""


def _as_error(error: BaseException) -> UserFunctionError:
    wrapped = UserFunctionError(describe(error))
    wrapped.__cause__ = error
    return wrapped


async def guarded(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Awaits an async function of the user.

    Raises:
        UserFunctionError: it raised what would end the event loop, or pass for a cancellation by us; it is not async.
    """
    try:
        call = function(*args)
        if not inspect.isawaitable(call):
            raise UserFunctionError("TypeError: it is not async; write async def")
        return await call
    except (SystemExit, KeyboardInterrupt) as e:
        raise _as_error(e) from e
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _as_error(e) from e


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Runs ``function`` in a thread of its own and waits for it.

    The thread is a daemon: a call that never returns cannot keep the process alive, as one in an executor would.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = (function(*args), None)
        except StopIteration as e:  # a future refuses it
            outcome = (None, RuntimeError(f"{function!r} raised StopIteration: {e}"))
        except Exception as e:
            outcome = (None, e)
        except BaseException as e:  # SystemExit and its like would end the event loop, and all waits with it
            outcome = (None, _as_error(e))
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=f"relax-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


class LoopLocal:
    """A value made once for the running event loop; asyncio's locks and HTTP clients belong to one loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._value: Any = None

    def get(self) -> Any:
        """The value of the running event loop; made when the loop asks for the first time."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._value = loop, self._make()
        return self._value

    def take(self) -> Any:
        """The value if it was made for the running loop, else None; forgets it."""
        value = self._value if self._loop is asyncio.get_running_loop() else None
        self._loop, self._value = None, None
        return value
