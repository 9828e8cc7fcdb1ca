"""Weights are pushed to a real SGLang server while it generates in the background."""

import asyncio
from typing import Any

import pytest
import torch
from engine_gate import underway
from relax_rollout.engines.pool import EnginePool
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.loop.producer import Producer
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings
from relax_rollout.weight_sync.transports import make_transport
from rollout.test_sglang_groups import buckets_of, load

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]
GROUPS = 8


async def test_every_token_is_of_the_weights_that_its_version_names(
    sglang_server: Any, make_source: Any, tokenizer: Any
) -> None:
    """Two pushes meet eight responses in the middle; their log-probs are those of the recorded weights."""
    address = sglang_server.address
    pool = EnginePool([SGLangEngine.at(address)])
    settings = RolloutSettings(
        rollout_batch_size=GROUPS,
        over_sampling_batch_size=GROUPS,
        n_samples_per_prompt=1,
        rollout_max_response_len=60,
        partial_rollout=True,
    )
    loop = RolloutLoop(
        settings,
        engines=pool,
        source=make_source(),
        reward=build_reward(RewardSettings(rm_type="exact-match")),
        tokenizer=tokenizer,
        max_staleness=3,
        end_token_ids=frozenset(),
    )
    producer = Producer(loop, pool)
    transport = make_transport([address], rank=0, world_size=1, device="cpu", gpus_per_engine=1, name="group")
    models = {version: load(sglang_server.model_path, version + 20) for version in (0, 1, 2)}

    async def push(version: int) -> None:
        await producer.begin_push()
        report = await asyncio.to_thread(transport.push, buckets_of(models[version]), version)
        assert not report.failed
        producer.end_push(version)

    try:
        sglang_server.gate.close()
        for version in models:
            await push(version)
            if version < 2:
                await underway(sglang_server.url, 4)
        sglang_server.gate.open()
        result = await producer.next_step(0)  # the gate was told of no training step: all groups are of step 0
        await producer.begin_push()
        samples = [s for g in result.groups for s in g.samples]
        assert len(samples) == GROUPS
        mixed = [s for s in samples if len(set(s.versions)) > 1]
        assert len(mixed) >= 4, "the pushes met responses"
        assert result.metrics["rollout/kept_tokens"] > 0
        for sample in samples:
            assert sample.versions == sorted(sample.versions)
            prompt = sample.prompt.input_ids
            for version in set(sample.versions):
                with torch.no_grad():
                    logits = models[version](torch.tensor([[*prompt, *sample.tokens]])).logits[0].float()
                rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
                for i, token in enumerate(sample.tokens):
                    if sample.versions[i] == version:
                        assert sample.log_probs[i] == pytest.approx(rows[i, token].item(), abs=1e-4), sample.name
    finally:
        sglang_server.gate.open()
        await producer.stop()
        await asyncio.to_thread(transport.push, buckets_of(load(sglang_server.model_path)), 0)
        await asyncio.to_thread(transport.close)
        await pool.close()
