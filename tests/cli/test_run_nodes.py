"""The nodes of a run: which one counts as dead, and what is said about files that one of them does not see."""

import socket
from pathlib import Path
from typing import Any

import pytest
import ray
from relax_cli.cluster import nodes
from relax_cli.cluster.nodes import RunNodes, check_files, parts_on_nodes, unseen
from relax_cli.workers.engine import EngineActor
from relax_rollout.engines.base import EngineDied


def ray_node(name: str, port: int = 1, *, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": name,
        "Alive": alive,
        "NodeManagerAddress": "127.0.0.3",
        "NodeManagerPort": port,
        "DeathReasonMessage": "" if alive else "health check failed",
    }


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Ray says of its nodes; this process is on the node ``own``."""
    found: list[dict[str, Any]] = []

    class Context:
        def get_node_id(self) -> str:
            return "own"

    monkeypatch.setattr(ray, "nodes", lambda: list(found))
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    return found


def test_a_raylet_that_listens_no_more_is_a_dead_node(known: list[dict[str, Any]]) -> None:
    watch = RunNodes()
    assert watch.look() is None, "nothing to look at"
    with socket.create_server(("127.0.0.3", 0)) as raylet:
        known += [ray_node("own"), ray_node("other", raylet.getsockname()[1]), ray_node("unused", alive=False)]
        watch.watch({"own": "the rollout worker", "other": "trainer rank 1"})
        assert watch.look() is None
    lost = watch.look()
    assert lost is not None
    assert str(lost).startswith("node 127.0.0.3 of the Ray cluster has died: nothing listens at 127.0.0.3:")
    assert "It had trainer rank 1." in str(lost)
    assert not watch.doubtful


def test_where_nothing_ever_answered_and_where_all_is_silent_ray_decides(
    known: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    known.append(ray_node("other"))
    watch = RunNodes()
    watch.watch({"other": "engine0"})
    assert watch.look() is None, "refused from the beginning: a firewall may do that"

    def silent(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert watch.look() is None
    assert watch.doubtful
    known[0] = ray_node("other", alive=False)
    assert "Ray has given it up (health check failed). It had engine0" in str(watch.look())


def test_files_that_a_node_does_not_see_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task of the other node runs here, on a machine whose file system lacks a folder."""
    model, save, asked = tmp_path / "model", tmp_path / "checkpoints", []
    model.mkdir()

    class Task:
        def options(self, **_: Any) -> "Task":
            return self

        def remote(self, paths: dict[str, str]) -> Any:
            asked.append(paths)
            return unseen(paths, lambda path: Path(path).exists() and path not in [paths[n] for n in lacking])

    monkeypatch.setattr(nodes.time, "sleep", lambda s: None)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: Task())
    monkeypatch.setattr(nodes, "wait_for", lambda refs, *_, **__: refs)
    needed, shared = {"--hf-checkpoint": str(model), "--load": str(tmp_path / "not yet")}, {"--save": save}

    lacking: list[str] = []
    check_files({"10.0.0.2": {}}, needed=needed, shared=shared)
    assert set(asked[0]) == {"--hf-checkpoint", "--save"}, "what is not here yet need not be there"
    assert list(save.iterdir()) == [], "the mark is gone"
    for names, said in (
        (["--hf-checkpoint"], rf"--hf-checkpoint: node 10\.0\.0\.2 of the Ray cluster does not see {model};"),
        (["--save"], rf"--save: node 10\.0\.0\.2 of the Ray cluster does not see the folder {save} of this machine;"),
        (["--hf-checkpoint", "--save"], r"\(and 1 more\)"),
    ):
        lacking[:] = names
        with pytest.raises(ValueError, match=said):
            check_files({"10.0.0.2": {}}, needed=needed, shared=shared)
    asked.clear()
    check_files({}, needed=needed, shared=shared)
    assert asked == [], "one node needs no look"


def test_a_node_of_engines_alone_is_one_of_many_or_the_last() -> None:
    found = parts_on_nodes(rollout="a", engines=["a", "b", "b"], ranks=["a", "a"], engines_may_die=True)
    assert found == {"a": "the rollout worker, engine0, trainer rank 0, trainer rank 1"}, "engine0 goes on without b"
    found = parts_on_nodes(rollout="a", engines=["b", "b"], ranks=["a"], engines_may_die=True)
    assert found == {"a": "the rollout worker, trainer rank 0", "b": "engine0, engine1"}, "nobody is left"
    found = parts_on_nodes(rollout="a", engines=["a", "b"], ranks=["a"], engines_may_die=False)
    assert found["b"] == "engine1"
    assert parts_on_nodes(rollout=None, engines=[], ranks=["a", "b"], engines_may_die=False)["b"] == "trainer rank 1"


def test_an_engine_that_was_made_anew_on_another_node_refuses_to_start(known: list[dict[str, Any]]) -> None:
    """Its GPUs there would be those of somebody else."""
    actor = EngineActor.__new__(EngineActor)
    actor.name, actor._node_id = "engine3", "the node before"
    with pytest.raises(EngineDied, match=r"engine3 cannot be started: its node is gone"):
        actor.start()
