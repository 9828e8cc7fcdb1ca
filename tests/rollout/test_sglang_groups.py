"""Weights over process groups and files to two real SGLang servers, one of which is stopped or killed midway."""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import re
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from push_ranks import BUCKET_BYTES, buckets_of, feed_and_stop, load, one_of_two
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineAddress, GenerateRequest, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.engines.sglang.weight_status import WeightsIncomplete
from relax_rollout.weight_sync.base import PushReport, TransportSetup
from relax_rollout.weight_sync.group import GroupTransport
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.transports import make_transport

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [10, 11, 12, 13, 14]
DEADLINE_S = 60.0


def tracked(buckets: Iterator[Bucket], alive: dict[int, int], peaks: list[int]) -> Iterator[Bucket]:
    """The buckets, and the bytes of those that exist whenever one was made."""
    for number, bucket in enumerate(buckets):
        storage = bucket.flat.untyped_storage()
        alive[number] = storage.nbytes()
        weakref.finalize(storage, alive.pop, number)
        peaks.append(sum(alive.values()))
        del storage
        yield bucket
        del bucket


async def disagreement(engine: SGLangEngine, model: Any, version: int) -> float:
    """Largest difference of log-probabilities between the server and transformers, after a check of the version."""
    sampling = SamplingParams(max_new_tokens=16, ignore_eos=True)
    result = await engine.generate(GenerateRequest(rid="check", input_ids=PROMPT, sampling=sampling))
    assert set(result.versions) == {version}
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([PROMPT + result.tokens])).logits[0], -1)
    first = len(PROMPT) - 1
    return max(abs(float(expected[first + i, t]) - result.log_probs[i]) for i, t in enumerate(result.tokens))


@pytest.fixture(scope="module")
def spare_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """A second server, which tests may kill; :func:`two` starts it again."""
    server = SGLangServer(
        SGLangSettings(),
        model_path=tiny_model,
        name="engine0",
        log_path=tmp_path_factory.mktemp("spare") / "engine0.log",
        device="cpu",
        dtype="float32",
    )
    server.start(deadline_s=580)
    try:
        yield server
    finally:
        server.stop()


class Two:
    """Engine 0, which may be killed, and engine 1, the session's."""

    def __init__(self, spare: SGLangServer, other: Any) -> None:
        self.spare = spare
        self.addresses = (
            spare.address,
            dataclasses.replace(other.address, name="engine1"),
        )
        self.clients = [SGLangEngine.at(address) for address in self.addresses]

    def transport(self, deadline_s: float = DEADLINE_S) -> GroupTransport:
        setup = TransportSetup(engines=self.addresses, rank=0, world_size=1, gpus_per_engine=1, connect=SGLangEngine.at)
        return GroupTransport(setup, OneRank(), [0, 0], deadline_s=deadline_s)

    async def agree(self, model: Any, version: int) -> None:
        for client in self.clients:
            assert await disagreement(client, model, version) < 1e-4, client.name


@pytest.fixture
async def two(spare_server: SGLangServer, sglang_server: Any, tiny_model: Path) -> AsyncIterator[Two]:
    """Both engines; afterwards engine 1 serves its start weights as version 0 again."""
    if not spare_server.alive():
        spare_server.stop()
        await asyncio.to_thread(spare_server.start, deadline_s=580)
    engines = Two(spare_server, sglang_server)
    yield engines
    transport = make_transport(engines.addresses[1:], rank=0, world_size=1, device="cpu", gpus_per_engine=1)
    await asyncio.to_thread(transport.push, buckets_of(load(tiny_model)), 0)
    for client in engines.clients:
        await client.close()


def processes(server: SGLangServer) -> list[psutil.Process]:
    main = psutil.Process(server.pid)
    return [main, *main.children(recursive=True)]


@contextlib.contextmanager
def stopped(server: SGLangServer) -> Iterator[list[psutil.Process]]:
    """Stops all processes of a server, and lets those that are left go on at the end."""
    found: list[psutil.Process] = []
    try:
        yield found
    finally:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def test_all_tensors_arrive_at_both_engines(two: Two, tiny_model: Path) -> None:
    transport = two.transport()
    for version in (1, 2, 3):
        model = load(tiny_model, version)
        sizes = [(len(b), b.nbytes) for b in buckets_of(model)]
        assert len(sizes) >= 5
        assert [n for n, size in sizes if size > BUCKET_BYTES] == [1] * 7, "larger tensors come alone"
        alive, peaks = dict[int, int](), list[int]()
        report = await asyncio.to_thread(transport.push, tracked(buckets_of(model), alive, peaks), version)
        largest = max(size for _, size in sizes)
        assert sum(size for _, size in sizes) > 2 * max(peaks)
        assert largest < max(peaks) <= 2 * largest
        assert not alive
        assert report == PushReport(len(sizes), sum(n for n, _ in sizes), sum(s for _, s in sizes))
        await two.agree(model, version)
    await asyncio.to_thread(transport.close)
    launches = [await client.launch() for client in two.clients]
    assert "None" not in launches
    assert launches[0] != launches[1]
    # Closing leaves engines that another transport can join.
    model, again = load(tiny_model, 4), two.transport()
    await asyncio.to_thread(again.push, buckets_of(model), 4)
    await two.agree(model, 4)
    await asyncio.to_thread(again.close)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "silent"])
