"""Reserves the places that a run needs in a Ray cluster.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from relax_data.settings import DataSettings

from relax_cli.cluster.nodes import nodes_with, own_node
from relax_cli.cluster.placement import Placement
from relax_cli.cluster.ray_cluster import cluster_gpus
from relax_cli.cluster.waits import Heartbeat, StopFlag, StopRequested, wait_for
from relax_cli.config.settings import ClusterSettings

PLACEMENT_DEADLINE_S = 300.0
"""How long a run waits for the cluster to have room for it."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One reserved place: a GPU (or, on a CPU machine, a core) on some node of the cluster."""

    bundle: int
    """Index of the bundle in the placement group; without GPUs those of one of several nodes have one in common."""
    node_id: str
    node_ip: str
    gpu_id: str | None
    """What CUDA_VISIBLE_DEVICES calls the GPU on its node; None on a CPU machine."""


def slots_needed(placement: Placement) -> int:
    """Slots of a run: on shared ones engines and trainer take turns, otherwise each side has its own."""
    engines = placement.engines * placement.gpus_per_engine
    return max(placement.train_ranks, engines) if placement.shared else placement.train_ranks + engines


def plane_cpus(cluster: ClusterSettings, data: DataSettings) -> int:
    """CPUs of Ray beside the slots, for the processes of TransferQueue: its controller and the storage units."""
    return 1 + data.num_data_storage_units if cluster.fully_async else 0


def check_cpus(slots: int, units: int) -> None:
    """Looks whether the connected cluster has the CPUs for a run of ``--fully-async``.

    Args:
        slots: of trainer and engines.
        units: storage units of TransferQueue.

    Raises:
        ValueError: it has too few, or another run uses TransferQueue in it.
    """
    import ray

    needed, here = slots + 1 + units, int(ray.cluster_resources().get("CPU", 0))
    if here < needed:
        raise ValueError(
            f"--num-data-storage-units {units}: the run needs {slots} for trainer and engines + 1 for TransferQueue's "
            f"controller + {units} for its storage units = {needed} CPUs of Ray, and the cluster has {here}: lower it, "
            "or join a larger cluster with --ray-address"
        )
    if any(actor["name"] == "TransferQueueController" for actor in ray.util.list_named_actors(all_namespaces=True)):
        raise ValueError(
            "--fully-async: another run uses TransferQueue in this Ray cluster, where there can be one only: wait for "
            "its end, or run without --ray-address, or in another cluster"
        )


def trainer_slots(placement: Placement, slots: Sequence[Slot]) -> list[Slot]:
    """The slots of the trainer's ranks, in rank order: the first ones, of each node where all have some."""
    ranks = placement.train_ranks // placement.nodes
    return [slot for part in _of_nodes(placement, slots) for slot in part[:ranks]]


def _of_nodes(placement: Placement, slots: Sequence[Slot]) -> list[Sequence[Slot]]:
    """The slots of each node that has its share of the run; all of them where GPUs decide."""
    each = len(slots) // placement.nodes
    return [slots[k * each : (k + 1) * each] for k in range(placement.nodes)]


def engine_slots(placement: Placement, slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots of each engine, all on one node: those of ranks where slots are shared, else behind the trainer's.

    Raises:
        ValueError: an engine would span nodes; the message names the flag.
    """
    per = placement.gpus_per_engine
    first = 0 if placement.shared else placement.train_ranks // placement.nodes
    engines = [
        list(part[first + i * per : first + (i + 1) * per])
        for part in _of_nodes(placement, slots)
        for i in range(placement.engines // placement.nodes)
    ]
    for i, own in enumerate(engines):
        if len({s.node_id for s in own}) != 1:
            raise ValueError(
                f"--rollout-num-gpus-per-engine {per}: engine {i} would span the nodes "
                f"{sorted({s.node_ip for s in own})}. "
                "An engine must fit into one node: choose a divisor of the GPUs of a node."
            )
    return engines


def reserve(
    n_slots: int, *, gpus: bool, nodes: int = 1, stop: StopFlag | None = None, heartbeat: Heartbeat | None = None
) -> tuple[Any, list[Slot]]:
    """Reserves ``n_slots`` places and sorts them by node, then GPU, so that neighbours in the list share a node.

    The node of the driver comes first if it has some: whoever needs the driver's files is in the first place.

    Args:
        gpus: each place has a GPU.
        nodes: more than 1: so many nodes get as many places each.
        heartbeat: tells the user what is waited for.

    Returns:
        Ray's placement group, and its slots in rank order.

    Raises:
        ValueError: the cluster has too few GPUs or nodes, or no room within :data:`PLACEMENT_DEADLINE_S`.
        StopRequested: the user asked the run to end.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if gpus and cluster_gpus() < n_slots:
        raise ValueError(
            f"the run needs {n_slots} GPUs but the Ray cluster has {cluster_gpus()}: lower --actor-num-nodes, "
            "--actor-num-gpus-per-node or --rollout-num-gpus, or join a larger cluster with --ray-address."
        )
    each = n_slots // nodes if nodes > 1 else 1
    _check_nodes(nodes, each)
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": float(each)}
    group = placement_group([bundle] * (n_slots // each), strategy="STRICT_SPREAD" if nodes > 1 else "PACK")
    give_up = time.monotonic() + PLACEMENT_DEADLINE_S
    while not group.wait(1):
        if stop is not None:
            stop.raise_broken()
        try:
            _check_nodes(nodes, each)  # Ray needs some seconds to notice that a node is gone
        except ValueError:
            remove_placement_group(group)
            raise
        stopped = stop is not None and stop.requested
        if not stopped and time.monotonic() < give_up:
            if heartbeat is not None:
                heartbeat.waiting(f"room for {n_slots} process(es) in the Ray cluster")
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

    places = [where.options(**strategy(group, i)).remote() for i in range(n_slots // each)]
    found = wait_for(
        places, "the reserved places to answer", stop=stop, deadline_s=PLACEMENT_DEADLINE_S, heartbeat=heartbeat
    )
    slots, own = [Slot(i, *place) for i, place in enumerate(found) for _ in range(each)], own_node()
    order = sorted(slots, key=lambda s: (s.node_id != own, s.node_ip, s.node_id, int(s.gpu_id or 0), s.bundle))
    return group, order


def _check_nodes(nodes: int, cpus: int) -> None:
    """Looks whether the cluster has so many nodes with so many CPUs each, where more than one is asked for."""
    if nodes > 1 and (there := nodes_with(cpus)) < nodes:
        raise ValueError(
            f"--actor-num-nodes {nodes}: the run needs {nodes} nodes with {cpus} CPUs of Ray each, and the cluster has "
            f"{there}: lower it, or start Ray on more nodes (`ray start --address ...`)"
        )


def strategy(group: Any, bundle: int) -> dict[str, Any]:
    """Ray options that put an actor or task into one bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
    }
