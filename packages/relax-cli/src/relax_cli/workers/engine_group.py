"""The SGLang engines of a run as the driver sees them: started, looked at while they load, stopped."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from relax_cli.cluster.actors import Actor, Ref
from relax_cli.cluster.waits import Heartbeat, StopFlag, StopRequested
from relax_cli.workers.engine import EngineActor

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

ENGINE_START_DEADLINE_S = 1800.0
"""Loading a large checkpoint and capturing CUDA graphs can take many minutes."""


class EngineGroup:
    """All engine actors. Generation and weights reach the servers over HTTP, not through here."""

    def __init__(self, actors: Sequence[Actor[EngineActor]], *, stop: StopFlag, heartbeat: Heartbeat) -> None:
        """Takes over the actors, in engine order.

        Args:
            stop: ends a start at once.
            heartbeat: tells the user what the first engine is doing while it loads.
        """
        self._actors, self._stop, self._heartbeat = list(actors), stop, heartbeat

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
        addresses: list[EngineAddress] = ray.get(results)
        return addresses

    def progress(self) -> str:
        """Says what the first engine is doing while it starts."""
        import ray

        try:  # its process may itself still be starting; if it died, the wait for it says so
            return str(ray.get(self._actors[0].call(EngineActor.progress), timeout=1.5) or "starting")
        except ray.exceptions.RayError:
            return "its process is starting"

    def stop(self) -> list[Ref[None]]:
        """Asks every actor to end its server; does not wait."""
        return [actor.call(EngineActor.stop) for actor in self._actors]