async def test_an_engine_that_stops_in_bucket_two_holds_up_nobody(two: Two, tiny_model: Path, killed: bool) -> None:
    """Its processes are stopped while bucket 1 is sent, so bucket 2 cannot arrive; then they are killed, or not."""
    before, model = load(tiny_model, 5), load(tiny_model, 6)
    transport = two.transport(deadline_s=DEADLINE_S if killed else 10.0)
    await asyncio.to_thread(transport.push, buckets_of(before), 1)
    with stopped(two.spare) as found:

        def stopping() -> Iterator[Bucket]:
            for number, bucket in enumerate(buckets_of(model), 1):
                if number == 2:
                    found.extend(processes(two.spare))
                    for process in found:
                        process.suspend()
                    if killed:
                        # Whenever it comes: the engine cannot go on before it.
                        timer = threading.Timer(0.5, lambda: [process.kill() for process in reversed(found)])
                        timer.start()
                yield bucket

        report = await asyncio.to_thread(transport.push, stopping(), 2)
    assert list(report.failed) == ["engine0"]
    # A dead engine's group may be known as broken before its process is known as dead.
    says = r"EngineDied: engine0|broadcast of bucket \d" if killed else "engine0 did not load bucket .* within 10 s"
    assert re.search(says, report.failed["engine0"])
    assert await disagreement(two.clients[1], model, 2) < 1e-4
    if killed:
        # The next push leaves it out as quickly, and does not disturb engine 1's group.
        report = await asyncio.to_thread(transport.push, buckets_of(model), 3, ["engine0", "engine1"])
        assert "is gone" in report.failed["engine0"]
        assert await disagreement(two.clients[1], model, 3) < 1e-4
    else:
        with pytest.raises(WeightsIncomplete, match="push of version 2"):
            await two.clients[0].weight_version()
        report = await asyncio.to_thread(transport.push, buckets_of(model), 3)
        assert report.failed == {}
        await two.agree(model, 3)
    await asyncio.to_thread(transport.close)


async def test_an_engine_that_was_started_again_gets_the_weights_by_itself(two: Two, tiny_model: Path) -> None:
    model, transport = load(tiny_model, 7), two.transport()
    report = await asyncio.to_thread(transport.push, buckets_of(model), 5, ["engine0"])
    assert report.failed == {}
    assert await disagreement(two.clients[0], model, 5) < 1e-4
    assert await two.clients[1].weight_version() == 0
    await asyncio.to_thread(transport.close)


# ---------------------------------------------------------------------- other processes


async def test_engines_refuse_after_the_feeder_was_killed_in_bucket_two(two: Two, tiny_model: Path) -> None:
    context = multiprocessing.get_context("spawn")
    heard, at_bucket_two = context.Pipe(duplex=False)
    feeder = context.Process(target=feed_and_stop, args=(tiny_model, two.addresses, at_bucket_two))
    with heard, at_bucket_two:
        feeder.start()
        assert await asyncio.to_thread(heard.poll, 120)
        feeder.kill()
        feeder.join()
    request = GenerateRequest(rid="a", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=2))
    for address in two.addresses:
        impatient = SGLangEngine(address.url, name=address.name, key=address.key, update_timeout_s=1.0)
        says = f"{address.name} does not generate: the push of version 9 has not finished"
        with pytest.raises(WeightsIncomplete, match=says):
            await impatient.generate(request)
        with pytest.raises(WeightsIncomplete, match=says):
            await impatient.resume()
        await impatient.close()
    model, transport = load(tiny_model, 9), two.transport()
    report = await asyncio.to_thread(transport.push, buckets_of(model), 10)
    assert report.failed == {}
    await two.agree(model, 10)
    await asyncio.to_thread(transport.close)


async def test_each_of_two_ranks_feeds_an_engine_and_both_know_what_failed(two: Two, tiny_model: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=one_of_two, args=(r, port, tiny_model, two.addresses, queue)) for r in range(2)]
    try:
        for process in ranks:
            process.start()
        assert await asyncio.to_thread(queue.get, True, 300) == "pushed"
        results = sorted([await asyncio.to_thread(queue.get, True, 300) for _ in ranks])
    finally:
        for process in ranks:
            process.join(timeout=60)
            process.kill()
            process.join()
    assert [feeds for _, feeds, _ in results] == [["engine0"], ["engine1"]]
    for _, _, failed in results:
        assert failed[:2] == [{}, {}]
        assert list(failed[2]) == ["engine2"]
        assert "is gone" in failed[2]["engine2"]
    await two.agree(load(tiny_model, 13), 13)


# ---------------------------------------------------------------------- files


async def test_both_engines_read_the_files_and_the_files_are_gone(two: Two, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    transport = make_transport(
        two.addresses, rank=0, world_size=1, device="cpu", gpus_per_engine=1, name="disk", folder=folder
    )
    for version in (14, 15):
        model = load(tiny_model, version)
        seen: list[str] = []

        def watched(model: Any = model, seen: list[str] = seen) -> Iterator[Bucket]:
            for bucket in buckets_of(model):
                yield bucket
                seen.extend(str(p) for p in folder.rglob("*.safetensors"))

        report = await asyncio.to_thread(transport.push, watched(), version)
        assert (report.buckets, report.failed) == (len(set(seen)), {})
        assert os.listdir(folder) == []
        await two.agree(model, version)
    gone = make_transport(
        [*two.addresses, EngineAddress("engine2", "http://127.0.0.1:1")],
        rank=0,
        world_size=1,
        device="cpu",
        gpus_per_engine=1,
        name="disk",
        folder=folder,
    )
    report = await asyncio.to_thread(gone.push, buckets_of(model), 16)
    assert list(report.failed) == ["engine2"]
    await two.agree(model, 16)
