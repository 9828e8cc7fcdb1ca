"""Rows go from the rollout worker to the rank that trains on them; the driver carries a manifest and references."""

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_cli.cluster.actors import Actor, creator
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import RunConfig
from relax_cli.workers import references
from relax_cli.workers.process import actor_environment
from relax_cli.workers.references import RolloutRows
from relax_cli.workers.rollout import RolloutActor, RolloutOutput
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer import TrainActor
from relax_cli.workers.trainer_group import TrainerGroup
from relax_data.types import ROW_COLUMNS, Prompt, SampleGroup, SampleStatus, StepManifest, TrainBatch
from relax_rollout.loop.rollout_loop import RolloutResult

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PROMPTS, RESPONSES, LENGTH = 8, 4, 400
SAMPLES = PROMPTS * RESPONSES
BYTES_A_SAMPLE, BYTES_BESIDE = 200, 4096


def make_groups(rollout_id: int) -> list[SampleGroup]:
    draw, groups = random.Random(rollout_id), []
    for i in range(PROMPTS):
        prompt = Prompt(prompt_id=i, epoch=0, source=f"train.jsonl:{i + 1}", text="1+1=", input_ids=[5, 6, 5, 7])
        made = SampleGroup.start(prompt, RESPONSES)
        for sample in made.samples:
            length = draw.randrange(LENGTH // 2, LENGTH)
            sample.append([draw.randrange(4, 90) for _ in range(length)], [-4.5] * length, rollout_id)
            sample.status, sample.reward = SampleStatus.COMPLETED, float(draw.randrange(2))
        groups.append(made)
    return groups


@pytest.fixture
def config(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Two data-parallel ranks."""
    monkeypatch.chdir(tmp_path)
    found = resolve(task.flags(rollout_batch_size=PROMPTS, n_samples_per_prompt=RESPONSES), {})
    assert found.placement is not None
    return dataclasses.replace(found, placement=dataclasses.replace(found.placement, train_ranks=2))


Create = Callable[..., Any]


@pytest.fixture
def create(ray_cluster: None, config: RunConfig) -> Any:
    """Makes actors; they are gone after the test."""
    made: list[Actor[Any]] = []

    def make(cls: Any, *args: Any, **kwargs: Any) -> Actor[Any]:
        environment = {"env_vars": actor_environment("cpu", threads=1)}
        made.append(creator(cls, num_cpus=0, max_concurrency=4, runtime_env=environment)(*args, **kwargs))
        return made[-1]

    yield make
    for actor in made:
        actor.kill()


@pytest.fixture
def holder(config: RunConfig, create: Create) -> Actor[RolloutActor]:
    """A rollout actor that generates without an engine, and remembers who asked for what."""
    groups_of = make_groups

    class Holder(RolloutActor):
        async def generate(self, rollout_id: int, version: int, save_to: Path | None = None) -> RolloutOutput:
            self._status = ""
            result = RolloutResult(groups=groups_of(rollout_id), metrics={}, dropped=[])
            return self._keep(rollout_id, result, save_to)

        async def fetch_rows(
            self, rollout_id: int, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS
        ) -> dict[str, list[np.ndarray]]:
            self._status += f"{list(indices)}\n"
            return await super().fetch_rows(rollout_id, indices, columns)

    found: Actor[RolloutActor] = create(Holder, config)
    return found


class Driver:
    """Counts the bytes that pass through this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.sent = 0
        put = ray.put

        def counting_put(value: Any) -> Any:
            self.sent += len(ray.cloudpickle.dumps(value))
            return put(value)

        monkeypatch.setattr("ray.put", counting_put)

    def watch(self, actor: Actor[Any]) -> Actor[Any]:
        import ray

        driver = self

        class Watched(Actor[Any]):
            def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                driver.sent += len(ray.cloudpickle.dumps((args, kwargs)))
                return super().call(method, *args, **kwargs)

        return Watched(actor.handle)


def test_two_replicas_train_on_rows_that_the_driver_never_had(
    config: RunConfig, create: Create, holder: Actor[RolloutActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    ranks = [create(TrainActor, config, rank=rank, world_size=2, threads=1) for rank in range(2)]
    driver = Driver(monkeypatch)
    trainers = TrainerGroup([driver.watch(actor) for actor in ranks], one_node=True, stop=StopFlag())
    worker = RolloutWorker(holder, stop=StopFlag())
    trainers.finish_setup(trainers.begin_setup())

    output = worker.generate(0, 0)
    assert output.manifest is not None
    assert len(output.manifest) == SAMPLES
    assert len(ray.cloudpickle.dumps(output)) <= BYTES_A_SAMPLE * SAMPLES + BYTES_BESIDE
    driver.sent = 0
    metrics = trainers.train(output.manifest, worker.rows(0), 0)
    assert 0 < driver.sent <= BYTES_A_SAMPLE * SAMPLES + BYTES_BESIDE, "of the arguments to all ranks together"
    assert metrics["train/samples"] == SAMPLES
    assert metrics["train/grad_norm"] > 0

    asked = [set(json.loads(line)) for line in worker.status().splitlines()]
    assert len(asked) == 2, "each rank asks once"
    assert asked[0] | asked[1] == set(range(SAMPLES))
    assert not asked[0] & asked[1], "no rank gets the rows of the other"
    assert all(asked)


def test_rows_come_as_they_were_generated_and_are_gone_with_the_next_rollout(holder: Actor[RolloutActor]) -> None:
    worker = RolloutWorker(holder, stop=StopFlag())
    worker.generate(3, 3)
    expected = TrainBatch.from_groups(make_groups(3), 3)
    rows = worker.rows(3).for_rank(1, StepManifest.of(expected))
    found = rows.fetch([5, 2])
    assert list(found) == list(ROW_COLUMNS)
    for name in ROW_COLUMNS:
        for got, i in zip(found[name], (5, 2), strict=True):
            np.testing.assert_array_equal(got, getattr(expected, name)[i])
            assert got.dtype == getattr(expected, name)[i].dtype
    assert list(rows.fetch([0], ["tokens"])) == ["tokens"]
    worker.generate(4, 4)
    with pytest.raises(RuntimeError, match="rows of rollout 3 were asked for, but the rollout worker holds 4"):
        rows.fetch([0])


def test_a_worker_that_died_or_does_not_answer_is_named_with_rollout_and_rank(
    create: Create, holder: Actor[RolloutActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def fetch_rows(self, rollout_id: int, indices: Sequence[int], columns: Sequence[str]) -> None:
            threading.Event().wait()

    manifest = StepManifest.of(TrainBatch.from_groups(make_groups(7), 7))
    monkeypatch.setattr(references, "ROWS_DEADLINE_S", 0.5)
    with pytest.raises(TimeoutError, match=r"rows of 2 samples of rollout 6 to reach trainer rank 1: giving up"):
        RolloutRows(create(Silent), 6).for_rank(1, manifest).fetch([0, 1])
    monkeypatch.undo()
    worker = RolloutWorker(holder, stop=StopFlag())
    worker.generate(7, 7)
    rows, end = worker.rows(7).for_rank(0, manifest), time.monotonic() + 60

    def fetch_until_dead() -> None:
        """Ray kills without waiting: a call that is quick enough still gets its answer."""
        while time.monotonic() < end:
            rows.fetch([0])

    holder.kill()
    with pytest.raises(RuntimeError, match=r"rollout worker died.*rows of 1 samples of rollout 7 .* trainer rank 0"):
        fetch_until_dead()
