"""All actors of a run: placed, started in order, stopped. What each side can do is in its own class."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from relax_rollout.engines.pool import RESTARTS

from relax_cli.cluster.actors import Actor, Ref, creator
from relax_cli.cluster.nodes import NodeLost, RunNodes, check_files, own_node, parts_on_nodes
from relax_cli.cluster.slots import Slot, check_cpus, engine_slots, reserve, slots_needed, strategy, trainer_slots
from relax_cli.cluster.waits import SETUP_DEADLINE_S, Heartbeat, StopFlag, wait_for
from relax_cli.config.run_config import RunConfig
from relax_cli.run.folder import make_engine_key, remove_engine_key
from relax_cli.workers.engine import EngineActor
from relax_cli.workers.engine_group import EngineGroup
from relax_cli.workers.process import actor_environment
from relax_cli.workers.rollout import RolloutActor
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer import TrainActor, TrainerFacts
from relax_cli.workers.trainer_group import TrainerGroup

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

STOP_DEADLINE_S = 8.0
"""Seconds to wait for actors of a run to put their things in order."""
TRACES_DEADLINE_S = 30.0
"""The same where ranks record traces: a window that a failure ends is written then."""
ABANDON_DEADLINE_S = 2.0
"""Seconds to wait for actors of a start that is given up: who still loads has nothing to put in order, and would not
answer in time."""


class WorkerGroups:
    """Owns the actors: the rollout worker, the engines and the trainer's ranks, as far as the run has them.

    On shared slots engines and ranks take turns; on separate ones each side has its own
    (:mod:`relax_cli.cluster.slots`).
    """

    def __init__(
        self, config: RunConfig, *, stop: StopFlag, note: Callable[[str], None], nodes: RunNodes | None = None
    ) -> None:
        """Starts nothing yet.

        Args:
            config: all settings of the run, with its placement.
            stop: gives up the start, and every wait.
            note: takes lines for the user while the parts start, and while engines are waited for.
            nodes: is told what lies where.
        """
        assert config.placement is not None, "the cluster is known before its workers"
        self.config, self.shape = config, config.placement
        self._stop, self._note, self._heartbeat = stop, note, Heartbeat(note)
        self._nodes = RunNodes() if nodes is None else nodes
        self._actors: list[Actor[Any]] = []
        self._rollout: RolloutWorker | None = None
        self._engines: EngineGroup | None = None
        self._trainers: TrainerGroup | None = None
        self._placement_group: Any = None
        self._started = False

    @property
    def rollout(self) -> RolloutWorker:
        """Who generates; not with ``--debug-train-only``."""
        assert self._rollout is not None, "this run generates nothing"
        return self._rollout

    @property
    def trainers(self) -> TrainerGroup:
        """Who trains; not with ``--debug-rollout-only``."""
        assert self._trainers is not None, "this run trains nothing"
        return self._trainers

    @property
    def engines(self) -> EngineGroup:
        """The servers' actors; not with ``--debug-train-only``."""
        assert self._engines is not None, "this run generates nothing"
        return self._engines

    @property
    def shares_gpu(self) -> bool:
        """True when engines and trainer take turns on the memory of the same GPUs."""
        both = self._trainers is not None and self._engines is not None
        return both and self.shape.shared and self.shape.device == "cuda"

    # ------------------------------------------------------------------ start

    def start(self) -> None:
        """Places and starts every actor, engines and trainer side by side as far as the device's memory allows.

        Raises:
            ValueError: prompts, model or GPUs do not fit; the message says what to change.
            StopRequested: the user asked the run to end.
        """
        debug, heartbeat = self.config.debug, self._heartbeat
        parts = [] if debug.debug_train_only else [f"{self.shape.engines} SGLang engine(s)"]
        parts += [] if debug.debug_rollout_only else [f"{self.shape.train_ranks} trainer rank(s)"]
        heartbeat.note(f"starting {' and '.join(parts)}: their imports alone can take half a minute")
        needed = slots_needed(self.shape)
        if self.config.cluster.fully_async:
            check_cpus(needed, self.config.data.num_data_storage_units)
        self._placement_group, slots = reserve(
            needed,
            gpus=self.shape.device == "cuda",
            nodes=self.shape.nodes,
            stop=self._stop,
            heartbeat=heartbeat,
        )
        self._look_at_nodes(slots)
        prompts: Ref[bool] | None = None
        imports: list[Ref[None]] = []
        setup: list[Ref[TrainerFacts]] = []
        if not debug.debug_train_only:
            # First, because it finds unusable prompts and rewards in seconds.
            prompts = self._create_rollout(slots)
            self._create_engines(slots)
        if not debug.debug_rollout_only:
            self._create_trainers(slots)
            if self.shares_gpu:
                # An engine measures the free memory when it starts, so the trainer may only import meanwhile.
                imports = self.trainers.begin_import()
            else:
                setup = self.trainers.begin_setup(heartbeat)
        engines = self._start_engines(prompts, [*imports, *setup]) if prompts is not None else []
        if self._trainers is not None:
            self._finish_trainers(imports, setup, engines)
        self._started = True

    def _look_at_nodes(self, slots: Sequence[Slot]) -> None:
        """Looks whether other nodes see the files of the run, and has them watched from now on."""
        debug = self.config.debug
        parts = parts_on_nodes(
            rollout=None if debug.debug_train_only else slots[0].node_id,
            engines=[] if debug.debug_train_only else [own[0].node_id for own in engine_slots(self.shape, slots)],
            ranks=[] if debug.debug_rollout_only else [s.node_id for s in trainer_slots(self.shape, slots)],
            engines_may_die=not self.shape.shared,
        )
        self._nodes.watch(parts)
        model, checkpoint = self.config.train.model, self.config.train.checkpoint
        named = {"--hf-checkpoint": model.hf_checkpoint, "--ref-load": model.ref_load, "--load": checkpoint.load}
        shared = {"--save": Path(checkpoint.save)} if checkpoint.save is not None else {}
        if self.config.cluster.weight_sync == "disk":
            shared["--weight-sync disk"] = self.config.run_dir
        here = own_node()
        check_files(
            {s.node_ip: strategy(self._placement_group, s.bundle) for s in slots if s.node_id != here},
            needed={name: path for name, path in named.items() if path is not None},
            shared=shared,
            stop=self._stop,
        )

    def _actor(
        self,
        cls: Callable[P, T],
        bundle: int,
        *,
        cpus: float,
        gpus: float = 0.0,
        max_concurrency: int = 1,
        env: Mapping[str, str] | None = None,
        restarts: int = 0,
    ) -> Callable[P, Actor[T]]:
        """Gives a function that makes an actor of a class in one bundle; :meth:`close` ends whatever it made.

        Args:
            restarts: times that Ray makes it anew when its process is gone, and repeats the calls it was busy with.
        """
        environment = {**actor_environment(self.shape.device, threads=1), **(env or {})}
        if self.config.cluster.ray_address is not None and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]  # a local Ray has the driver's anyway
        make = creator(
            cls,
            num_cpus=cpus,
            num_gpus=gpus,
            max_concurrency=max_concurrency,
            max_restarts=restarts,
            max_task_retries=restarts,
            runtime_env={"env_vars": environment},
            **strategy(self._placement_group, bundle),
        )

        def create(*args: P.args, **kwargs: P.kwargs) -> Actor[T]:
            actor = make(*args, **kwargs)
            self._actors.append(actor)
            return actor

        return create

    def _create_rollout(self, slots: Sequence[Slot]) -> Ref[bool]:
        create = self._actor(RolloutActor, slots[0].bundle, cpus=0.0, max_concurrency=16)
        self._rollout = RolloutWorker(create(self.config), stop=self._stop, note=self._note)
        return self._rollout.begin_start()

    def _create_engines(self, slots: Sequence[Slot]) -> None:
        gpu, key = self.shape.device == "cuda", make_engine_key(self.config.run_dir)
        local = self.config.cluster.ray_address is None
        actors = []
        for i, own in enumerate(engine_slots(self.shape, slots)):
            create = self._actor(
                EngineActor,
                own[0].bundle,
                cpus=0.0,
                gpus=0.1 if gpu else 0.0,
                max_concurrency=4,
                restarts=RESTARTS,
            )
            actors.append(
                create(
                    self.config,
                    name=f"engine{i}",
                    # Engines of one seed draw the same numbers: responses of a group, spread over them, could repeat.
                    seed=self.config.data.rollout_seed + i,
                    gpu_ids=[s.gpu_id for s in own if s.gpu_id is not None],
                    device=self.shape.device,
                    host="127.0.0.1" if local else own[0].node_ip,
                    node_id=own[0].node_id,
                    dtype=self._engine_dtype(),
                    key=key,
                )
            )
        self._engines = EngineGroup(actors, stop=self._stop, heartbeat=self._heartbeat)

    def _engine_dtype(self) -> str:
        """The trainer's own, so that both compute the same log-probs."""
        bf16 = self.config.train.model.bf16
        return "bfloat16" if (self.shape.device == "cuda" if bf16 is None else bf16) else "float32"

    def _create_trainers(self, slots: Sequence[Slot]) -> None:
        own = trainer_slots(self.shape, slots)
        world = len(own)
        # Where generation and training take turns, the ranks may use all cores between them; else each engine has one.
        cores = (os.cpu_count() or 1) - (0 if self.shape.shared else self.shape.engines // self.shape.nodes)
        threads = max(1, cores * self.shape.nodes // world) if self.shape.device == "cpu" else 1
        actors = []
        for rank, slot in enumerate(own):
            create = self._actor(
                TrainActor,
                slot.bundle,
                cpus=0.5,
                gpus=0.5 if self.shape.device == "cuda" else 0.0,
                env=actor_environment(self.shape.device, threads=threads),
            )
            actors.append(create(self.config, rank=rank, world_size=world, threads=threads))
        self._trainers = TrainerGroup(
            actors,
            one_node=len({s.node_id for s in own}) == 1,
            stop=self._stop,
            note=self._note,
            profiles=self.config.train_profile.use_pytorch_profiler,
            silence=None if self._rollout is None else self._rollout.silence,
        )

    def _start_engines(self, prompts: Ref[bool], trainer: Sequence[Ref[Any]]) -> "list[EngineAddress]":
        """Waits for the engines and connects the rollout worker.

        Args:
            prompts: the rollout worker's start.
            trainer: what the trainer is doing meanwhile.
        """
        assert self._engines is not None, "who generates needs engines"
        plane = self.rollout.begin_plane() if self.config.cluster.fully_async else None
        engines = self._engines.start([prompts, *trainer, *([] if plane is None else [plane])])
        self._heartbeat.note(f"{len(engines)} SGLang engine(s) healthy")
        self.rollout.finish_start(prompts, self._heartbeat)
        if plane is not None:
            self.rollout.finish_plane(plane, self._heartbeat)
        self.rollout.connect(engines)
        return engines

    def _finish_trainers(
        self, imports: list[Ref[None]], setup: list[Ref[TrainerFacts]], engines: "Sequence[EngineAddress]"
    ) -> None:
        heartbeat, what = self._heartbeat, "the trainer's ranks to import"
        wait_for(imports, what, stop=self._stop, deadline_s=SETUP_DEADLINE_S, heartbeat=heartbeat)
        if self.shares_gpu:
            self.rollout.release_memory()
            setup = self.trainers.begin_setup(heartbeat)
        facts = self.trainers.finish_setup(setup, heartbeat)
        heartbeat.note(f"trainer ready: {facts.parameters / 1e6:.2f} M parameters, {facts.layout}")
        if engines:
            self.trainers.connect(engines)

    # ------------------------------------------------------------------ stop

    def close(self) -> None:
        """Ends every actor and every process below it. Never raises, and never takes long."""
        import ray

        remove_engine_key(self.config.run_dir)
        broken = self._stop.broken
        # Any call of Ray may end this process; who ends Ray ends the actors.
        if broken is not None and not isinstance(broken, NodeLost):
            return
        try:
            goodbyes: list[Any] = []
            goodbyes += self._trainers.close() if self._trainers is not None else []
            goodbyes += self._rollout.close() if self._rollout is not None else []
            goodbyes += self._engines.stop() if self._engines is not None else []
            if goodbyes:
                patience = STOP_DEADLINE_S if self._started else ABANDON_DEADLINE_S
                if self._started and self.config.train_profile.use_pytorch_profiler:
                    patience = TRACES_DEADLINE_S
                ray.wait(goodbyes, num_returns=len(goodbyes), timeout=self._stop.left(patience))
        except Exception:  # Ray itself may be gone; what follows still has to run
            log.exception("while stopping")
        for actor in reversed(self._actors):
            try:
                actor.kill()
            except Exception:
                log.exception("while ending %s", actor.handle)
        if self._placement_group is not None:
            from ray.util.placement_group import remove_placement_group

            try:
                remove_placement_group(self._placement_group)
            except Exception:
                log.exception("while freeing the placement group")
        self._rollout = self._engines = self._trainers = self._placement_group = None
        self._actors = []
