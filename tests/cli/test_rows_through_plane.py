"""With --fully-async rows go through a real TransferQueue: DP 2 x TP 2 ranks fetch their own, the driver has ids."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.test_rows_by_reference import (
    BYTES_A_SAMPLE,
    BYTES_BESIDE,
    PROMPTS,
    RESPONSES,
    SAMPLES,
    Create,
    Driver,
    make_groups,
)
from cli.test_rows_by_reference import create as create
from relax_cli.cluster.slots import check_cpus
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import RunConfig
from relax_cli.workers.plane_rows import RowsInPlane
from relax_cli.workers.rollout import RolloutActor, RolloutOutput
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer import TrainActor
from relax_cli.workers.trainer_group import TrainerGroup
from relax_data.types import ROW_COLUMNS, StepManifest, TrainBatch
from relax_rollout.loop.rollout_loop import RolloutResult

RANKS, TP = 4, 2


@pytest.fixture
def config(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Two replicas of two ranks each; two storage units."""
    monkeypatch.chdir(tmp_path)
    words = task.flags(
        rollout_batch_size=PROMPTS,
        n_samples_per_prompt=RESPONSES,
        fully_async=True,
        tensor_model_parallel_size=TP,
        num_data_storage_units=2,
    )
    found = resolve(words, {})
    assert found.placement is not None
    return dataclasses.replace(found, placement=dataclasses.replace(found.placement, train_ranks=RANKS))


def holder_class() -> type[RolloutActor]:
    """A rollout actor that generates without an engine and puts the rows as the producer does."""
    made = make_groups(0)

    class Holder(RolloutActor):
        async def next_step(self, step: int) -> RolloutOutput:
            from relax_rollout.loop.publisher import RowPublisher

            assert self._plane is not None
            self._publisher = RowPublisher(self._plane)
            for group in made:
                self._publisher.add(group)
            ids = await self._publisher.row_ids(made)
            result = RolloutResult(groups=made, metrics=self._publisher.metrics(), dropped=[], row_ids=ids)
            return self._keep(step, result, None)

        async def settle(self, step: int) -> None:
            assert self._publisher is not None
            self._publisher.forget(range(len(made)))
            while self._publisher._tasks:
                await next(iter(self._publisher._tasks))
            self._status = f"{len(self._plane or ())} rows left"

    return Holder


def rank_class(folder: Path) -> type[TrainActor]:
    """A rank that also writes down what it fetched."""

    class Rank(TrainActor):
        def train(self, manifest: StepManifest, rows: Any, version: int) -> dict[str, float]:
            from relax_cli.workers.plane_rows import FetchedRows

            fetch = FetchedRows.fetch

            def recorded(source: FetchedRows, indices: Sequence[int], *columns: Any) -> dict[str, list[np.ndarray]]:
                found = fetch(source, indices, *columns)
                values = {column: [row.tolist() for row in found[column]] for column in found}
                (folder / f"rank{source.rank}.json").write_text(json.dumps([list(map(int, indices)), values]))
                return found

            FetchedRows.fetch = recorded  # type: ignore[assignment,method-assign]
            return super().train(manifest, rows, version)

    return Rank


@pytest.mark.ray
@pytest.mark.slow
def test_replicas_fetch_disjoint_and_complete_rows_that_the_driver_never_had(
    config: RunConfig, create: Create, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import ray

    ranks = [create(rank_class(tmp_path), config, rank=rank, world_size=RANKS, threads=1) for rank in range(RANKS)]
    driver = Driver(monkeypatch)
    trainers = TrainerGroup([driver.watch(actor) for actor in ranks], one_node=True, stop=StopFlag())
    worker = RolloutWorker(create(holder_class(), config), stop=StopFlag())
    started = worker.begin_plane()
    trainers.finish_setup(trainers.begin_setup())
    worker.finish_plane(started)
    with pytest.raises(ValueError, match="another run uses TransferQueue in this Ray cluster"):
        check_cpus(1, 1)

    output = worker.next_step(0)
    assert output.manifest is not None
    assert len(set(output.manifest.row_ids)) == SAMPLES
    assert output.metrics["plane/rows"] == SAMPLES
    assert len(ray.cloudpickle.dumps(output)) <= BYTES_A_SAMPLE * SAMPLES + BYTES_BESIDE
    driver.sent = 0
    metrics = trainers.train(output.manifest, RowsInPlane(), 0)
    assert 0 < driver.sent <= BYTES_A_SAMPLE * SAMPLES + BYTES_BESIDE, "of the arguments to all ranks together"
    assert metrics["train/samples"] == SAMPLES
    assert metrics["train/grad_norm"] > 0
    assert metrics["plane/fetch_s"] > 0

    expected = TrainBatch.from_groups(make_groups(0), 0)
    replicas: list[set[int]] = []
    for rank in range(RANKS):
        places, values = json.loads((tmp_path / f"rank{rank}.json").read_text())
        replicas.append(set(places))
        for name in ROW_COLUMNS:
            for got, i in zip(values[name], places, strict=True):
                np.testing.assert_array_equal(np.array(got), getattr(expected, name)[i])
    assert replicas[0] == replicas[1], "ranks of one replica read the same rows"
    assert replicas[2] == replicas[3]
    assert replicas[0] | replicas[2] == set(range(SAMPLES))
    assert not replicas[0] & replicas[2], "no replica gets the rows of the other"
    worker.settle(0)
    assert worker.status() == "0 rows left"
    ray.get(worker.close(), timeout=60)


@pytest.mark.ray
@pytest.mark.slow
def test_too_few_cpus_are_an_error_with_the_arithmetic(ray_cluster: None) -> None:
    import ray

    cpus = int(ray.cluster_resources()["CPU"])
    check_cpus(2, cpus - 3)
    wanted = rf"units {cpus - 2}: .* 2 for .* \+ 1 for .* \+ {cpus - 2} for .* = {cpus + 1} CPUs of Ray.* has {cpus}: "
    with pytest.raises(ValueError, match=wanted):
        check_cpus(2, cpus - 2)


def test_the_plan_says_where_rows_go(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_cli.checks.plan import plan_text

    monkeypatch.chdir(tmp_path)
    words = [*task.flags(actor_num_gpus_per_node=0), "--dry-run"]
    plan = plan_text(resolve([*words, "--fully-async", "--num-data-storage-units", "3"], {}))
    assert "rollout worker -> TransferQueue, 3 storage units -> the rank that needs them" in plan
    assert "2 for trainer and engines + 1 + 3 for TransferQueue = 6 of Ray" in plan
    assert "TransferQueue" not in plan_text(resolve(words, {}))
