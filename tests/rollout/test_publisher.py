"""Rows of whole groups go into a plane in the background, and what fails there reaches who waits."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from relax_data.plane.base import Columns, PlaneFailed
from relax_data.plane.local import LocalPlane
from relax_data.plane.rows import PlaneRows
from relax_data.types import ROW_COLUMNS, BatchRows, Prompt, SampleGroup, SampleStatus, TrainBatch
from relax_rollout.loop import publisher as publishing
from relax_rollout.loop.producer import Producer
from relax_rollout.loop.publisher import RowPublisher
from rollout.test_producer import Make, pipeline


class CountingPlane(LocalPlane):
    """Remembers how many rows each put had."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []

    def put(self, columns: Columns) -> list[int]:
        self.puts.append(len(columns["tokens"]))
        return super().put(columns)


def groups(n: int, responses: int = 5) -> list[SampleGroup]:
    made = []
    for i in range(n):
        group = SampleGroup.start(Prompt(i, 0, f"p:{i}", "x", [1, 2]), responses)
        for sample in group.samples:
            length = 1 + i + sample.index
            sample.append(list(range(length)), [-0.5] * length, [3] * length, loss_mask=[k % 2 for k in range(length)])
            sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
        made.append(group)
    return made


def test_rows_are_put_sixteen_or_more_at_once_and_come_back_as_they_were() -> None:
    async def run() -> tuple[CountingPlane, Sequence[int], dict[str, float]]:
        plane = CountingPlane()
        publisher = RowPublisher(plane)
        for group in made:
            publisher.add(group)
            await asyncio.gather(*publisher._tasks)
        assert plane.puts == [20], "four groups of five samples; the next ones wait"
        wanted = [made[4], made[1]]
        ids = await publisher.row_ids(wanted)
        assert plane.puts == [20, 10]
        metrics = publisher.metrics()
        publisher.forget([0, 2, 3, 5])
        await asyncio.gather(*publisher._tasks)
        return plane, ids, metrics

    made = groups(6)
    plane, ids, metrics = asyncio.run(run())
    assert metrics["plane/rows"] == 30
    assert metrics["plane/put_s"] > 0
    assert len(plane) == 10, "rows of trained groups are cleared"
    batch = TrainBatch.from_groups([made[4], made[1]], 0)
    found, same = PlaneRows(plane, ids).fetch([7, 0]), BatchRows(batch).fetch([7, 0])
    for name in ROW_COLUMNS:
        for got, value in zip(found[name], same[name], strict=True):
            np.testing.assert_array_equal(got, value)
            assert got.dtype == value.dtype
    stored = plane.fetch(ids[:1], ["tokens", "log_probs", "versions", "mask"]).columns
    assert [stored[c][0].dtype for c in stored] == [np.int32, np.float32, np.int32, np.uint8]


def test_a_sample_that_cannot_be_trained_is_named() -> None:
    async def run() -> None:
        publisher = RowPublisher(LocalPlane())
        (group,) = groups(1)
        group.samples[2].reward = None
        publisher.add(group)
        await publisher.row_ids([group])

    with pytest.raises(ValueError, match="p:0 response 2 cannot be trained on"):
        asyncio.run(run())


class BrokenPlane(LocalPlane):
    """Its first put fails, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_fail = threading.Event()

    def put(self, columns: Columns) -> list[int]:
        assert self.may_fail.wait(60)
        raise PlaneFailed("TransferQueueStorageUnit#0 has died")


def test_a_put_that_fails_while_its_ids_are_waited_for_says_why() -> None:
    async def run() -> None:
        plane, made = BrokenPlane(), groups(4)
        publisher = RowPublisher(plane)
        for group in made:
            publisher.add(group)  # sixteen rows and more: the put runs in the background
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(publisher.row_ids(made))
        await asyncio.sleep(0)
        plane.may_fail.set()
        await waiting

    with pytest.raises(PlaneFailed, match="TransferQueueStorageUnit#0 has died"):
        asyncio.run(run())


def test_a_plane_that_breaks_reaches_who_waits_for_a_step(
    make_source: Make, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "LOOK_S", 0.01)

    async def run() -> None:
        plane = LocalPlane()
        source = make_source(8)
        run = pipeline(source, tokenizer, lambda request: 10**6, rate=1.0, staleness=1, rollout_batch_size=2)
        run.producer = Producer(run.loop, run.pool, publisher=RowPublisher(plane))
        await run.push(0, 0.0)
        waiting = asyncio.ensure_future(run.producer.next_step(0))
        await asyncio.sleep(0)
        plane.fail("TransferQueueStorageUnit#0 has died")
        try:
            await asyncio.wait_for(waiting, 60)
        finally:
            await run.producer.stop()

    with pytest.raises(PlaneFailed, match="TransferQueueStorageUnit#0 has died"):
        asyncio.run(run())


def test_whole_groups_of_a_checkpoint_are_put_again(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        source = make_source(8)
        first = pipeline(source, tokenizer, lambda request: 3, rate=10**6, staleness=1, rollout_batch_size=2)
        first.producer = Producer(first.loop, first.pool, publisher=RowPublisher(LocalPlane()))
        await first.push(0, 0.0)
        await first.producer.next_step(0)
        await first.producer.stop()
        state = first.loop.state_dict()

        plane = CountingPlane()
        again = pipeline(
            make_source(8),
            tokenizer,
            lambda request: 3,
            rate=10**6,
            staleness=1,
            rollout_batch_size=2,
        )
        again.loop.load_state_dict(state)
        again.producer = Producer(again.loop, again.pool, publisher=RowPublisher(plane))
        ready = [g.prompt.prompt_id for g in again.loop.ledger.ready]
        await again.push(1, 0.0)
        result = await again.producer.next_step(1)
        assert {g.prompt.prompt_id for g in result.groups} >= set(ready[:2])
        rows = plane.fetch(result.row_ids, ["tokens"]).columns["tokens"]
        assert [r[-3:].tolist() for r in rows] == [s.tokens for g in result.groups for s in g.samples]
        await again.producer.stop()

    asyncio.run(run())
