"""Real SGLang servers that are killed or stopped while a rollout runs on them."""

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engine_gate import KEY, Gate, underway
from relax_data.weights import Bucket
from relax_rollout.engines.pool import EnginePool, EngineState
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings
from relax_rollout.weight_sync.transports import make_transport

SILENCE_S = 12.0


def client(server: Any, name: str, alive: Callable[[], bool] | None = None) -> SGLangEngine:
    return SGLangEngine(
        server.url, name=name, key=KEY, log_path=server.log_path, silence_deadline_s=SILENCE_S, alive=alive
    )


async def lose_in_mid_rollout(
    loop: RolloutLoop, rollout_id: int, gate: Gate, server: SGLangServer, number: int
) -> list[psutil.Process]:
    """One rollout, in the middle of which a server is killed, or all its processes are stopped; these."""
    gate.close()
    running = asyncio.create_task(loop.generate(rollout_id, 0))
    await underway(server.url, 1)
    tree = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    for process in tree[:1] if number == signal.SIGKILL else tree:
        process.send_signal(number)
    result = await running
    gate.open()
    assert [g.prompt.prompt_id for g in result.groups] == list(range(4 * rollout_id, 4 * rollout_id + 4))
    assert loop.ledger.counts()["out"] == 0
    return tree


def left_of(tree: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_one_of_two_servers_is_killed_comes_back_and_is_stopped(
    sglang_server: Any, tiny_model: Path, tiny: Any, make_source: Any, tokenizer: Any, tmp_path: Path
) -> None:
    log, gate = tmp_path / "engine1.log", Gate(tmp_path)
    settings = SGLangSettings(sglang_extra=gate.options())
    one = SGLangServer(
        settings, model_path=tiny_model, name="engine1", log_path=log, device="cpu", dtype="float32", seed=1, key=KEY
    )
    pool = EnginePool([client(sglang_server, "engine0")])
    version = await pool.serving[0].weight_version()
    try:
        with gate.importable():
            await asyncio.to_thread(one.start, deadline_s=400)
            pool = EnginePool([client(sglang_server, "engine0"), client(one, "engine1", one.alive)])
            loop = RolloutLoop(
                RolloutSettings(rollout_batch_size=4, n_samples_per_prompt=2, rollout_max_response_len=40),
                engines=pool,
                source=make_source(12),
                reward=build_reward(RewardSettings(rm_type="exact-match")),
                tokenizer=tokenizer,
            )
            tree = await lose_in_mid_rollout(loop, 0, gate, one, signal.SIGKILL)
            (well, lost) = pool.reports()
            assert (well.state, lost.state) == (EngineState.SERVING, EngineState.LOST)
            assert re.search(rf"engine1 .* is gone\. Last lines of {log}", lost.error)
            await asyncio.to_thread(psutil.wait_procs, tree, timeout=60)
            assert not left_of(tree), "its supervisor ends what is left of it"
            assert one.poll() == 137
            assert not one.alive()

            await asyncio.to_thread(one.stop)
            await asyncio.to_thread(one.start, deadline_s=400)
            await (pool.replace(client(one, "engine1"))).close()
            # What the trainer does when an engine has come back: the current weights to it alone.
            transport = make_transport([one.address], rank=0, world_size=1, device="cpu", gpus_per_engine=1)
            buckets = [Bucket.of([(name, tensor)]) for name, tensor in weights(tiny).items()]
            await asyncio.to_thread(transport.push, buckets, version, ["engine1"])
            pool.include("engine1")
            assert await pool.on_each(lambda engine: engine.weight_version()) == {
                "engine0": version,
                "engine1": version,
            }

            tree = await lose_in_mid_rollout(loop, 1, gate, one, signal.SIGSTOP)
            lost = pool.reports()[1]
            assert (lost.state, lost.losses) == (EngineState.LOST, 2)
            assert f"has answered nothing for {SILENCE_S:.0f} s" in lost.error
            result = await loop.generate(2, 0)
            assert [g.prompt.prompt_id for g in result.groups] == [8, 9, 10, 11]

            await asyncio.to_thread(one.stop)
            assert not left_of(tree)
    finally:
        gate.open()
        await pool.close()
        one.stop()


def weights(model: Any) -> dict[str, torch.Tensor]:
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.sglang
@pytest.mark.slow
def test_a_server_that_was_stopped_with_its_supervisor_ends_when_it_is_told_to(
    tiny_model: Path, tmp_path: Path
) -> None:
    one = SGLangServer(
        SGLangSettings(),
        model_path=tiny_model,
        name="engine0",
        log_path=tmp_path / "log",
        device="cpu",
        dtype="float32",
    )
    one.launch()
    process = one._process
    assert process is not None
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(tree) >= 3, "stand-in, supervisor, server"
    for each in reversed(tree):
        each.send_signal(signal.SIGSTOP)
    one.stop()
    assert not left_of(tree)
