"""The SGLang engines of a run as the driver sees them: started, looked at while they load, stopped."""

import contextlib
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from relax_cli.cluster.actors import Actor, Ref
from relax_cli.cluster.waits import Heartbeat, StopFlag, StopRequested, wait_for
from relax_cli.workers.engine import EngineActor

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

ENGINE_START_DEADLINE_S = 1800.0
"""Loading a large checkpoint and capturing CUDA graphs can take many minutes."""
ENGINE_STOP_DEADLINE_S = 60.0
"""A server and its processes are killed, which takes a second or two."""


class EngineGroup:
    """All engine actors. Generation and weights reach the servers over HTTP, not through here."""

    def __init__(self, actors: Sequence[Actor[EngineActor]], *, stop: StopFlag, heartbeat: Heartbeat) -> None:
        """Takes over the actors, in engine order.

        Args:
            stop: ends a start at once.
            heartbeat: tells the user what the first engine is doing while it loads.
        """
        self._actors, self._stop, self._heartbeat = list(actors), stop, heartbeat
        self._by_name: dict[str, Actor[EngineActor]] = {}
        self._restarts: dict[str, Ref[EngineAddress]] = {}
        self.addresses: list[EngineAddress] = []
        """Where each server is now, in engine order."""

    def start(self, meanwhile: Sequence[Ref[Any]] = ()) -> "list[EngineAddress]":
        """Starts all servers and waits until each is healthy.

        Args:
            meanwhile: other parts of the start; one that fails ends this wait at once.

        Returns:
            where each server is, in engine order.

        Raises:
            StopRequested: the user asked the run to end.
            TimeoutError: after :data:`ENGINE_START_DEADLINE_S`.
        """
        import ray

        results = [actor.call(EngineActor.start) for actor in self._actors]
        pending: list[Any] = list(results)
        watched: list[Any] = list(meanwhile)
        start = time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.25)
            self._stop.raise_broken()
            ray.get(done)
            if watched:
                failed, watched = ray.wait(watched, num_returns=len(watched), timeout=0)
                ray.get(failed)
            waited = time.monotonic() - start
            if self._stop.requested:
                raise StopRequested("the engines to start")
            if waited > ENGINE_START_DEADLINE_S:
                raise TimeoutError(f"waited {waited:.0f} s for the engines to be healthy: giving up")
            if pending:
                self._heartbeat.waiting(f"{len(pending)} engine(s) to load; engine0", self.progress)
        self.addresses = ray.get(results)
        self._by_name = {a.name: actor for a, actor in zip(self.addresses, self._actors, strict=True)}
        return self.addresses

    def progress(self) -> str:
        """Says what the first engine is doing while it starts."""
        import ray

        try:  # its process may itself still be starting; if it died, the wait for it says so
            return str(ray.get(self._actors[0].call(EngineActor.progress), timeout=1.5) or "starting")
        except ray.exceptions.RayError:
            return "its process is starting"

    # ------------------------------------------------------------------ engines that were lost

    def begin_restart(self, name: str) -> None:
        """Ends what is left of an engine's server and starts another one, in the background."""
        self._restarts[name] = self._by_name[name].call(EngineActor.restart)

    def restarted(self, *, wait: bool = False) -> "dict[str, EngineAddress | str]":
        """The restarts that have ended since it was asked last: where the server is now, or why there is none.

        Args:
            wait: until all have ended.

        Raises:
            StopRequested: the user asked the run to end while it waited.
            TimeoutError: after :data:`ENGINE_START_DEADLINE_S`, and what it takes to say so.
        """
        import ray

        found: dict[str, EngineAddress | str] = {}
        for name, ref in list(self._restarts.items()):
            if not wait and not ray.wait([ref], timeout=0)[0]:
                continue
            try:
                deadline_s = ENGINE_START_DEADLINE_S + ENGINE_STOP_DEADLINE_S
                found[name] = address = wait_for(ref, f"{name} to restart", stop=self._stop, deadline_s=deadline_s)
                self.addresses = [address if a.name == name else a for a in self.addresses]
            except ray.exceptions.RayError as error:
                found[name] = str(getattr(error, "cause", None) or error)
            del self._restarts[name]
        return found

    def end(self, names: Collection[str]) -> None:
        """Ends the servers of lost engines, so that they hold no memory; returns when they are gone."""
        import ray

        for name, ref in [(name, self._by_name[name].call(EngineActor.stop)) for name in names]:
            with contextlib.suppress(ray.exceptions.RayActorError):  # an actor that is gone has taken its server along
                wait_for(ref, f"{name} to end", stop=self._stop, deadline_s=ENGINE_STOP_DEADLINE_S)

    def stop(self) -> list[Ref[None]]:
        """Asks every actor to end its server; does not wait."""
        return [actor.call(EngineActor.stop) for actor in self._actors]
