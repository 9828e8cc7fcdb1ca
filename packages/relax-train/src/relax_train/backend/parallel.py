"""Who does what: the ranks of the trainer, their parallel groups and their device."""

import dataclasses
import ipaddress
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from relax_train.backend.device import has_cuda, local_device
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import parallel_state, tensor_parallel
from relax_train.settings.parallel import ParallelSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelState:
    """Place of this rank in the parallel layout.

    Groups: ``dp_group`` holds the ranks with the same model and sequence part but other samples, ``dp_cp_group`` those
    that hold the same weights (data and context parallel), ``ep_group`` the ranks that share experts, ``etp_group``
    those that share each expert's matrices. ``gloo_group`` holds all ranks and takes CPU tensors also when the others
    are NCCL.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    ep_group: dist.ProcessGroup
    etp_group: dist.ProcessGroup
    gloo_group: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        """True where the pipeline begins: this rank has the input embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the pipeline ends: this rank has the logits and the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def experts_span_data_parallel(self) -> bool:
        """True when ranks with other samples hold experts for each other, and so meet in every micro-batch.

        Ranks are numbered so that those that share experts follow each other, as do those that share a sample.
        """
        return self.ep_size * self.etp_size > self.tp_size * self.cp_size

    @property
    def signature(self) -> dict[str, int]:
        """The sizes that decide how optimizer state is cut; JSON-able."""
        return {
            "tensor_model_parallel_size": self.tp_size,
            "pipeline_model_parallel_size": self.pp_size,
            "context_parallel_size": self.cp_size,
            "data_parallel_size": self.dp_size,
            "expert_model_parallel_size": self.ep_size,
            "expert_tensor_parallel_size": self.etp_size,
        }


def setup_parallel(
    parallel: ParallelSettings, *, seed: int = 1234, timeout: timedelta = timedelta(minutes=30)
) -> ParallelState:
    """Joins the process group, makes the parallel groups and seeds the random numbers of this rank.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set; missing ones mean a single process. A
    MASTER_ADDR on the loopback (127.0.0.1) says that all ranks are on this node: then nothing listens on another
    interface.

    Args:
        seed: the same on every rank; megatron derives what must differ.
        timeout: of every collective.

    Raises:
        ValueError: the sizes do not divide the number of ranks.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if world % parallel.model_parallel_size:
        raise ValueError(
            f"{world} ranks are no multiple of TP x PP x CP = {parallel.model_parallel_size}; change their number "
            "or --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size"
        )
    device = local_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if has_cuda() else "gloo",
            store=_store(rank, world, timeout),
            rank=rank,
            world_size=world,
            timeout=timeout,
        )
    with DeviceContext():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.resolved_expert_tensor_parallel_size,
            create_gloo_process_groups=True,
            distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return _state_of_rank(rank, world, local_rank, device, timeout)


def _state_of_rank(rank: int, world: int, local_rank: int, device: torch.device, timeout: timedelta) -> ParallelState:
    """Asks megatron for the place of this rank. Collective: makes a group for CPU tensors."""
    ps = parallel_state
    everyone = dist.group.WORLD
    assert everyone is not None, "torch.distributed was set up above"
    return ParallelState(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        device=device,
        tp_rank=ps.get_tensor_model_parallel_rank(),
        tp_size=ps.get_tensor_model_parallel_world_size(),
        pp_rank=ps.get_pipeline_model_parallel_rank(),
        pp_size=ps.get_pipeline_model_parallel_world_size(),
        cp_rank=ps.get_context_parallel_rank(),
        cp_size=ps.get_context_parallel_world_size(),
        dp_rank=ps.get_data_parallel_rank(),
        dp_size=ps.get_data_parallel_world_size(),
        ep_rank=ps.get_expert_model_parallel_rank(),
        ep_size=ps.get_expert_model_parallel_world_size(),
        etp_rank=ps.get_expert_tensor_parallel_rank(),
        etp_size=ps.get_expert_tensor_parallel_world_size(),
        tp_group=ps.get_tensor_model_parallel_group(),
        pp_group=ps.get_pipeline_model_parallel_group(),
        cp_group=ps.get_context_parallel_group(),
        dp_group=ps.get_data_parallel_group(),
        dp_cp_group=ps.get_data_parallel_group(with_context_parallel=True),
        ep_group=ps.get_expert_model_parallel_group(),
        etp_group=ps.get_expert_tensor_parallel_group(),
        gloo_group=dist.new_group(backend="gloo", timeout=timeout) if has_cuda() else everyone,
    )


def _store(rank: int, world: int, timeout: timedelta) -> dist.Store | None:
    """The place where the ranks find each other; None lets torch do as the environment says."""
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if master is None and world == 1:
        return dist.HashStore()
    if master is None or port is None:
        return None
    # With torchrun's own store somebody else listens.
    if not _is_loopback(master) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        # Otherwise gloo takes the interface of the host's name, and NCCL any but the loopback: others may reach those.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", names[0])
    listener = None
    if rank == 0:
        # torch's own listens on every interface.
        listener = socket.create_server(("127.0.0.1", int(port)), backlog=max(128, world)).detach()
    return dist.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.IPv4Address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def teardown_parallel() -> None:
    """Leaves all groups; harmless when there is none."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
