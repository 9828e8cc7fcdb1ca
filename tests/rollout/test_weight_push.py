"""A weight push without the real engine: how much memory it needs, what it leaves behind, and its seams."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress, IpcHandle, updating
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.weight_sync import ipc
from relax_rollout.weight_sync.base import PushReport, TransportSetup, WeightPushFailed
from relax_rollout.weight_sync.push import push_weights
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.transports import TRANSPORTS, make_transport
from relax_rollout.weight_sync.value import send_values
from sglang_double import SGLangDouble

BUCKETS = 8
BUCKET_BYTES = 16 << 20
ROOM = 4 << 20
"""Bytes for connections, the chunks that are being encoded and sent, and objects of all kinds."""


class Memory:
    """Bytes of buckets and of Python objects that a push keeps alive; the garbage collector does not run meanwhile.

    torch's memory is not seen by tracemalloc, so the two are counted apart and added.
    """

    def __init__(self) -> None:
        self._flats: dict[int, int] = {}
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
            weakref.finalize(flat.untyped_storage(), self._flats.pop, i)
            bucket = Bucket((f"layer{i}.weight",), (tuple(flat.shape),), "float32", flat)
            del flat
            yield bucket
            del bucket


async def push(server: SGLangDouble, buckets: Iterable[Bucket], engines: int = 1) -> PushReport:
    clients = [SGLangEngine(server.url, name=f"engine{i}") for i in range(engines)]
    try:
        return await push_weights(clients, buckets, 1, send=send_values, ranks=OneRank())
    finally:
        for client in clients:
            await client.close()


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_push_holds_two_buckets_whatever_their_number(engines: int) -> None:
    memory = Memory()
    async with SGLangDouble(on_update=memory.look).serving() as server:
        await push(server, [Bucket.of([("warm", torch.zeros(4))])])
        memory.seen.clear()
        with memory.watching():
            report = await push(server, memory.buckets(), engines)
            left = memory.now
    assert report == PushReport(BUCKETS, BUCKETS, BUCKETS * BUCKET_BYTES)
    assert len(memory.seen) == BUCKETS * engines
    assert BUCKET_BYTES < max(memory.seen) <= 2 * BUCKET_BYTES + ROOM
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
async def test_a_failed_push_lets_go_of_all_its_memory(fault: dict[str, Any], says: str, arrived: int) -> None:
    memory = Memory()
    async with SGLangDouble(on_update=memory.look, **fault).serving() as server:
        with memory.watching():
            with pytest.raises(WeightPushFailed, match=says) as caught:
                await push(server, memory.buckets())
            left = memory.now
        assert server.weight_version == "broken:1"
    assert caught.value.__cause__ is not None
    assert len(memory.seen) == arrived
    assert max(memory.seen) <= 2 * BUCKET_BYTES + ROOM
    assert memory.flats == 0, "the error that the caller still has must not hold a bucket"
    assert left < ROOM


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


HANDLES = [IpcHandle(f"gpu-{i}", torch.zeros, (1,)) for i in range(2)]


async def test_the_engine_gets_the_handles_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "share", lambda flat: HANDLES[0])
    bucket, engine = Bucket.of([("a", torch.zeros(2))]), Loading()
    await ipc.send_handles([engine], bucket, TwoRanks(HANDLES[1]))  # type: ignore[list-item]
    assert engine.loaded == [(bucket, HANDLES)]
    with pytest.raises(ValueError, match="a rank that shares a GPU with the engine could not share its bucket"):
        await ipc.send_handles([engine], bucket, TwoRanks())  # type: ignore[list-item]
    assert len(engine.loaded) == 1


async def test_a_rank_that_cannot_share_its_bucket_keeps_nobody_waiting() -> None:
    ranks = TwoRanks(HANDLES[1])
    with pytest.raises(ValueError, match="only memory of a GPU can be shared"):
        await ipc.send_handles([], Bucket.of([("a", torch.zeros(2))]), ranks)
    await ipc.send_handles([], None, ranks)
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


def test_a_rank_whose_engine_is_left_out_shares_no_memory() -> None:
    """A handle that nobody opens keeps its memory for ever."""
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "gpus_per_engine": 1, "connect": SGLangEngine.at}
    transport = ipc.ipc_transport(TransportSetup(engines=(EngineAddress("engine0", "http://x"),), **options))
    assert transport.send_for(None) is transport.send_for(["engine0", "engine1"]) is ipc.send_handles
    assert transport.send_for(["engine1"]) is ipc.send_nothing
