"""The Ray actor of one training rank."""

import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.workers.process import enter_folder, start_log

if TYPE_CHECKING:
    from relax_data.types import StepManifest
    from relax_rollout.engines.base import EngineAddress
    from relax_rollout.weight_sync.base import PushReport, WeightTransport
    from relax_train.backend.host_memory import HostMemory
    from relax_train.checkpoint.manifest import Loaded
    from relax_train.observer import StepObserver
    from relax_train.trainer import Trainer

    from relax_cli.cluster.placement import Placement
    from relax_cli.config.run_config import RunConfig
    from relax_cli.workers.references import RowReference


@dataclasses.dataclass(frozen=True)
class TrainerFacts:
    """Facts about a trainer that is ready, for the user.

    Attributes:
        parameters: of the whole model.
        layout: parallel sizes, for people.
    """

    parameters: int
    layout: str


class TrainActor:
    """Holds one rank of the trainer. All methods but :meth:`place` are collective: call them on every rank."""

    def __init__(self, config: "RunConfig", *, rank: int, world_size: int, threads: int) -> None:
        enter_folder(config.folder)
        start_log(config.run_dir, f"trainer_rank{rank}")
        self._config = config
        self._rank, self._world_size, self._threads = rank, world_size, threads
        self._trainer: Trainer | None = None
        self._transport: WeightTransport | None = None
        self._transport_name: str | None = None
        self._engine_names: frozenset[str] = frozenset()
        self._whole: frozenset[str] = frozenset()
        """Engines whose processes have got the whole model, a frozen vision tower too."""
        self._host: HostMemory | None = None

    def place(self, one_node: bool) -> tuple[str, int]:
        """Address of this process's node and a free port on it, for rank 0 to be the rendezvous.

        Args:
            one_node: all ranks are on it, so that they meet on the loopback and nobody else can reach them.
        """
        import ray

        ip = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((ip, 0))
            return ip, probe.getsockname()[1]

    def prepare(self) -> None:
        """Imports what :meth:`setup` needs, without touching a device: the slow part of a start.

        Where trainer and engines take turns on a GPU, the memory of the host that the trainer's weights and optimizer
        move to is begun here as well, beside the imports and the engines' start.

        Raises:
            ValueError: ``--advantage-estimator`` or ``--loss-type`` names a function of the user that cannot be used;
                now, while the engines load, and not after they have.
        """
        from relax_train.algorithms.registry import load_estimator, load_loss

        load_estimator(self._config.train.algorithm.advantage_estimator)
        load_loss(self._config.train.algorithm.loss_type)
        self._host = self._begin_host_memory()
        import relax_train.trainer  # noqa: F401

    def _begin_host_memory(self) -> "HostMemory | None":
        """Memory of the host for all that sleeps; None where the trainer never sleeps."""
        debug, placement = self._config.debug, self._placement
        if placement.device != "cuda" or not placement.shared or debug.debug_train_only:
            return None
        from relax_train.backend.host_memory import HostMemory
        from relax_train.models.architectures import model_shape
        from relax_train.settings.model import read_hf_config

        train = self._config.train
        shape = model_shape(read_hf_config(train.model.hf_checkpoint))
        host = HostMemory(pinned=True)
        bf16 = train.model.bf16 is not False
        host.begin(shape.sleeping_bytes(placement, bf16=bf16, offload=train.parallel.optimizer_cpu_offload))
        return host

    def setup(self, master: tuple[str, int]) -> TrainerFacts:
        """Joins the process group and builds model and optimizer from ``--hf-checkpoint``.

        Args:
            master: address and port of rank 0, where the ranks meet.
        """
        os.environ.update(
            RANK=str(self._rank),
            WORLD_SIZE=str(self._world_size),
            LOCAL_RANK="0",  # Ray shows each actor its own GPU only
            MASTER_ADDR=master[0],
            MASTER_PORT=str(master[1]),
        )
        import torch

        _listen_for_other_nodes(master[0])
        if self._placement.device == "cuda" and not self._placement.shared:
            from relax_rollout.weight_sync.pair_group import set_nccl_environment

            set_nccl_environment()
        torch.set_num_threads(self._threads)
        from relax_train.trainer import Trainer

        self._trainer = Trainer(
            self._config.train,
            temperature=self._config.rollout.rollout_temperature,
            total_steps=self._total_steps(),
            always_log_probs=_profiles_log_probs(self._config),
            observer=self._observer(),
            host=self._host,
        )
        self._trainer.setup()
        return TrainerFacts(self._trainer.parameter_count, self._placement.layout)

    @property
    def _placement(self) -> "Placement":
        assert self._config.placement is not None, "the cluster is known before its workers"
        return self._config.placement

    @property
    def _ready(self) -> "Trainer":
        assert self._trainer is not None, "setup() comes first"
        return self._trainer

    def _total_steps(self) -> int | None:
        """Optimizer steps of the whole run, where a decaying learning rate ends; None when the data decides."""
        rollouts, steps = self._config.run.num_rollout, self._config.train.batch.num_steps_per_rollout
        return rollouts * steps if rollouts is not None and steps is not None else None

    def _observer(self) -> "StepObserver":
        from relax_train.observer import NullObserver

        train, memory = self._config.train_profile, self._config.memory_profile
        if not (train.use_pytorch_profiler or memory.record_memory_history):
            return NullObserver()
        from relax_profiling.recorders.training import build_observer

        tag = self._config.rank_tag(self._rank)
        return build_observer(train, memory, trace_dir=self._config.trace_dir, **tag).defer_traces()

    def connect(self, engines: "Sequence[EngineAddress]") -> None:
        """Tells this rank where the engines are, and sets up the way for weights to them; again when one has moved."""
        from relax_rollout.weight_sync.transports import make_transport

        from relax_cli.workers.plane_rows import joined_plane

        if self._config.cluster.fully_async:
            joined_plane()  # now, and not in the first step
        placement = self._placement
        if self._transport is not None:
            self._transport.close()
        self._engine_names, self._whole = frozenset(engine.name for engine in engines), frozenset()
        self._transport_name = None if placement.shared else self._config.cluster.weight_sync or "group"
        self._transport = make_transport(
            engines,
            rank=self._rank,
            world_size=self._world_size,
            device=placement.device,
            gpus_per_engine=placement.gpus_per_engine,
            name=self._transport_name,
            folder=self._config.run_dir / "weights",
        )

    def train(self, manifest: "StepManifest", rows: "RowReference", version: int) -> dict[str, float]:
        """All optimizer steps of one rollout; metrics are equal on all ranks but for the times.

        Args:
            manifest: what every rank may know of the samples.
            rows: where this rank gets the rows of its own samples from.
            version: of the weights before these steps.
        """
        from relax_cli.workers.plane_rows import FetchedRows

        source = rows.for_rank(self._rank, manifest)
        metrics = self._ready.train(manifest, source, version=version)
        if isinstance(source, FetchedRows):
            metrics["plane/fetch_s"] = source.seconds
        return metrics

    def push_weights(self, version: int, engines: "Sequence[str] | None" = None) -> "PushReport":
        """Sends the current weights to the engines of these names, or to all, as ``version``.

        A frozen vision tower goes once to each process of an engine, where engines keep their weights: those that share
        GPUs with the trainer sleep, and wake with nothing; and what comes as files is read as a whole model.
        """
        assert self._transport is not None, "the engines are known before weights are sent"
        names = self._engine_names if engines is None else frozenset(engines)
        seen = self._transport_name == "group" and names <= self._whole
        self._whole -= names  # until this push has ended well
        size = self._config.train.model.update_weight_buffer_size
        report = self._transport.push(self._ready.weight_buckets(size, frozen=not seen), version, engines)
        self._whole |= names - report.failed.keys()
        return report

    def save(self, directory: str, rollout_id: int, extra: dict[str, Any], files: Path | None) -> None:
        """Writes a checkpoint of the rollout, with the driver's state in ``extra``, and takes over ``files``."""
        self._ready.save(directory, rollout_id, extra, files)

    def load(self, directory: str) -> "Loaded | None":
        """Loads the latest checkpoint under ``directory``.

        Returns:
            its rollout id, the driver's state, and where it is; None when there is no checkpoint yet.
        """
        self._whole = frozenset()
        return self._ready.load(directory)

    def save_hf(self, directory: str) -> None:
        """Writes the weights as a Hugging Face folder."""
        self._ready.save_hf(directory)

    def sleep(self) -> None:
        """Moves model and optimizer to host memory, so that the engine can have the GPU."""
        self._ready.sleep()

    def wake(self) -> None:
        """Moves model and optimizer back to the GPU."""
        self._ready.wake()

    def measure_room(self) -> None:
        """Lets stay on the GPU what fits beside the engines, which must be awake."""
        self._ready.measure_room()

    def free_resident(self) -> None:
        """Leaves the whole GPU to an engine that starts."""
        self._ready.free_resident()

    def write_traces(self, last: bool) -> None:
        """Writes the trace of profiled steps that are over; with ``last``, as no step follows, also of others."""
        self._ready.write_traces(last=last)

    def close(self) -> None:
        """Ends the process groups of this rank."""
        if self._transport is not None:
            self._transport.close()
        if self._trainer is not None:
            self._trainer.close()


def _listen_for_other_nodes(master: str) -> None:
    """Lets gloo of a rank whose peers are on other nodes listen at the address that Ray has for this node."""
    import ray
    from relax_rollout.weight_sync.feeders import interface_of

    if master != "127.0.0.1" and (interface := interface_of(ray.util.get_node_ip_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _profiles_log_probs(config: "RunConfig") -> bool:
    """Whether a profile of the phase was asked for, which is empty when the training pass gives the same values."""
    profile = config.train_profile
    return profile.use_pytorch_profiler and "train_log_probs" in profile.profile_target
