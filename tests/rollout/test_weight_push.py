"""A weight push without the real engine: how much memory it needs, what it leaves behind, and its seams."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress, EngineDied, IpcHandle, updating
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.weight_sync import ipc
from relax_rollout.weight_sync.base import PushReport, TransportSetup, WeightPushFailed
from relax_rollout.weight_sync.push import Send, push_weights
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.transports import TRANSPORTS, make_transport
from relax_rollout.weight_sync.value import SendValues
from sglang_double import SGLangDouble

BUCKETS = 8
BUCKET_BYTES = 16 << 20
DEADLINE_S = 60.0
ROOM = 4 << 20
"""Bytes for connections, the chunks that are being encoded and sent, and objects of all kinds."""


VALUES: Any = SendValues()


class Memory:
    """Bytes of buckets and of Python objects that a push keeps alive; the garbage collector does not run meanwhile.

    torch's memory is not seen by tracemalloc, so the two are counted apart and added.
    """

    def __init__(self) -> None:
        self._flats: dict[int, int] = {}
        self.most = 0
        """Most bytes of buckets at once."""
        self.seen: list[int] = []
        self._start = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator["Memory"]:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        self._start = tracemalloc.get_traced_memory()[0]
        try:
            yield self
        finally:
            tracemalloc.stop()
            gc.enable()

    @property
    def flats(self) -> int:
        return sum(self._flats.values())

    @property
    def alive(self) -> set[int]:
        """Numbers of the buckets that are there, from 0."""
        return set(self._flats)

    @property
    def now(self) -> int:
        return self.flats + tracemalloc.get_traced_memory()[0] - self._start

    @property
    def peak(self) -> int:
        """Highest of Python's since the last look, beside the buckets of now."""
        peak = self.flats + tracemalloc.get_traced_memory()[1] - self._start
        tracemalloc.reset_peak()
        return peak

    def look(self, number: int, body: bytes) -> None:
        self.seen.append(self.peak)

    def buckets(self) -> Iterator[Bucket]:
        for i in range(BUCKETS):
            flat = torch.full((BUCKET_BYTES // 4,), float(i))
            self._flats[i] = flat.untyped_storage().nbytes()
            self.most = max(self.most, self.flats)
            weakref.finalize(flat.untyped_storage(), self._flats.pop, i)
            bucket = Bucket((f"layer{i}.weight",), (tuple(flat.shape),), "float32", flat)
            del flat
            yield bucket
            del bucket


async def push(server: SGLangDouble, buckets: Iterable[Bucket], engines: int = 1, *, send: Send = VALUES) -> PushReport:
    """In a thread without an event loop, as the trainer has."""
    clients = [SGLangEngine(server.url, name=f"engine{i}") for i in range(engines)]
    return await asyncio.to_thread(push_weights, clients, buckets, 1, send=send, ranks=OneRank())


def rebuilt(*arguments: Any) -> tuple[Any, ...]:
    return arguments


HANDLES = [IpcHandle(f"gpu-{i}", rebuilt, (0, 1, 2, 3, 4, 5, i)) for i in range(2)]


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How buckets travel on a GPU, but for the memory there: the engine is told of a handle and reads nothing."""
    monkeypatch.setattr(ipc, "share", lambda flat: HANDLES[0])
    return ipc.SendHandles()


@pytest.fixture(params=["values", "handles"])
def send(request: pytest.FixtureRequest) -> Any:
    """Each way of a bucket to an engine."""
    return VALUES if request.param == "values" else request.getfixturevalue("handles")


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_push_holds_two_buckets_whatever_their_number(engines: int, send: Any) -> None:
    memory = Memory()
    async with SGLangDouble(on_update=memory.look).serving() as server:
        await push(server, [Bucket.of([("warm", torch.zeros(4))])], send=send)
        memory.seen.clear()
        with memory.watching():
            report = await push(server, memory.buckets(), engines, send=send)
            left = memory.now
    assert report == PushReport(BUCKETS, BUCKETS, BUCKETS * BUCKET_BYTES)
    assert len(memory.seen) == BUCKETS * engines
    assert BUCKET_BYTES <= max(memory.seen) <= 2 * BUCKET_BYTES + ROOM
    assert memory.most <= 2 * BUCKET_BYTES
    assert memory.flats == 0
    assert left < ROOM


@pytest.mark.parametrize(
    ("fault", "says", "arrived"),
    [
        ({"refuses": 5}, "RuntimeError: engine0: .*no room for these weights", 6),
        ({"hangs_up": 5}, "ConnectionError: engine0 lives but the connection .* was lost", 5),
    ],
    ids=["refused", "lost"],
)
async def test_a_failed_push_lets_go_of_all_its_memory(
    fault: dict[str, Any], says: str, arrived: int, send: Any
) -> None:
    memory = Memory()
    async with SGLangDouble(on_update=memory.look, **fault).serving() as server:
        with memory.watching():
            with pytest.raises(WeightPushFailed, match=says) as caught:
                await push(server, memory.buckets(), send=send)
            left = memory.now
        assert server.weight_version == "broken:1"
    assert caught.value.__cause__ is not None
    # One that was under way beside it arrives as well.
    assert arrived <= len(memory.seen) <= arrived + send.ahead
    assert max(memory.seen) <= 2 * BUCKET_BYTES + ROOM
    assert memory.flats == 0, "the error that the caller still has must not hold a bucket"
    assert left < ROOM


class Holding:
    """An engine that answers for a bucket only when it was offered the next one, or what the test says."""

    name = "engine0"

    def __init__(self, dies_at: int | None = None) -> None:
        self.begun, self.loading, self.loaded, self.closed = 0, list[int](), list[int](), 0
        self.outcome: list[tuple[int, bool]] = []
        self._dies_at = dies_at
        self._offered = {number: asyncio.Event() for number in range(1, BUCKETS + 1)}

    async def begin_update(self, version: int, mode: str = "abort") -> None:
        self.begun += 1

    async def load(self, bucket: Bucket, handles: Any = None) -> None:
        number = int(bucket.names[0])
        self.loading.append(number)
        self._offered[number].set()
        if number == self._dies_at:
            raise EngineDied("engine0 is gone")
        if number < BUCKETS and self._dies_at is None:
            await asyncio.wait_for(self._offered[number + 1].wait(), DEADLINE_S)
        self.loaded.append(number)

    async def end_update(self, version: int, *, whole: bool = True) -> None:
        self.outcome.append((version, whole))

    async def close(self) -> None:
        self.closed += 1


def test_a_bucket_is_made_and_offered_while_the_one_before_is_loaded_and_no_third_one(handles: Any) -> None:
    engine, memory, ready = Holding(), Memory(), list[list[int]]()

    def buckets() -> Iterator[Bucket]:
        for number, bucket in enumerate(memory.buckets(), 1):
            ready.append(engine.loaded.copy())  # when this one is made
            yield dataclasses.replace(bucket, names=(str(number),))
            del bucket

    # Without overlap the engine would wait for the second bucket, and its pusher for the first one, to the deadline.
    report = push_weights([engine], buckets(), 3, send=handles, ranks=OneRank())  # type: ignore[list-item]
    assert report.buckets == len(engine.loaded) == BUCKETS
    for number, loaded in enumerate(ready, 1):
        assert number - 2 <= 0 or number - 2 in loaded, f"bucket {number} was made when only {loaded} were loaded"
    assert memory.most == 2 * BUCKET_BYTES
    assert memory.flats == 0
    assert (engine.begun, engine.outcome, engine.closed) == (1, [(3, True)], 1)
    assert set(report.seconds) == {"begin", "make", "send", "end"}


def test_an_engine_that_dies_in_the_middle_ends_the_push_and_nothing_is_kept(handles: Any) -> None:
    engine, memory = Holding(dies_at=4), Memory()

    def buckets() -> Iterator[Bucket]:
        for number, bucket in enumerate(memory.buckets(), 1):
            yield dataclasses.replace(bucket, names=(str(number),))
            del bucket

    with memory.watching(), pytest.raises(WeightPushFailed, match="EngineDied: engine0 is gone") as caught:
        push_weights([engine], buckets(), 3, send=handles, ranks=OneRank())  # type: ignore[list-item]
    assert isinstance(caught.value.__cause__, EngineDied), "whoever calls asks which engines died"
    assert engine.loaded[:3] == [1, 2, 3]
    assert max(engine.loading) <= 5
    assert engine.outcome == [(3, False)]
    assert (memory.flats, engine.closed) == (0, 1)


def test_an_engine_that_cannot_begin_gets_no_bucket(handles: Any) -> None:
    class Unwell(Holding):
        async def begin_update(self, version: int, mode: str = "abort") -> None:
            raise EngineDied("engine0 is gone")

    engine, memory = Unwell(), Memory()
    with pytest.raises(WeightPushFailed, match="EngineDied: engine0 is gone"):
        push_weights([engine], memory.buckets(), 3, send=handles, ranks=OneRank())  # type: ignore[list-item]
    assert (engine.loading, memory.flats) == ([], 0)
    with pytest.raises(WeightPushFailed, match="EngineDied: engine0 is gone"):
        push_weights([engine], iter(()), 3, send=handles, ranks=OneRank())  # type: ignore[list-item]


class ThreadRank:
    """One of two ranks that share the GPUs of an engine, each in a thread; the first one posts."""

    shares_gpu = True

    def __init__(self, rank: int, everyones: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._everyones, self._barrier = rank, everyones, barrier
        self.posts = rank == 0

    def everyones(self, item: Any) -> list[Any]:
        self._everyones[self._rank] = item
        self._barrier.wait(DEADLINE_S)
        items = list(self._everyones)
        self._barrier.wait(DEADLINE_S)
        return items

    def all_of_engine(self, ready: bool) -> bool:
        return all(self.everyones(ready))

    def gather(self, item: Any) -> list[Any] | None:
        items = self.everyones(item)
        return items if self.posts else None

    def agree(self, error: str | None) -> str | None:
        return next((e for e in self.everyones(error) if e is not None), None)


def push_from_two_ranks(engine: Any, buckets: Callable[[int], Iterator[Bucket]], send: Any) -> list[Any]:
    """What each rank's push gives or raises."""
    outcomes: list[Any] = [None, None]
    items, barrier = [None, None], threading.Barrier(2)

    def run(rank: int) -> None:
        engines = [engine] if rank == 0 else []
        try:
            outcomes[rank] = push_weights(engines, buckets(rank), 3, send=send, ranks=ThreadRank(rank, items, barrier))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_S)
    return outcomes


def test_a_rank_that_does_not_post_keeps_a_bucket_until_the_engine_has_read_it(handles: Any) -> None:
    engine, memories = Holding(), [Memory(), Memory()]
    early: list[int] = []

    def buckets(rank: int) -> Iterator[Bucket]:
        for number, bucket in enumerate(memories[rank].buckets(), 1):
            # The one before the last may still be read, so it has to be there.
            if number > 1 and number - 1 not in engine.loaded and number - 2 not in memories[rank].alive:
                early.append(number)
            yield dataclasses.replace(bucket, names=(str(number),))
            del bucket

    outcomes = push_from_two_ranks(engine, buckets, handles)
    assert outcomes == [PushReport(BUCKETS, BUCKETS, BUCKETS * BUCKET_BYTES)] * 2
    assert early == []
    assert [memory.most for memory in memories] == [2 * BUCKET_BYTES] * 2
    assert [memory.flats for memory in memories] == [0, 0]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_on_one_rank_reaches_all(monkeypatch: pytest.MonkeyPatch, handles: Any, failing: int) -> None:
    engine, memories = Holding(dies_at=-1), [Memory(), Memory()]
    shared: list[float] = []

    def share(flat: torch.Tensor) -> IpcHandle:
        shared.append(float(flat[0]))
        return HANDLES[0]

    monkeypatch.setattr(ipc, "share", share)

    def buckets(rank: int) -> Iterator[Bucket]:
        for number, bucket in enumerate(memories[rank].buckets(), 1):
            if rank == failing and number == 3:
                raise OSError("the third bucket is lost")
            yield dataclasses.replace(bucket, names=(str(number),))
            del bucket

    outcomes = push_from_two_ranks(engine, buckets, handles)
    assert [type(outcome) for outcome in outcomes] == [WeightPushFailed] * 2
    assert len({str(outcome) for outcome in outcomes}) == 1, "all ranks say the same"
    assert "the third bucket is lost" in str(outcomes[failing].__cause__)
    assert (engine.loaded, engine.outcome) == ([1, 2], [(3, False)])
    assert sorted(shared) == [0, 0, 1, 1], "memory with a handle that the engine never opens is never freed"
    del outcomes
    assert [memory.flats for memory in memories] == [0, 0]


def test_buckets_of_other_ranks_stay_while_the_engine_reads_after_the_poster_failed(handles: Any) -> None:
    memories, failed, there = [Memory(), Memory()], threading.Event(), list[bool]()

    class Slow(Holding):
        async def load(self, bucket: Bucket, handles: Any = None) -> None:
            await asyncio.to_thread(failed.wait, DEADLINE_S)
            await asyncio.sleep(0.3)  # time for the other rank to let its bucket go, if it would
            there.append(1 in memories[1].alive)

    def buckets(rank: int) -> Iterator[Bucket]:
        for number, bucket in enumerate(memories[rank].buckets(), 1):
            if rank == 0 and number == 2:
                failed.set()
                raise OSError("the second bucket is lost")
            yield dataclasses.replace(bucket, names=(str(number),))
            del bucket

    outcomes = push_from_two_ranks(Slow(), buckets, handles)
    assert [type(outcome) for outcome in outcomes] == [WeightPushFailed] * 2
    assert there == [True]


async def test_the_body_is_what_its_length_says() -> None:
    """One that is longer or shorter than its header is an error of the HTTP library, or hangs the server."""
    from relax_rollout.engines.sglang.weights import UpdateBody

    for pieces in ([b""], [b"a"], [b"ab", b"c"], [b"abcd"], [bytes(1_000_000), b"xy"]):
        for ranks in (1, 2):
            body = UpdateBody([pieces] * ranks)
            sent = b"".join([chunk async for chunk in body])
            assert len(sent) == len(body)


async def test_an_update_that_never_began_leaves_the_weights_as_they_are() -> None:
    async with SGLangDouble().serving() as server:
        engine = SGLangEngine(server.url, name="engine0")
        await engine.end_update(4, whole=False)
        assert server.calls == []
        async with updating(engine, 5):
            assert server.weight_version == "pushing:5"
        assert server.weight_version == "5"
        await engine.end_update(6, whole=False)
        assert server.weight_version == "5"
        await engine.close()


# ---------------------------------------------------------------------- several ranks


class TwoRanks(OneRank):
    """The rank that posts, beside one that shares nothing or the handle it was given."""

    def __init__(self, other: Any = None) -> None:
        self.gathered: list[Any] = []
        self._other = other

    def gather(self, item: Any) -> list[Any]:
        self.gathered.append(item)
        return [item, self._other]


class Loading:
    """Keeps what it was asked to load."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    async def load(self, bucket: Bucket, handles: Any = None) -> None:
        self.loaded.append((bucket, handles))


async def test_the_engine_gets_the_handles_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "share", lambda flat: HANDLES[0])
    bucket, engine = Bucket.of([("a", torch.zeros(2))]), Loading()
    send = ipc.SendHandles()
    await send.load([engine], bucket, send.prepare(bucket, TwoRanks(HANDLES[1])))  # type: ignore[list-item]
    assert engine.loaded == [(bucket, HANDLES)]
    with pytest.raises(ValueError, match="a rank that shares a GPU with the engine could not share its bucket"):
        await send.load([engine], bucket, send.prepare(bucket, TwoRanks()))  # type: ignore[list-item]
    assert len(engine.loaded) == 1


def test_a_rank_that_cannot_share_its_bucket_keeps_nobody_waiting() -> None:
    ranks = TwoRanks(HANDLES[1])
    with pytest.raises(ValueError, match="only memory of a GPU can be shared"):
        ipc.SendHandles().prepare(Bucket.of([("a", torch.zeros(2))]), ranks)
    ipc.SendHandles().prepare(None, ranks)
    assert ranks.gathered == [None, None]


# ---------------------------------------------------------------------- seams


def test_a_push_knows_no_sglang(make_engine: Callable[..., Any], tiny: Any) -> None:
    """The engine of these tests, which computes in this process, takes weights through the same transport."""
    engine, before = make_engine(), {name: t.clone() for name, t in tiny.state_dict().items()}
    transport = make_transport(
        [EngineAddress("engine0", "")],
        rank=0,
        world_size=1,
        device="cpu",
        gpus_per_engine=1,
        connect=lambda address: engine,
    )
    report = transport.push([Bucket.of([(name, t + 1)]) for name, t in before.items()], 3)
    try:
        assert report.tensors == len(before)
        assert engine.version == 3
        assert all(torch.equal(t, before[name] + 1) for name, t in tiny.state_dict().items())
    finally:
        tiny.load_state_dict(before)


def test_a_transport_is_a_name_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Counting:
        setup: TransportSetup

        def push(self, buckets: Iterable[Bucket], version: int, engines: Collection[str] | None = None) -> PushReport:
            return PushReport(buckets=sum(1 for _ in buckets))

        def close(self) -> None: ...

    monkeypatch.setitem(TRANSPORTS, "counting", Counting)
    address = EngineAddress("engine0", "http://127.0.0.1:1")
    options = {"rank": 1, "world_size": 2, "device": "cpu", "gpus_per_engine": 1}
    transport = make_transport([address], name="counting", **options)  # type: ignore[arg-type]
    assert isinstance(transport, Counting)
    assert transport.setup.engines == (address,)
    assert transport.push([Bucket.of([("a", torch.zeros(2))])], 1).buckets == 1
    with pytest.raises(
        ValueError, match=r"no weight transport 'pigeon'; known: \['counting', 'disk', 'group', 'ipc', 'value'\]"
    ):
        make_transport([address], name="pigeon", **options)  # type: ignore[arg-type]


def the_name(name: str, setup: TransportSetup) -> str:
    return name


def test_the_device_decides_which_transport_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRANSPORTS:
        monkeypatch.setitem(TRANSPORTS, name, functools.partial(the_name, name))
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "gpus_per_engine": 1}
    assert make_transport([], device="cpu", **options) == "value"
    assert make_transport([], device="cuda", **options) == "ipc"


async def test_a_push_to_some_engines_leaves_the_others_alone() -> None:
    async with SGLangDouble().serving() as one, SGLangDouble().serving() as other:
        addresses = [EngineAddress("engine0", one.url), EngineAddress("engine1", other.url)]
        transport = make_transport(addresses, rank=0, world_size=1, device="cpu", gpus_per_engine=1)
        buckets = [Bucket.of([("a", torch.zeros(4))])]
        report = await asyncio.to_thread(transport.push, buckets, 4, ["engine1"])
        assert (report.buckets, one.calls, other.weight_version) == (1, [], "4")
        await asyncio.to_thread(transport.push, buckets, 5)
        assert (one.weight_version, other.weight_version) == ("5", "5")


async def test_what_an_engine_was_asked_once_is_not_asked_in_each_push() -> None:
    async with SGLangDouble().serving() as server:
        address = EngineAddress("engine0", server.url)
        transport = make_transport([address], rank=0, world_size=1, device="cpu", gpus_per_engine=1)
        buckets = [Bucket.of([("a", torch.zeros(4))])]
        await asyncio.to_thread(transport.push, buckets, 4)
        pause, mark, load = "/pause_generation", "/update_weight_version", "/update_weights_from_tensor"
        assert server.calls[:5] == [pause, mark, "/begin_weight_update", "/server_info", load]
        server.calls.clear()
        await asyncio.to_thread(transport.push, buckets, 5)
        # The cache is emptied while the version is claimed, and both are over before it goes on.
        assert server.calls[:3] == [pause, mark, load]
        assert sorted(server.calls[3:-1]) == ["/flush_cache", mark]
        assert server.calls[-1] == "/continue_generation"
        assert server.weight_version == "5"


async def test_an_engine_that_cannot_empty_its_cache_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(self: SGLangEngine) -> None:
        raise TimeoutError("engine0: requests were still running")

    monkeypatch.setattr(SGLangEngine, "flush_cache", busy)
    async with SGLangDouble().serving() as server:
        with pytest.raises(WeightPushFailed, match="requests were still running"):
            await push(server, [Bucket.of([("a", torch.zeros(4))])])
        assert server.weight_version == "broken:1"
        assert "/continue_generation" not in server.calls


def test_a_rank_whose_engine_is_left_out_shares_no_memory() -> None:
    """A handle that nobody opens keeps its memory for ever."""
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "gpus_per_engine": 1, "connect": SGLangEngine.at}
    transport = ipc.ipc_transport(TransportSetup(engines=(EngineAddress("engine0", "http://x"),), **options))
    for engines in (None, ["engine0", "engine1"]):
        assert isinstance(transport.send_for(engines), ipc.SendHandles)
    assert isinstance(transport.send_for(["engine1"]), ipc.SendNothing)
