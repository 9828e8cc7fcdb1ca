"""The tokens that SGLang keeps of its context length are as many as we think."""

import asyncio
from typing import Any

import pytest
from engine_gate import KEY
from relax_cli.checks.lengths import ENGINE_MARGIN
from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

CONTEXT = 2048  # positions of the model, so the server's context length


def generate(url: str, prompt: int, new: int) -> GenerateResult:
    async def ask() -> GenerateResult:
        engine = SGLangEngine(url, name="engine0", key=KEY)
        sampling = SamplingParams(max_new_tokens=new, temperature=1.0, ignore_eos=True)
        try:
            return await engine.generate(GenerateRequest(rid="r", input_ids=[5] * prompt, sampling=sampling))
        finally:
            await engine.close()

    return asyncio.run(ask())


def test_a_sample_of_the_largest_length_gets_all_its_tokens(sglang_server: Any) -> None:
    longest = CONTEXT - ENGINE_MARGIN
    assert len(generate(sglang_server.url, longest - 1, 1).tokens) == 1, "the longest prompt that leaves room"
    assert len(generate(sglang_server.url, longest - 10, 10).tokens) == 10


def test_a_longer_prompt_is_refused(sglang_server: Any) -> None:
    with pytest.raises(ValueError, match="engine0 refused a request"):
        generate(sglang_server.url, CONTEXT - ENGINE_MARGIN, 1)
