"""Which slots of the cluster the processes of a run take."""

import dataclasses

import pytest
import ray
from relax_cli.cluster.placement import Placement
from relax_cli.cluster.slots import Slot, engine_slots, reserve, slots_needed, trainer_slots

SHARED = Placement(
    device="cuda", train_ranks=4, engines=2, gpus_per_engine=2, shared=True, tp=1, pp=1, cp=1, ep=1, etp=1
)
SEPARATE = dataclasses.replace(SHARED, shared=False)


def slots(n: int, per_node: int = 8) -> list[Slot]:
    return [Slot(i, f"node{i // per_node}", f"10.0.0.{i // per_node}", str(i % per_node)) for i in range(n)]


def bundles(engines: list[list[Slot]]) -> list[list[int]]:
    return [[slot.bundle for slot in engine] for engine in engines]


def test_engines_and_ranks_take_turns_on_shared_slots() -> None:
    assert slots_needed(SHARED) == 4
    assert [s.bundle for s in trainer_slots(SHARED, slots(4))] == [0, 1, 2, 3]
    assert bundles(engine_slots(SHARED, slots(4))) == [[0, 1], [2, 3]]


def test_each_side_has_its_own_where_slots_are_separate() -> None:
    assert slots_needed(SEPARATE) == 8
    assert [s.bundle for s in trainer_slots(SEPARATE, slots(8))] == [0, 1, 2, 3]
    assert bundles(engine_slots(SEPARATE, slots(8))) == [[4, 5], [6, 7]]


def test_an_engine_fits_into_one_node() -> None:
    with pytest.raises(ValueError, match=r"--rollout-num-gpus-per-engine 2: engine 1 would span .*10\.0\.0\.0"):
        engine_slots(SHARED, slots(4, per_node=3))


def test_without_gpus_each_node_has_its_ranks_and_an_engine() -> None:
    """Four ranks and two engines on two nodes, whose places follow each other."""
    separate = dataclasses.replace(SEPARATE, device="cpu", gpus_per_engine=1, nodes=2)
    assert slots_needed(separate) == 6
    places = slots(6, per_node=3)
    assert [s.bundle for s in trainer_slots(separate, places)] == [0, 1, 3, 4]
    assert bundles(engine_slots(separate, places)) == [[2], [5]]
    shared = dataclasses.replace(separate, shared=True)
    places = slots(4, per_node=2)
    assert [s.bundle for s in trainer_slots(shared, places)] == [0, 1, 2, 3]
    assert bundles(engine_slots(shared, places)) == [[0], [2]]


def test_a_cluster_with_too_few_nodes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has too few CPUs, another one is dead."""
    known = [(True, 4.0), (True, 1.0), (False, 4.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": alive, "Resources": {"CPU": n}} for alive, n in known])
    with pytest.raises(ValueError, match=r"--actor-num-nodes 2: the run needs 2 nodes with 2 CPUs .* cluster has 1:"):
        reserve(4, gpus=False, nodes=2)
