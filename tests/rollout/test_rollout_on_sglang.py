"""The rollout loop against a real SGLang server."""

from typing import Any

import pytest
import torch
from engine_gate import KEY
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings


@pytest.mark.sglang
@pytest.mark.slow
async def test_over_sampling_on_sglang(sglang_server: Any, make_source: Any, tiny: Any, tokenizer: Any) -> None:
    engine = SGLangEngine(sglang_server.url, key=KEY, name="engine0", log_path=sglang_server.log_path)
    version = await engine.weight_version()
    settings = RolloutSettings(
        rollout_batch_size=3,
        over_sampling_batch_size=6,
        n_samples_per_prompt=2,
        rollout_max_response_len=24,
        rollout_temperature=0.0,
    )
    loop = RolloutLoop(
        settings,
        engines=[engine],
        source=make_source(),
        reward=build_reward(RewardSettings(rm_type="exact-match")),
        tokenizer=tokenizer,
        concurrency=6,
    )
    try:
        groups = [g for k in range(4) for g in (await loop.generate(k, version)).groups]
        # Nothing of an aborted surplus is left at the server: a flush is refused while a request runs.
        await engine.flush_cache()
    finally:
        await engine.close()
    prompt_ids = [g.prompt.prompt_id for g in groups]
    assert len(prompt_ids) == len(set(prompt_ids)) == 12
    kept = [g.prompt.prompt_id for g in loop.ledger.ready + loop.ledger.waiting]
    assert sorted(prompt_ids + kept) == list(range(len(prompt_ids) + len(kept)))
    for sample in (s for g in groups for s in g.samples):
        prompt = sample.prompt.input_ids
        with torch.no_grad():
            logits = tiny(input_ids=torch.tensor([prompt + sample.tokens])).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        assert rows.argmax(-1).tolist() == sample.tokens
        expected = rows[torch.arange(len(sample.tokens)), torch.tensor(sample.tokens)].tolist()
        assert sample.log_probs == pytest.approx(expected, abs=1e-4)
        assert set(sample.versions) == {version}
