"""Checks of the mode and of the GPUs that it needs: who trains where, who generates where."""

from relax_data.options import given_flags

from relax_cli.cluster.placement import Placement, local_gpus
from relax_cli.config.run_config import RunConfig


def mode_problems(config: RunConfig) -> list[str]:
    """Lists what does not go with the mode."""
    found = []
    if config.cluster.fully_async:
        if config.train.batch.balance_data:
            found.append(
                "--balance-data works with --colocate only: with --fully-async each data-parallel rank takes its "
                "samples from TransferQueue as they come, before the others are known; remove one of the two"
            )
        if config.rollout.rollout_function_path is not None:
            found.append(
                "--rollout-function-path works with --colocate only: such a function collects one rollout, and with "
                "--fully-async groups are generated without end, over training steps and pushes; remove one of the two"
            )
        debug = ("debug_rollout_only", "debug_train_only", "save_debug_rollout_data", "load_debug_rollout_data")
        if given := [name for name in debug if getattr(config.debug, name)]:
            found.append(
                f"{given_flags(given)} with --fully-async: one half of the loop alone, and its samples, are for "
                "--colocate, where a rollout is a thing of its own; remove one of the two"
            )
        return found
    if "num_data_storage_units" in config.given:
        found.append("--num-data-storage-units has no effect without --fully-async: remove it, or add --fully-async")
    return found


def gpu_problems(config: RunConfig) -> list[str]:
    """Lists engines that do not fit into the GPUs that they are to have; the numbers are in the message."""
    placement, cluster = config.placement, config.cluster
    if placement is None:
        return []
    if placement.device == "cpu":
        return _cpu_problems(config)
    per_engine = config.sglang.rollout_num_gpus_per_engine
    gpus = placement.train_ranks if placement.shared else cluster.rollout_num_gpus or 0
    if per_engine >= 1 and gpus % per_engine:
        whose = "" if placement.shared else f" (--rollout-num-gpus {gpus})"
        return [
            f"the engines have {gpus} GPUs{whose}, which is no multiple of --rollout-num-gpus-per-engine {per_engine}: "
            "change one of them"
        ]
    if per_engine > cluster.num_gpus_per_node:
        return [
            f"--rollout-num-gpus-per-engine {per_engine} is more than one node has (--num-gpus-per-node "
            f"{cluster.num_gpus_per_node}): an engine must fit into a node"
        ]
    return [] if placement.shared else _spanning(placement, cluster.num_gpus_per_node)


def _spanning(placement: Placement, per_node: int) -> list[str]:
    """An engine that would lie on two nodes, because of the GPUs that train and come before it."""
    train, per = placement.train_ranks, placement.gpus_per_engine
    for engine in range(placement.engines):
        first = train + engine * per
        if first // per_node != (first + per - 1) // per_node:
            return [
                f"engine {engine} would have GPUs of two nodes: {train} train, then come {per} an engine "
                f"(--rollout-num-gpus-per-engine), and a node has {per_node} (--num-gpus-per-node); choose numbers of "
                "GPUs that train and generate by which each engine lies on one node"
            ]
    return []


def _cpu_problems(config: RunConfig) -> list[str]:
    found = []
    idle = [
        n
        for n, idles in (
            ("rollout_num_gpus", config.cluster.fully_async and "rollout_num_gpus" in config.given),
            ("rollout_num_gpus_per_engine", config.sglang.rollout_num_gpus_per_engine > 1),
            ("num_gpus_per_node", "num_gpus_per_node" in config.given),
            ("optimizer_cpu_offload", config.train.parallel.optimizer_cpu_offload),
        )
        if idles
    ]
    if idle:
        found.append(f"{given_flags(idle)} without effect: the run has no GPUs; remove it, or run where there are some")
    return found


def lacks_gpus(config: RunConfig) -> bool:
    """Whether a plan has more GPUs than this machine, where it is started and no cluster is joined."""
    placement = config.placement
    return config.cluster.ray_address is None and placement is not None and placement.gpus > local_gpus()


def split_problem(placement: Placement, here: int, where: str) -> str:
    """Message about too few GPUs for a trainer and engines that each have their own.

    Args:
        here: GPUs that there are.
        where: what has them.
    """
    per = placement.gpus_per_engine
    generate = placement.engines * per
    train = here // 2 - here // 2 % (placement.tp * placement.pp * placement.cp)
    left = (here - train) // per * per
    fix = f"for example {train} and {left}" if train and left else "lower the parallel sizes"
    return (
        f"--fully-async: {placement.train_ranks} GPUs that train (--actor-num-nodes x --actor-num-gpus-per-node) + "
        f"{generate} that generate (--rollout-num-gpus) = {placement.gpus}, and {where} has {here}: {fix}, or join "
        "a larger cluster with --ray-address"
    )
