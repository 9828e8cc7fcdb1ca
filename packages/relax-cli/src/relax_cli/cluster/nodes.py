"""The nodes of a cluster that a run has parts on: whether they see its files, and whether they live.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import contextlib
import dataclasses
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_cli.cluster.ray_watch import RayLost
from relax_cli.cluster.waits import StopFlag, wait_for

ANSWER_S = 3.0
"""How long a node may take to accept a connection before it counts as silent; then Ray's GCS decides."""
FILES_DEADLINE_S = 120.0
SEEN_TRIES = 5
"""Looks for a new file, a second apart: a network file system may show it late."""


class NodeLost(RayLost):
    """A node with a part of the run has died. Ray itself goes on, and so does the rest of the cluster."""


@dataclasses.dataclass
class _Node:
    """Another node than the driver's.

    Attributes:
        address: of its raylet.
        has: parts of the run, for people.
        answered: its raylet has accepted a connection.
    """

    address: tuple[str, int]
    has: str
    answered: bool = False


class RunNodes:
    """The nodes that the parts of a run are on, but for the driver's own."""

    def __init__(self) -> None:
        """Knows of no node yet."""
        self._nodes: dict[str, _Node] = {}
        self._silent: set[str] = set()

    def watch(self, parts: Mapping[str, str]) -> None:
        """Takes note of the nodes from now on.

        Args:
            parts: Ray's id of each node, and what of the run is there, for people.
        """
        import ray

        own = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():
            name = node["NodeID"]
            if name in parts and name != own:
                address = node["NodeManagerAddress"], int(node["NodeManagerPort"])
                self._nodes[name] = _Node(address, parts[name])

    @property
    def doubtful(self) -> bool:
        """Whether a node did not answer in the last look, without Ray having given it up yet."""
        return bool(self._silent)

    def look(self) -> NodeLost | None:
        """The error once one of them is gone."""
        if not self._nodes:
            return None
        import ray

        given_up = {n["NodeID"]: n.get("DeathReasonMessage") or "" for n in ray.nodes() if not n["Alive"]}
        for name, node in self._nodes.items():
            why = f"Ray has given it up ({given_up[name] or 'no reason told'})" if name in given_up else self._ask(name)
            if why:
                return NodeLost(
                    f"node {node.address[0]} of the Ray cluster has died: {why}. It had {node.has}. Start Ray on it "
                    "again, or on another one, before the run is started again"
                )
        return None

    def _ask(self, name: str) -> str:
        """Why a node counts as dead; empty when it answers, and when only Ray can tell."""
        node = self._nodes[name]
        try:
            socket.create_connection(node.address, timeout=ANSWER_S).close()
        except ConnectionRefusedError:
            # A raylet that never answered may be behind a firewall.
            return "nothing listens at {}:{} any more, where its raylet was".format(*node.address) * node.answered
        except OSError:
            self._silent.add(name)
        else:
            node.answered = True
            self._silent.discard(name)
        return ""


def parts_on_nodes(
    *, rollout: str | None, engines: Sequence[str], ranks: Sequence[str], engines_may_die: bool
) -> dict[str, str]:
    """Names what a run has on each node without which it cannot go on.

    Args:
        rollout: Ray's id of the node of the rollout worker; None without one.
        engines: of each engine.
        ranks: of each rank of the trainer.
        engines_may_die: a node that has engines alone is left out while others have some too: those go on.
    """
    has: dict[str, list[str]] = {} if rollout is None else {rollout: ["the rollout worker"]}
    for i, node in enumerate(engines):
        has.setdefault(node, []).append(f"engine{i}")
    for rank, node in enumerate(ranks):
        has.setdefault(node, []).append(f"trainer rank {rank}")
    spared = set(engines) - set(ranks) - {rollout} if engines_may_die and len(set(engines)) > 1 else set()
    return {node: ", ".join(parts) for node, parts in has.items() if node not in spared}


def nodes_with(cpus: int) -> int:
    """Living nodes of the connected cluster that have so many CPUs in all."""
    import ray

    return sum(node["Alive"] and node["Resources"].get("CPU", 0) >= cpus for node in ray.nodes())


def own_node() -> str:
    """Ray's id of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def check_files(
    places: Mapping[str, dict[str, Any]],
    *,
    needed: Mapping[str, str],
    shared: Mapping[str, Path],
    stop: StopFlag | None = None,
) -> None:
    """Looks whether other nodes see the files of the driver's.

    Args:
        places: Ray's options of a task on each node, by the node's address.
        needed: files and folders that have to be there, by the option that names them.
        shared: folders that have to be the very same ones, by what they are; made if they are not there.
        stop: gives up the wait.

    Raises:
        ValueError: a node does not see one of them; the message names both, and the option.
    """
    if not places:
        return
    import ray

    wanted: dict[str, str] = {name: path for name, path in needed.items() if os.path.exists(path)}
    with contextlib.ExitStack() as stack:
        wanted |= {name: str(stack.enter_context(_marked(folder))) for name, folder in shared.items()}
        look = ray.remote(num_cpus=0)(unseen)
        asked = {address: look.options(**options).remote(wanted) for address, options in places.items()}
        answers = wait_for(
            list(asked.values()), "the nodes to look for the files", stop=stop, deadline_s=FILES_DEADLINE_S
        )
    lacks = [(address, name) for address, names in zip(asked, answers, strict=True) for name in names]
    if lacks:
        address, name = lacks[0]
        what = f"the folder {shared[name]} of this machine" if name in shared else needed[name]
        others = f" (and {len(lacks) - 1} more)" * (len(lacks) > 1)
        raise ValueError(
            f"{name}: node {address} of the Ray cluster does not see {what}{others}; all nodes of a run need the same "
            "files under the same paths: put it on a file system that they share"
        )


def unseen(paths: Mapping[str, str], exists: Callable[[str], bool] = os.path.exists) -> Collection[str]:
    """Names of the paths that are not there, after some seconds of patience."""
    for attempt in range(SEEN_TRIES):
        lacking = [name for name, path in paths.items() if not exists(path)]
        if not lacking or attempt + 1 == SEEN_TRIES:
            return lacking
        time.sleep(1.0)
    return []


@contextlib.contextmanager
def _marked(folder: Path) -> Iterator[Path]:
    """A file with a new name in a folder, there while inside."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".seen-by-all-nodes-{secrets.token_hex(8)}"
    mark.touch()
    try:
        yield mark
    finally:
        mark.unlink(missing_ok=True)
