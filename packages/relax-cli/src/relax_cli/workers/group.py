"""All actors of a colocate run: placed, started in order, asked together, stopped."""

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relax_cli.cluster.slots import Slot, reserve, strategy
from relax_cli.cluster.waits import StopFlag, StopRequested, wait_for
from relax_cli.config.run_config import RunConfig
from relax_cli.workers.process import actor_environment

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

log = logging.getLogger(__name__)

ENGINE_START_DEADLINE_S = 1800.0
"""Loading a large checkpoint and capturing CUDA graphs can take many minutes."""
SETUP_DEADLINE_S = 1800.0
ENGINE_PROGRESS_S = 20.0
"""How often a start says what the first engine is doing."""
CALL_DEADLINE_S = 24 * 3600.0
"""No generation or training step of ours lasts a day; a wait this long is a hang."""
STOP_DEADLINE_S = 8.0
ABANDON_DEADLINE_S = 2.0
"""The same for a start that is given up: who still loads has nothing to put in order, and would not answer in time."""


class WorkerGroups:
    """Owns the Ray actors. Engines and trainer ranks share the same slots (colocate)."""

    def __init__(self, config: RunConfig, *, stop: StopFlag, note: Callable[[str], None]) -> None:
        assert config.placement is not None, "the cluster is known before its workers"
        self.config, self.shape = config, config.placement
        self._stop, self._note = stop, note
        self._engine_actors: list[Any] = []
        self._trainers: list[Any] = []
        self._one_node = False
        self._rollout: Any = None
        self._group: Any = None
        self._started = False
        self.engine_addresses: list[EngineAddress] = []

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Places and starts every actor, engines and trainer side by side as far as the device's memory allows."""
        debug = self.config.debug
        slots_needed = max(self.shape.train_ranks, self.shape.engines * self.shape.gpus_per_engine)
        self._group, slots = reserve(slots_needed, gpus=self.shape.device == "cuda", stop=self._stop)
        parts = [] if debug.debug_train_only else [f"{self.shape.engines} SGLang engine(s)"]
        parts += [] if debug.debug_rollout_only else [f"{self.shape.train_ranks} trainer rank(s)"]
        self._note(f"starting {' and '.join(parts)}: their imports alone can take half a minute")
        watched: list[Any] = []
        setup: list[Any] = []
        if not debug.debug_train_only:
            # First, because it finds unusable prompts and rewards in seconds.
            create = self._actor(self._rollout_class(), slots[0].bundle, cpus=0.0, max_concurrency=16)
            self._rollout = create(self.config)
            watched.append(self._rollout.ready.remote())
            self._create_engines(slots)
        if not debug.debug_rollout_only:
            self._create_trainers(slots)
            # On a GPU the engine measures the free memory when it starts, so the trainer may only import meanwhile.
            setup = self._setup_trainers() if self.shape.device == "cpu" else self._all_trainers("prepare")
        if self._engine_actors:
            self._start_engines(watched + setup)
            wait_for(watched, "the prompts to load", stop=self._stop, deadline_s=SETUP_DEADLINE_S)
            self.rollout("connect", self.engine_addresses, what="the rollout manager to know the engines")
        if self._trainers:
            self._finish_trainers(setup)
        self._started = True

    @staticmethod
    def _rollout_class() -> Any:
        from relax_cli.workers.rollout import RolloutActor

        return RolloutActor

    def _actor(
        self, cls: Any, bundle: int, *, cpus: float, gpus: float = 0.0, max_concurrency: int = 1, env: Any = None
    ) -> Callable[..., Any]:
        import ray

        environment = {**actor_environment(self.shape.device, threads=1), **(env or {})}
        if self.config.cluster.ray_address is not None and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]  # a local Ray has the driver's anyway
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_concurrency": max_concurrency,
            "runtime_env": {"env_vars": environment},
            **strategy(self._group, bundle),
        }
        return ray.remote(cls).options(**options).remote

    def _create_engines(self, slots: list[Slot]) -> None:
        from relax_cli.workers.engine import EngineActor

        gpu, per = self.shape.device == "cuda", self.shape.gpus_per_engine
        local = self.config.cluster.ray_address is None
        for i in range(self.shape.engines):
            own = slots[i * per : (i + 1) * per]
            if len({s.node_id for s in own}) != 1:
                raise ValueError(
                    f"--rollout-num-gpus-per-engine {per}: engine {i} would span the nodes "
                    f"{sorted({s.node_ip for s in own})}. "
                    "An engine must fit into one node: choose a divisor of the GPUs of a node."
                )
            create = self._actor(EngineActor, own[0].bundle, cpus=0.0, gpus=0.1 if gpu else 0.0, max_concurrency=4)
            self._engine_actors.append(
                create(
                    self.config,
                    name=f"engine{i}",
                    # Engines of one seed draw the same numbers: responses of a group, spread over them, could repeat.
                    seed=self.config.data.rollout_seed + i,
                    gpu_ids=[s.gpu_id for s in own if s.gpu_id is not None],
                    device=self.shape.device,
                    host="127.0.0.1" if local else own[0].node_ip,
                    dtype=self._engine_dtype(),
                )
            )

    def _engine_dtype(self) -> str:
        """The trainer's own, so that both compute the same log-probs."""
        bf16 = self.config.train.model.bf16
        return "bfloat16" if (self.shape.device == "cuda" if bf16 is None else bf16) else "float32"

    def _create_trainers(self, slots: list[Slot]) -> None:
        from relax_cli.workers.trainer import TrainActor

        world = self.shape.train_ranks
        self._one_node = len({s.node_id for s in slots[:world]}) == 1
        # Generation and training take turns, so the ranks may use all cores between them.
        threads = max(1, (os.cpu_count() or 1) // world) if self.shape.device == "cpu" else 1
        for rank in range(world):
            create = self._actor(
                TrainActor,
                slots[rank].bundle,
                cpus=0.5,
                gpus=0.5 if self.shape.device == "cuda" else 0.0,
                env=actor_environment(self.shape.device, threads=threads),
            )
            self._trainers.append(create(self.config, rank=rank, world_size=world, threads=threads))

    def _setup_trainers(self) -> list[Any]:
        place = self._trainers[0].place.remote(self._one_node)
        master = wait_for(place, "rank 0's address", stop=self._stop, deadline_s=SETUP_DEADLINE_S)
        return [t.setup.remote(master) for t in self._trainers]

    def _all_trainers(self, method: str, *args: Any) -> list[Any]:
        return [getattr(t, method).remote(*args) for t in self._trainers]

    def _start_engines(self, meanwhile: list[Any]) -> None:
        """Waits for all servers; any other part that fails meanwhile ends the wait at once."""
        import ray

        pending = [a.start.remote() for a in self._engine_actors]
        results, watched = list(pending), list(meanwhile)
        start = told = time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.25)
            ray.get(done)
            if watched:
                failed, watched = ray.wait(watched, num_returns=len(watched), timeout=0)
                ray.get(failed)
            now = time.monotonic()
            if self._stop.requested:
                raise StopRequested("the engines to start")
            if now - start > ENGINE_START_DEADLINE_S:
                raise TimeoutError(f"waited {now - start:.0f} s for the engines to be healthy: giving up")
            if pending and now - told >= ENGINE_PROGRESS_S:
                told = now
                self._note(f"waiting for {len(pending)} engine(s) to load; engine0: {self._engine_progress()}")
        self.engine_addresses = ray.get(results)
        self._note(f"{len(results)} SGLang engine(s) healthy")

    def _engine_progress(self) -> str:
        import ray

        try:  # its process may itself still be starting; if it died, the wait for it says so
            return str(ray.get(self._engine_actors[0].progress.remote(), timeout=2) or "starting")
        except ray.exceptions.RayError:
            return "no answer yet"

    def _finish_trainers(self, setup: list[Any]) -> None:
        wait_for(setup, "the trainer's ranks to import", stop=self._stop, deadline_s=SETUP_DEADLINE_S)
        if self.shape.device == "cuda":
            if self._engine_actors:
                self.rollout("release_memory", what="the engines to release GPU memory")
            setup = self._setup_trainers()
        facts = wait_for(setup, "the trainer to build its model", stop=self._stop, deadline_s=SETUP_DEADLINE_S)
        self._note(f"trainer ready: {facts[0]['parameters'] / 1e6:.2f} M parameters, {facts[0]['layout']}")
        if self._engine_actors:
            self.trainers("connect", self.engine_addresses, what="the trainer to know the engines")

    # ------------------------------------------------------------------ calls

    @property
    def shares_gpu(self) -> bool:
        """True when engines and trainer take turns on the memory of the same GPUs."""
        return self.shape.device == "cuda" and bool(self._trainers) and bool(self._engine_actors)

    def rollout(self, method: str, *args: Any, what: str, deadline_s: float = CALL_DEADLINE_S) -> Any:
        """Calls the rollout manager and waits."""
        ref = getattr(self._rollout, method).remote(*args)
        return wait_for(ref, what, stop=self._stop, deadline_s=deadline_s, status=self._rollout_status)

    def _rollout_status(self) -> str:
        import ray

        try:
            return str(ray.get(self._rollout.status.remote(), timeout=5))
        except ray.exceptions.RayError:  # the wait itself will say what is wrong
            return "no answer from the rollout manager"

    def trainers(self, method: str, *args: Any, what: str, deadline_s: float = CALL_DEADLINE_S) -> list[Any]:
        """Calls every rank and waits for all; the first failure of any rank is raised at once."""
        return wait_for(self._all_trainers(method, *args), what, stop=self._stop, deadline_s=deadline_s)

    # ------------------------------------------------------------------ stop

    def close(self) -> None:
        """Ends every actor and every process below it. Never raises, and never takes long."""
        import ray

        try:
            goodbyes = [t.close.remote() for t in self._trainers]
            if self._rollout is not None:
                goodbyes.append(self._rollout.close.remote())
            goodbyes += [a.stop.remote() for a in self._engine_actors]
            if goodbyes:
                patience = STOP_DEADLINE_S if self._started else ABANDON_DEADLINE_S
                ray.wait(goodbyes, num_returns=len(goodbyes), timeout=self._stop.left(patience))
        except Exception:  # Ray itself may be gone; what follows still has to run
            log.exception("while stopping")
        for actor in [*self._trainers, *self._engine_actors, *([self._rollout] if self._rollout else [])]:
            try:
                ray.kill(actor)
            except Exception:
                log.exception("while ending %s", actor)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            try:
                remove_placement_group(self._group)
            except Exception:
                log.exception("while freeing the placement group")
        self._trainers, self._engine_actors, self._rollout, self._group = [], [], None, None
