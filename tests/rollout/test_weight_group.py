"""A push over process groups without the real engine: how much memory it needs, and what a failure leaves."""

import asyncio
import contextlib
import datetime
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.weight_sync.base import PushReport, TransportSetup, WeightPushFailed
from relax_rollout.weight_sync.feeders import choose_feeders, is_near, meeting_host
from relax_rollout.weight_sync.group import GroupTransport
from relax_rollout.weight_sync.pair_group import PairGroup
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.transports import make_transport
from sglang_double import SGLangDouble

BUCKETS = 6
BUCKET_BYTES = 8 << 20
DEADLINE_S = 60.0


class Member:
    """An engine's ranks in a group: real gloo, in threads of this process. Keeps what each rank received."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks, self.received = ranks, [list[torch.Tensor]() for _ in range(ranks)]
        self.names: list[list[str]] = []
        self.groups: dict[str, list[Any]] = {}
        self.joined: list[str] = []
        self.refuses: int | None = None
        """Number of the bucket, from 1, that it says no to before it takes part in the broadcast."""
        self.before_answer: Any = lambda number: None

    def blocking(self) -> dict[str, Any]:
        return {
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.load,
            "/destroy_weights_update_group": self.leave,
        }

    def join(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name: str = body["group_name"]
        backends: list[Any] = [None] * self.ranks
        assert (body["world_size"], body["rank_offset"], body["backend"]) == (1 + self.ranks, 1, "gloo")

        def one(rank: int) -> None:
            timeout = datetime.timedelta(seconds=DEADLINE_S)
            store: Any = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], timeout=timeout)
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            backends[rank] = dist.ProcessGroupGloo(store, 1 + rank, body["world_size"], timeout)

        self._on_all_ranks(one)
        self.groups[name] = backends
        self.joined.append(name)
        return 200, {"success": True}

    def load(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.names.append(body["names"])
        number = len(self.names)
        if number == self.refuses:
            return 400, {"success": False, "message": "no room for these weights"}
        sizes = [
            torch.Size(shape).numel() * getattr(torch, d).itemsize
            for shape, d in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        backends = self.groups[body["group_name"]]

        def one(rank: int) -> None:
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            backends[rank].broadcast([flat], options).wait()
            self.received[rank].append(flat)

        try:
            self._on_all_ranks(one)
        except RuntimeError as error:
            return 400, {"success": False, "message": str(error)}
        self.before_answer(number)
        return 200, {"success": True}

    def leave(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (200 if self.groups.pop(body["group_name"], None) else 400), {}

    def _on_all_ranks(self, one: Any) -> None:
        errors: list[Exception] = []

        def run(rank: int) -> None:
            try:
                one(rank)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@contextlib.asynccontextmanager
async def engines(*members: Member) -> AsyncIterator[tuple[list[SGLangDouble], GroupTransport]]:
    """The doubles, and the transport of a single rank that feeds them all."""
    async with contextlib.AsyncExitStack() as stack:
        doubles = [SGLangDouble(tp_size=m.ranks, blocking=m.blocking()) for m in members]
        for double in doubles:
            await stack.enter_async_context(double.serving())
        transport = GroupTransport(setup(doubles), OneRank(), [0] * len(doubles), deadline_s=DEADLINE_S)
        yield doubles, transport
        await asyncio.to_thread(transport.close)


def setup(doubles: list[SGLangDouble]) -> TransportSetup:
    addresses = tuple(EngineAddress(f"engine{i}", double.url) for i, double in enumerate(doubles))
    return TransportSetup(engines=addresses, rank=0, world_size=1, gpus_per_engine=1, connect=SGLangEngine.at)


def small(count: int = 3, shift: float = 0.0) -> Iterator[Bucket]:
    """Tensors of odd sizes: what comes after one lies at no multiple of anything but the itemsize."""
    for i in range(count):
        yield Bucket.of([(f"layer{i}.{k}", torch.full((3, k + 1), i + k + shift)) for k in range(4)])


def as_bytes(buckets: Iterator[Bucket]) -> list[bytes]:
    return [bucket.flat.view(torch.uint8).numpy().tobytes() for bucket in buckets]


def received(member: Member, rank: int = 0) -> list[bytes]:
    return [flat.numpy().tobytes() for flat in member.received[rank]]


async def test_all_ranks_of_all_engines_get_the_bytes_of_all_buckets() -> None:
    one, two = Member(), Member(ranks=2)
    async with engines(one, two) as (doubles, transport):
        report = await asyncio.to_thread(transport.push, small(), 4)
        assert report == PushReport(3, 12, 3 * 30 * 4)
        assert [d.weight_version for d in doubles] == ["4", "4"]
        assert one.names == two.names == [[f"layer{i}.{k}" for k in range(4)] for i in range(3)]
        assert received(one) == received(two) == received(two, 1) == as_bytes(small())
        await asyncio.to_thread(transport.push, small(shift=1.0), 5)
        assert received(one)[3:] == as_bytes(small(shift=1.0))
        # The groups are those of the first push.
        assert [len(m.joined) for m in (one, two)] == [1, 1]
        assert one.groups
    assert not one.groups
    assert not two.groups


async def test_a_push_to_some_engines_does_not_speak_to_the_others() -> None:
    one, two = Member(), Member()
    async with engines(one, two) as (doubles, transport):
        report = await asyncio.to_thread(transport.push, small(), 4, ["engine1"])
        assert (report.failed, received(two)) == ({}, as_bytes(small()))
        assert (doubles[0].calls, doubles[0].weight_version) == ([], "0")


async def test_two_buckets_are_there_at_a_time_and_the_second_is_made_while_the_first_is_sent() -> None:
    alive: dict[int, int] = {}
    seen: list[int] = []
    made = [threading.Event() for _ in range(BUCKETS + 1)]
    made[BUCKETS].set()
    member = Member()
    # No engine has answered for bucket k before k + 1 is made: without overlap this would wait for ever.
    overlapped: list[bool] = []
    member.before_answer = lambda number: overlapped.append(made[number].wait(DEADLINE_S / 2))

    def buckets() -> Iterator[Bucket]:
        for i in range(BUCKETS):
            flat = torch.full((BUCKET_BYTES // 4,), float(i))
            alive[i] = flat.untyped_storage().nbytes()
            weakref.finalize(flat.untyped_storage(), alive.pop, i)
            seen.append(sum(alive.values()))
            bucket = Bucket((f"layer{i}.weight",), (tuple(flat.shape),), "float32", flat)
            del flat
            made[i].set()
            yield bucket
            del bucket

    async with engines(member) as (_, transport):
        report = await asyncio.to_thread(transport.push, buckets(), 1)
        assert report.bytes == BUCKETS * BUCKET_BYTES
        assert overlapped == [True] * BUCKETS
        assert seen == [BUCKET_BYTES] + [2 * BUCKET_BYTES] * (BUCKETS - 1)
        assert not alive


async def test_an_engine_that_refuses_holds_up_nobody_and_a_new_group_heals_it() -> None:
    one, two = Member(), Member()
    one.refuses = 2
    alive: dict[int, int] = {}

    def buckets() -> Iterator[Bucket]:
        for i in range(4):
            # More than a socket takes at once: the broadcast is stuck when the engine says no.
            bucket = Bucket.of([(f"layer{i}", torch.full((8 << 20,), float(i)))])
            alive[i] = 1
            weakref.finalize(bucket.flat.untyped_storage(), alive.pop, i)
            yield bucket
            del bucket

    async with engines(one, two) as (doubles, transport):
        report = await asyncio.to_thread(transport.push, buckets(), 7)
        assert list(report.failed) == ["engine0"]
        assert "engine0: /update_weights_from_distributed failed (400)" in report.failed["engine0"]
        assert "no room for these weights" in report.failed["engine0"]
        assert [d.weight_version for d in doubles] == ["broken:7", "7"]
        assert len(two.received[0]) == 4
        assert not alive
        report = await asyncio.to_thread(transport.push, small(), 8)
        assert report.failed == {}
        assert [d.weight_version for d in doubles] == ["8", "8"]
        assert received(one)[-3:] == as_bytes(small())
        assert len(set(one.joined)) == 2
        assert len(two.joined) == 1
        assert list(one.groups) == one.joined[1:], "the engine has left the group of before"


async def test_a_push_that_reaches_no_engine_is_an_error() -> None:
    one, two = Member(), Member()
    one.refuses = two.refuses = 2
    async with engines(one, two) as (doubles, transport):
        with pytest.raises(WeightPushFailed, match=r"version 3 did not reach any engine\. engine0: .*; engine1: "):
            await asyncio.to_thread(transport.push, small(), 3)
        assert [d.weight_version for d in doubles] == ["broken:3", "broken:3"]


async def test_a_trainer_that_cannot_make_a_bucket_leaves_engines_that_refuse() -> None:
    def failing() -> Iterator[Bucket]:
        yield from small(2)
        raise OSError("the third bucket is lost")

    member = Member()
    async with engines(member) as (doubles, transport):
        with pytest.raises(WeightPushFailed, match=r"rank 0 could not push weights of version 3.*third bucket is lost"):
            await asyncio.to_thread(transport.push, failing(), 3)
        assert doubles[0].weight_version == "broken:3"
        with pytest.raises(WeightPushFailed, match="no weights were given"):
            await asyncio.to_thread(transport.push, iter(()), 3)


async def test_an_engine_that_never_answers_is_left_at_the_deadline() -> None:
    member, other = Member(), Member()
    go_on = threading.Event()
    member.before_answer = lambda number: number != 2 or go_on.wait(DEADLINE_S)
    async with engines(member, other) as (doubles, _):
        transport = GroupTransport(setup(doubles), OneRank(), [0, 0], deadline_s=5.0)
        report = await asyncio.to_thread(transport.push, small(), 3)
        go_on.set()
        assert report.failed == {
            "engine0": "TimeoutError: engine0 did not load bucket 2 (4 tensors, 0.0 MiB) within 5 s"
        }
        assert [d.weight_version for d in doubles] == ["broken:3", "3"]
        await asyncio.to_thread(transport.close)


async def test_an_engine_that_was_started_anew_is_not_asked_for_a_group_that_it_does_not_know() -> None:
    member = Member()
    async with engines(member) as (doubles, transport):
        await asyncio.to_thread(transport.push, small(), 1)
        member.groups.clear()
        doubles[0].startup_time += 1
        report = await asyncio.to_thread(transport.push, small(), 2)
        assert report.failed == {}
        assert len(member.joined) == 2
        assert list(member.groups) == member.joined[1:]


async def test_an_engine_that_is_gone_before_the_push_is_named_and_left_out() -> None:
    member = Member()
    async with engines(member) as (doubles, _):
        gone = EngineAddress("engine1", "http://127.0.0.1:1")
        both = TransportSetup(
            engines=(*setup(doubles).engines, gone), rank=0, world_size=1, gpus_per_engine=1, connect=SGLangEngine.at
        )
        transport = GroupTransport(both, OneRank(), [0, 0], deadline_s=DEADLINE_S)
        report = await asyncio.to_thread(transport.push, small(), 1)
        assert list(report.failed) == ["engine1"]
        assert "EngineDied: engine1 (http://127.0.0.1:1) is gone" in report.failed["engine1"]
        assert doubles[0].weight_version == "1"
        await asyncio.to_thread(transport.close)


def test_members_that_do_not_come_are_not_waited_for_without_end() -> None:
    group = PairGroup("alone", host="127.0.0.1", engine_ranks=1, device="cpu", deadline_s=1.0)
    with pytest.raises(RuntimeError, match=r"[Tt]ime"):
        group.join()
    group.abort()


def test_an_engine_of_another_kind_is_refused(make_engine: Any) -> None:
    transport = make_transport(
        [EngineAddress("engine0", "http://127.0.0.1:1")],
        rank=0,
        world_size=1,
        device="cpu",
        gpus_per_engine=1,
        name="group",
        connect=lambda address: make_engine(),
    )
    with pytest.raises(WeightPushFailed, match="engine0 cannot take weights over a process group"):
        transport.push(small(), 1)


@pytest.mark.parametrize(
    ("near", "feeders"),
    [
        ([[True]], [0]),
        ([[True] * 4, [True] * 4], [0, 1, 0, 1]),
        ([[True, True], [True, True], [True, True]], [0, 1]),
        # Two nodes: ranks 0 and 1 on the first, 2 on the second; engine 3 on a third.
        ([[True, False, True, False], [True, False, True, False], [False, True, False, False]], [0, 2, 1, 0]),
        ([[False, False, False]] * 2, [0, 1, 0]),
        ([[]], []),
    ],
)
def test_an_engine_is_fed_by_a_rank_of_its_node_each_in_turn(near: list[list[bool]], feeders: list[int]) -> None:
    assert choose_feeders(near) == feeders


def test_trainer_and_engine_on_one_machine_meet_at_the_loopback() -> None:
    assert meeting_host("http://127.0.0.1:30000") == "127.0.0.1"
    assert meeting_host("http://localhost:30000") in ("127.0.0.1", "::1")
    assert is_near("http://127.0.0.1:30000")


# ---------------------------------------------------------------------- files


def test_a_folder_of_weights_is_what_safetensors_reads(tmp_path: Path) -> None:
    import json

    from relax_rollout.weight_sync.disk import write_folder
    from safetensors import safe_open

    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        wanted = {f"{i}.{k}": torch.randn(3, k + 1).to(dtype) for i in range(2) for k in range(3)}
        buckets = [Bucket.of([(n, t) for n, t in wanted.items() if n.startswith(f"{i}.")]) for i in range(2)]
        report = write_folder(buckets, folder)
        assert report == PushReport(2, 6, sum(t.nbytes for t in wanted.values()))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {n: f"model-{int(n[0]) + 1:05}-of-00002.safetensors" for n in wanted}
        for name, file in index["weight_map"].items():
            with safe_open(folder / file, "pt") as opened:
                assert torch.equal(opened.get_tensor(name), wanted[name])


def test_weights_over_disk_need_a_folder() -> None:
    with pytest.raises(ValueError, match="need a folder that the trainer's rank 0 writes"):
        make_transport([], rank=0, world_size=1, device="cpu", gpus_per_engine=1, name="disk")
