"""The processes of a run and their GPUs: the arithmetic of GPUs and ranks, without torch."""

import dataclasses
import functools
import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_train.settings import ParallelSettings

from relax_cli.config.settings import ClusterSettings

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Options of the parallel sizes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The processes of a run.

    Attributes:
        device: what trainer and engines compute on.
        train_ranks: processes of the trainer, one a GPU.
        engines: SGLang servers.
        gpus_per_engine: GPUs of each; 1 on CPU too, where it is one process.
        shared: engines and trainer use the same GPUs in turn; on CPU, the same cores.
        nodes: without GPUs, machines that each have their share of the ranks and of the engines. With GPUs the
            cluster decides what lies where, and this is 1.
    """

    device: Literal["cuda", "cpu"]
    train_ranks: int
    engines: int
    gpus_per_engine: int
    shared: bool
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    nodes: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas of the model in the trainer."""
        return max(1, self.train_ranks // (self.tp * self.pp * self.cp))

    @property
    def expert_dp(self) -> int:
        """Replicas of the experts."""
        return max(1, self.train_ranks // (self.etp * self.ep * self.pp))

    @property
    def gpus(self) -> int:
        """GPUs of trainer and engines together."""
        if self.device == "cpu":
            return 0
        rollout = self.engines * self.gpus_per_engine
        return max(self.train_ranks, rollout) if self.shared else self.train_ranks + rollout

    @property
    def layout(self) -> str:
        """The parallel sizes in words, those of the experts too where these are divided."""
        text = f"TP {self.tp} x PP {self.pp} x CP {self.cp} x DP {self.dp}"
        experts = f", experts: EP {self.ep} x ETP {self.etp} x DP {self.expert_dp}"
        return text + (experts if self.ep > 1 else "")

    def rank_tag(self, rank: int) -> dict[str, int]:
        """Global, data, tensor and pipeline parallel rank, in Megatron's default order (tp, cp, dp, pp)."""
        return {
            "rank": rank,
            "dp": rank // (self.tp * self.cp) % self.dp,
            "tp": rank % self.tp,
            "pp": rank // (self.tp * self.cp * self.dp),
        }


def make_placement(
    cluster: ClusterSettings, parallel: ParallelSettings, sglang: SGLangSettings, *, available_gpus: int | None = None
) -> Placement | None:
    """The placement that the settings ask for; sizes that do not divide are rounded down, the validation names them.

    Without GPUs each node has as many ranks of the trainer as its parallel sizes need, and one engine.

    Args:
        available_gpus: GPUs of the cluster, for the settings that say "all there are"; None when nobody knows yet.

    Returns:
        None when the number of GPUs is not known: the run joins a Ray cluster and takes all it finds.
    """
    tp, pp, cp, ep = (
        max(1, size)
        for size in (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
        )
    )
    etp = max(1, parallel.resolved_expert_tensor_parallel_size)
    sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
    per_node = cluster.actor_num_gpus_per_node
    nodes = max(1, cluster.actor_num_nodes)
    if per_node is None and available_gpus is not None:
        per_node = available_gpus // nodes
    if per_node is None:
        return None
    if per_node == 0:
        ranks = math.lcm(tp * pp * cp, ep * etp * pp) if ep > 1 else tp * pp * cp
        own = {"train_ranks": ranks * nodes, "engines": nodes, "gpus_per_engine": 1, "nodes": nodes}
        return Placement(device="cpu", shared=cluster.colocate, **own, **sizes)
    world = per_node * nodes
    per_engine = max(1, sglang.rollout_num_gpus_per_engine)
    rollout_gpus = world if cluster.colocate else cluster.rollout_num_gpus or cluster.num_gpus_per_node
    return Placement(
        device="cuda",
        train_ranks=world,
        engines=max(1, rollout_gpus // per_engine),
        gpus_per_engine=per_engine,
        shared=cluster.colocate,
        **sizes,
    )


def local_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs of this machine that this process may use; asks the driver, not torch."""
    names = _visible_gpus(environ)
    if names is None:
        return _driver_gpus()
    return 0 if names[:1] == ["-1"] else min(len(names), _driver_gpus())


def _visible_gpus(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs of ``CUDA_VISIBLE_DEVICES``, by number or by the beginning of their UUID; None: all are visible."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]


def _driver_gpus() -> int:
    found = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    if found:
        return len(found)
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def gpu_memory() -> float | None:
    """Bytes of memory of the smallest GPU that this process may use; None where there is none or it cannot be told."""
    tool = shutil.which("nvidia-smi")
    if tool is None or local_gpus() == 0:
        return None
    gpus, names = _listed_gpus(tool), _visible_gpus(os.environ)
    if names is not None:
        found = [[gpu for gpu in gpus if gpu[0] == name or gpu[1].startswith(name)] for name in names]
        if any(len(matches) != 1 for matches in found):
            return None
        gpus = tuple(matches[0] for matches in found)
    return min((size for _, _, size in gpus), default=None)


@functools.cache  # the tool may take a second, and a start asks several times
def _listed_gpus(tool: str) -> tuple[tuple[str, str, float], ...]:
    """Number, UUID and bytes of each GPU of this machine; none where its driver does not say."""
    query = [tool, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines() if line.strip()]
        return tuple((index, uuid, float(mib) * 2**20) for index, uuid, mib in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def machine_memory() -> float:
    """Bytes of memory of this machine, within the limit of the container."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, float(text)) if text.isdigit() else total
