"""Rows of whole groups go into a plane in the background, and what fails there reaches who waits."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from relax_data.plane.base import Columns, PlaneFailed, Rows
from relax_data.plane.local import LocalPlane
from relax_data.plane.rows import PlaneRows
from relax_data.types import (
    PICTURE_COLUMNS,
    ROW_COLUMNS,
    BatchRows,
    Prompt,
    SampleGroup,
    SampleStatus,
    StepManifest,
    TrainBatch,
)
from relax_rollout.loop import publisher as publishing
from relax_rollout.loop.producer import Producer
from relax_rollout.loop.publisher import RowPublisher
from rollout.test_producer import Make, pipeline


class CountingPlane(LocalPlane):
    """Remembers how many rows each put had."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: list[int] = []
        self.fetched: list[Sequence[int]] = []

    def put(self, columns: Columns) -> list[int]:
        if "tokens" in columns:
            self.puts.append(len(columns["tokens"]))
        return super().put(columns)

    def fetch(self, ids: Sequence[int], columns: Sequence[str]) -> Rows:
        self.fetched.append(ids)
        return super().fetch(ids, columns)


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


def test_pictures_are_one_row_a_prompt_that_its_samples_share() -> None:
    async def run() -> tuple[CountingPlane, RowPublisher, list[int]]:
        plane = CountingPlane()
        publisher = RowPublisher(plane)
        for group in made:
            publisher.add(group)
        return plane, publisher, await publisher.row_ids(wanted)

    async def forget() -> None:
        publisher.forget([0, 1, 2])
        await asyncio.gather(*publisher._tasks)

    made = groups(3, responses=2)
    for i in (0, 2):
        values = np.full((4 * (i + 1), 3), i, np.float32)
        made[i].prompt.features = {"pixel_values": values, "image_grid_thw": np.array([[1, 2, 2 * (i + 1)]])}
    wanted = [made[2], made[1], made[0]]
    plane, publisher, ids = asyncio.run(run())
    pictures = publisher.picture_ids(wanted)
    assert plane.puts == [6]
    assert len(plane) == 8, "two of three prompts have pictures"
    assert publisher.metrics()["plane/rows"] == 6
    assert (pictures[0], pictures[2:4], pictures[4]) == (pictures[1], [None, None], pictures[5])
    manifest = dataclasses.replace(StepManifest.of(TrainBatch.from_groups(wanted, 0)), picture_ids=pictures)
    assert manifest.select([5, 2]).picture_ids == [pictures[5], None]

    places = [0, 3, 1, 4]
    found = PlaneRows(plane, ids, pictures).fetch(places, (*ROW_COLUMNS, *PICTURE_COLUMNS))
    same = BatchRows(TrainBatch.from_groups(wanted, 0)).fetch(places, (*ROW_COLUMNS, *PICTURE_COLUMNS))
    for name, column in same.items():
        for got, value in zip(found[name], column, strict=True):
            np.testing.assert_array_equal(got, value)
            assert got.dtype == value.dtype
    assert found["pixel_values"][0] is found["pixel_values"][2], "a micro-batch runs the tower once for both"
    assert plane.fetched[1:] == [[pictures[0], pictures[4]]], "each once"
    asyncio.run(forget())
    assert len(plane) == 0
    assert publisher.picture_ids([made[1]]) == []


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
