"""One contract, two planes."""

import functools
import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.plane.base import DataPlane, PlaneClosed, PlaneError, PlaneFailed
from relax_data.plane.local import LocalPlane

_names = itertools.count()


SECONDS = 60
"""For what has to come: only a hang takes so long."""


class Running:
    """The TransferQueue of this file: started for the first test that needs it, and after one that has broken it."""

    def __init__(self) -> None:
        self.first: Any = None

    def start(self) -> Callable[..., DataPlane]:
        from relax_data.plane.transferqueue import TransferQueuePlane

        self.first = self.first or TransferQueuePlane("first", units=2)
        return TransferQueuePlane

    def stop(self) -> None:
        if self.first is not None:
            self.first.shutdown()
        self.first = None


@pytest.fixture(scope="module")
def running(ray_cluster: None) -> Iterator[Running]:
    os.environ["TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT"] = "6"
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def transfer_queue(running: Running) -> Callable[..., DataPlane]:
    return running.start()


@pytest.fixture(params=["local", pytest.param("transferqueue", marks=[pytest.mark.ray, pytest.mark.slow])])
def plane(request: pytest.FixtureRequest) -> DataPlane:
    if request.param == "local":
        return LocalPlane()
    made: DataPlane = request.getfixturevalue("transfer_queue")(f"plane{next(_names)}")
    return made


def arrays(*lengths: int) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.int64) for n in lengths]


def test_values_come_back_as_they_were(plane: DataPlane) -> None:
    columns: dict[str, list[Any]] = {
        "tokens": [np.array([1, 2, 3]), np.array([], dtype=np.int64), np.array([7])],
        "log_probs": [np.array([[0.5, -1.5]], dtype=np.float32), np.zeros((0, 2), np.float32), np.ones(3, np.float16)],
        "mask": [np.array([True]), np.array([False, True]), np.array([], dtype=bool)],
        "reward": [0.25, -1.0, 3.0],
        "name": ["a:1", "b:2", ""],
        "info": [{"k": [1, 2]}, None, (1, "x")],
    }
    ids = plane.put(columns)
    rows = plane.take("train", list(columns), 3, timeout=SECONDS)
    assert rows.ids == ids
    assert len(rows) == 3
    for name, values in columns.items():
        for expected, got in zip(values, rows.columns[name], strict=True):
            if isinstance(expected, np.ndarray):
                assert got.dtype == expected.dtype
                assert got.shape == expected.shape
                assert np.array_equal(got, expected)
            else:
                assert got == expected


def test_rows_are_ready_when_all_their_columns_are(plane: DataPlane) -> None:
    ids = plane.put({"tokens": arrays(1, 2, 3)})
    with pytest.raises(TimeoutError, match=r"'train' waited 0 s for 1 rows with columns tokens, ref: 0 are ready, 3 "):
        plane.take("train", ["tokens", "ref"], 1, timeout=0.2)
    plane.add(ids[1:], {"ref": [1.0, 2.0]})
    rows = plane.take("train", ["tokens", "ref"], 2, timeout=SECONDS)
    assert rows.ids == ids[1:]
    assert rows.columns["ref"] == [1.0, 2.0]
    # Another consumer that needs less was never held up.
    assert plane.take("ref", ["tokens"], 3, timeout=SECONDS).ids == ids


def test_each_row_once_for_each_consumer_and_oldest_first(plane: DataPlane) -> None:
    ids = [plane.put({"x": [i]})[0] for i in range(5)]
    assert plane.take("a", ["x"], 2, timeout=SECONDS).columns["x"] == [0, 1]
    assert plane.take("a", ["x"], 3, timeout=SECONDS).columns["x"] == [2, 3, 4]
    assert plane.take("b", ["x"], 5, timeout=SECONDS).ids == ids
    with pytest.raises(TimeoutError, match="0 are ready, 0 more"):
        plane.take("a", ["x"], 1, timeout=0.2)


