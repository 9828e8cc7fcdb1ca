"""Reserves the places that a run needs in a Ray cluster.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import dataclasses
import time
from typing import Any

from relax_cli.cluster.ray_cluster import cluster_gpus
from relax_cli.cluster.waits import StopFlag, StopRequested, wait_for

PLACEMENT_DEADLINE_S = 300.0
"""How long a run waits for the cluster to have room for it."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One reserved place: a GPU (or, on a CPU machine, a core) on some node of the cluster."""

    bundle: int
    """Index of the bundle in the placement group."""
    node_id: str
    node_ip: str
    gpu_id: str | None
    """What CUDA_VISIBLE_DEVICES calls the GPU on its node; None on a CPU machine."""


def reserve(n_slots: int, *, gpus: bool, stop: StopFlag | None = None) -> tuple[Any, list[Slot]]:
    """Reserves ``n_slots`` places and sorts them by node, then GPU, so that neighbours in the list share a node.

    Returns:
        Ray's placement group, and its slots in rank order.

    Raises:
        ValueError: the cluster has too few GPUs, or no room within :data:`PLACEMENT_DEADLINE_S`.
        StopRequested: the user asked the run to end.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if gpus and cluster_gpus() < n_slots:
        raise ValueError(
            f"the run needs {n_slots} GPUs but the Ray cluster has {cluster_gpus()}: lower --actor-num-nodes or "
            "--actor-num-gpus-per-node, or join a larger cluster with --ray-address."
        )
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    group = placement_group([bundle] * n_slots, strategy="PACK")
    give_up = time.monotonic() + PLACEMENT_DEADLINE_S
    while not group.wait(1):
        stopped = stop is not None and stop.requested
        if not stopped and time.monotonic() < give_up:
            continue
        remove_placement_group(group)
        if stopped:
            raise StopRequested("room in the cluster")
        raise ValueError(
            f"waited {PLACEMENT_DEADLINE_S:.0f} s for {n_slots} bundles of {bundle}: the cluster offers "
            f"{ray.available_resources()}. Is another run holding it?"
        )

    @ray.remote(num_cpus=0.1, num_gpus=0.1 if gpus else 0)
    def where() -> tuple[str, str, str | None]:
        context = ray.get_runtime_context()
        ids = ray.get_gpu_ids()
        return context.get_node_id(), ray.util.get_node_ip_address(), str(ids[0]) if ids else None

    places = [where.options(**strategy(group, i)).remote() for i in range(n_slots)]
    found = wait_for(places, "the reserved places to answer", stop=stop, deadline_s=PLACEMENT_DEADLINE_S)
    slots = [Slot(i, *place) for i, place in enumerate(found)]
    return group, sorted(slots, key=lambda s: (s.node_ip, s.node_id, int(s.gpu_id or 0), s.bundle))


def strategy(group: Any, bundle: int) -> dict[str, Any]:
    """Ray options that put an actor or task into one bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
    }
