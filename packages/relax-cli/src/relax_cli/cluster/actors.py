"""Calls of Ray actors that the type checker follows: method, arguments and result.

``handle.method.remote(...)`` is ``Any`` to it, because an actor's handle has every attribute. Here the method is named
by its class (``actor.call(RolloutActor.evaluate, 3)``), so a name that is wrong or an argument of another type is found
before anything runs. Ray is not imported.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


if TYPE_CHECKING:
    from ray import ObjectRef as Ref
else:

    class Ref(Generic[R]):
        """A value of type ``R`` that an actor is still computing: the name of Ray's ``ObjectRef`` in annotations.

        No object of this class is ever made. :func:`relax_cli.cluster.waits.wait_for` gives the value.
        """


class Actor(Generic[T]):
    """An object of class ``T`` in a process of its own."""

    def __init__(self, handle: Any) -> None:
        """Takes Ray's handle of an actor of class ``T``."""
        self.handle = handle

    @overload
    def call(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Ref[R]: ...

    @overload
    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> Ref[R]: ...

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Starts a call and returns at once.

        Args:
            method: of class ``T``, named by the class.
        """
        return getattr(self.handle, method.__name__).remote(*args, **kwargs)

    def is_named_in(self, error: BaseException) -> bool:
        """Whether Ray's error speaks of this actor."""
        actor_id = getattr(error, "actor_id", None)
        return actor_id is not None and actor_id == self.handle._actor_id.hex()

    def kill(self) -> None:
        """Ends the process without asking it."""
        import ray

        ray.kill(self.handle)


def creator(cls: Callable[P, T], **options: Any) -> Callable[P, Actor[T]]:
    """Gives a function that makes actors of a class: call it as the class.

    Args:
        options: Ray's, for example ``num_cpus``.
    """
    import ray

    remote = ray.remote(cls).options(**options).remote

    def create(*args: P.args, **kwargs: P.kwargs) -> Actor[T]:
        return Actor(remote(*args, **kwargs))

    return create