def looked_in_vain(plane: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when a consumer has found too few rows and waits for more."""
    waits = threading.Event()

    if isinstance(plane, LocalPlane):
        wait = plane._changed.wait

        def wait_and_tell(seconds: float) -> Any:
            waits.set()
            return wait(seconds)

        monkeypatch.setattr(plane._changed, "wait", wait_and_tell)
        return waits
    fetch = plane._fetch

    def fetch_and_tell(*arguments: Any) -> Any:
        if (rows := fetch(*arguments)) is None:
            waits.set()
        return rows

    monkeypatch.setattr(plane, "_fetch", fetch_and_tell)
    return waits


def test_a_consumer_may_start_first(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    waits = looked_in_vain(plane, monkeypatch)
    consumer = threading.Thread(target=lambda: got.append(plane.take("train", ["x"], 2, timeout=SECONDS).columns["x"]))
    consumer.start()
    assert waits.wait(SECONDS)
    plane.put({"x": ["a"]})
    plane.put({"x": ["b"]})
    consumer.join(SECONDS)
    assert got == [["a", "b"]]


def test_after_close_consumers_take_what_is_left(plane: DataPlane) -> None:
    ids = plane.put({"x": [1, 2, 3]})
    plane.take("train", ["x"], 1, timeout=SECONDS)
    plane.close()
    with pytest.raises(PlaneClosed, match="no more rows can be put"):
        plane.put({"x": [4]})
    assert plane.take("train", ["x"], 8, timeout=SECONDS).columns["x"] == [2, 3]
    with pytest.raises(PlaneClosed, match="no row is left for consumer 'train'"):
        plane.take("train", ["x"], 1, timeout=SECONDS)
    # Columns may still be added, and whoever needs them waits for all of them.
    plane.add(ids[:2], {"y": [1, 2]})
    with pytest.raises(TimeoutError, match="2 are ready, 1 more lack"):
        plane.take("late", ["x", "y"], 3, timeout=0.2)
    plane.add(ids[2:], {"y": [3]})
    assert plane.take("late", ["x", "y"], 5, timeout=SECONDS).ids == ids


def test_close_wakes_a_waiting_consumer(plane: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = []
    waits = looked_in_vain(plane, monkeypatch)

    def consume() -> None:
        try:
            plane.take("train", ["x"], 1, timeout=SECONDS)
        except PlaneClosed as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waits.wait(SECONDS)
    plane.close()
    consumer.join(SECONDS)
    assert len(raised) == 1


def test_the_death_of_a_producer_reaches_everyone(plane: DataPlane) -> None:
    raised = []

    def consume() -> None:
        try:
            plane.take("train", ["x"], 4, timeout=SECONDS)
        except PlaneFailed as error:
            raised.append(str(error))

    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for c in consumers:
        c.start()
    plane.put({"x": [1]})
    plane.fail("rollout actor died: out of memory")
    for c in consumers:
        c.join(SECONDS)
    assert raised == ["rollout actor died: out of memory"] * 2
    with pytest.raises(PlaneFailed, match="out of memory"):
        plane.put({"x": [1]})


def test_cleared_rows_are_gone(plane: DataPlane) -> None:
    ids = plane.put({"x": [0, 1, 2, 3]})
    plane.take("a", ["x"], 2, timeout=SECONDS)
    plane.clear(ids[1:3])
    plane.clear(ids[1:3])
    plane.clear([])
    assert len(plane) == 2
    assert plane.take("b", ["x"], 2, timeout=SECONDS).columns["x"] == [0, 3]
    with pytest.raises(PlaneError, match=rf"rows \[{ids[1]}\] are not there: they were cleared or never put"):
        plane.add([ids[0], ids[1]], {"y": [1, 1]})
    with pytest.raises(TimeoutError, match="0 are ready, 2 more"):
        plane.take("c", ["y"], 1, timeout=0.2)


def test_rows_are_fetched_by_id_as_often_as_asked(plane: DataPlane) -> None:
    ids = plane.put({"x": [0, 1, 2, 3, 4], "tokens": arrays(3, 1, 0, 4, 2)})
    plane.add(ids[:4], {"y": ["a", "b", "c", "d"]})
    for _ in range(2):
        rows = plane.fetch([ids[3], ids[0], ids[2]], ["tokens", "x", "y"])
        assert rows.ids == [ids[3], ids[0], ids[2]]
        assert rows.columns["x"] == [3, 0, 2]
        assert rows.columns["y"] == ["d", "a", "c"]
        assert [len(t) for t in rows.columns["tokens"]] == [4, 3, 0]
    assert len(plane.fetch([], ["x"])) == 0
    assert plane.take("train", ["x"], 5, timeout=SECONDS).ids == ids, "fetching takes nothing from a consumer"
    with pytest.raises(PlaneError, match=rf"{ids[0]} has no column 'z' yet"):
        plane.fetch(ids[:1], ["x", "z"])
    with pytest.raises(PlaneError):
        plane.fetch(ids, ["y"])
    plane.clear(ids[1:2])
    with pytest.raises(PlaneError, match=rf"rows \[{ids[1]}\] are not there"):
        plane.fetch(ids, ["x"])
    plane.check()


def test_arguments_that_mean_nothing(plane: DataPlane) -> None:
    for columns in ({}, {"a": [1], "b": [1, 2]}):
        with pytest.raises(ValueError, match="equally long and at least one"):
            plane.put(columns)
    ids = plane.put({"a": [1]})
    with pytest.raises(ValueError, match="1 ids but 2 values"):
        plane.add(ids, {"b": [1, 2]})
    for arguments in (([], 1, 1.0), (["a"], 0, 1.0), (["a"], 1, 0.0)):
        with pytest.raises(ValueError, match="take needs"):
            plane.take("x", arguments[0], arguments[1], timeout=arguments[2])


def test_writers_readers_and_clears_at_the_same_time(plane: DataPlane) -> None:  # noqa: C901  # bodies of threads
    writers, rows_each, batch = 3, 40, 5
    got: dict[str, Counter[tuple[int, int]]] = {"ref": Counter(), "train": Counter()}
    errors: list[Exception] = []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except PlaneClosed:
                pass
            except Exception as error:
                errors.append(error)
                plane.fail(repr(error))

        return threading.Thread(target=run)

    def write(writer: int) -> None:
        for k in range(0, rows_each, batch):
            plane.put({"x": [(writer, k + j) for j in range(batch)], "tokens": arrays(*range(k, k + batch))})

    def reference() -> None:
        while True:
            rows = plane.take("ref", ["x", "tokens"], 4, timeout=SECONDS)
            got["ref"].update(rows.columns["x"])
            plane.add(rows.ids, {"ref": [len(t) for t in rows.columns["tokens"]]})

    def train() -> None:
        while True:
            rows = plane.take("train", ["x", "ref"], 4, timeout=SECONDS)
            assert all(x[1] == ref for x, ref in zip(rows.columns["x"], rows.columns["ref"], strict=True))
            got["train"].update(rows.columns["x"])
            plane.clear(rows.ids)

    readers = [guarded(reference), guarded(reference), guarded(train), guarded(train)]
    producing = [guarded(functools.partial(write, w)) for w in range(writers)]
    for thread in readers + producing:
        thread.start()
    for thread in producing:
        thread.join(2 * SECONDS)
    plane.close()
    for thread in readers:
        thread.join(2 * SECONDS)
    assert not errors
    assert not any(t.is_alive() for t in readers + producing)
    expected = Counter((w, k) for w in range(writers) for k in range(rows_each))
    assert got == {"ref": expected, "train": expected}
    assert len(plane) == 0


def test_a_checkpoint_gives_out_again_what_was_not_cleared(plane: DataPlane, tmp_path: Path) -> None:
    ids = plane.put({"x": [0, 1, 2, 3], "tokens": arrays(3, 0, 2, 1)})
    taken = plane.take("train", ["x"], 2, timeout=SECONDS)
    plane.clear(taken.ids[:1])
    plane.save(tmp_path / "plane")
    plane.take("train", ["x"], 2, timeout=SECONDS)
    plane.clear(ids)
    plane.put({"x": [9], "tokens": arrays(1)})
    plane.load(tmp_path / "plane")
    rows = plane.take("train", ["x", "tokens"], 3, timeout=SECONDS)
    assert rows.columns["x"] == [1, 2, 3]
    assert [len(t) for t in rows.columns["tokens"]] == [0, 2, 1]
    new = plane.put({"x": [10]})
    assert not set(new) & set(ids)


@pytest.mark.ray
@pytest.mark.slow
def test_two_planes_in_two_processes(transfer_queue: Any) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def produce(name: str) -> None:
        from relax_data.plane.transferqueue import TransferQueuePlane

        plane = TransferQueuePlane(name)
        plane.put({"x": [np.arange(4), np.arange(2)]})
        plane.close()

    name = f"plane{next(_names)}"
    ray.get(produce.remote(name), timeout=120)
    rows = transfer_queue(name).take("train", ["x"], 5, timeout=SECONDS)
    assert [a.tolist() for a in rows.columns["x"]] == [[0, 1, 2, 3], [0, 1]]


@pytest.mark.ray
@pytest.mark.slow
def test_too_few_cpus_for_another_start_is_an_error_not_a_hang(
    transfer_queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def nobody(*_: Any, **__: Any) -> None:
        raise ValueError("no such actor")

    monkeypatch.setattr(ray, "get_actor", nobody)
    with pytest.raises(PlaneError, match=r"needs 1001 Ray CPUs .* lower --num-data-storage-units"):
        transfer_queue("many", units=1000)


def _until_it_fails(call: Callable[[], object]) -> None:
    """Calls again and again: ``ray.kill()`` does not wait for the end, and until then the process answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        call()
        time.sleep(0.2)


@pytest.mark.ray
@pytest.mark.slow
def test_a_storage_unit_that_dies_is_an_error_that_says_what_to_do(
    transfer_queue: Any, request: pytest.FixtureRequest
) -> None:
    """It kills one of the two units, so the tests after it get a TransferQueue of their own."""
    import ray
    from transfer_queue import interface

    request.addfinalizer(request.getfixturevalue("running").stop)
    plane = transfer_queue("dying")
    ids = list(plane.put({"x": list(range(8))}))
    units = interface._TQ_STORAGE["SimpleStorage"]
    stopped = ray.get(units["TransferQueueStorageUnit#0"].__ray_call__.remote(lambda _: os.getpid()))
    ray.kill(units["TransferQueueStorageUnit#1"])
    os.kill(stopped, signal.SIGSTOP)  # as a part is that waits for the dead one
    try:
        with pytest.raises(PlaneFailed, match=r"failed: TransferQueueStorageUnit#1 has died\. .* its rows are lost"):
            _until_it_fails(plane.check)
    finally:
        os.kill(stopped, signal.SIGCONT)
    with pytest.raises(PlaneFailed, match="during fetch: TransferQueueStorageUnit#1 has died"):
        _until_it_fails(lambda: plane.fetch(ids, ["x"]))
    impatient = transfer_queue("dying", call_seconds=2)
    with pytest.raises(PlaneFailed, match=r"TransferQueueStorageUnit#1 has died \(no answer within 2 s\)") as caught:
        impatient.take("a", ["x"], 8, timeout=SECONDS)
    assert "no answer within 2 s" in str(caught.value), (
        "TransferQueue now reports a dead storage unit by itself: the lowered limits in transferqueue.py may go"
    )
    with pytest.raises(PlaneFailed, match=r"during take: .* its rows are lost: restart .* checkpoint"):
        plane.take("b", ["x"], 8, timeout=SECONDS)
    with pytest.raises(PlaneFailed, match="during write"):
        plane.put({"x": list(range(8))})
