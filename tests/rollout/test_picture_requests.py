"""Requests of prompts with pictures: what the engine gets, and a response that it cannot go on behind."""

import asyncio
from typing import Any

import numpy as np
import pytest
from relax_data.types import Prompt, Sample
from relax_rollout.engines.base import SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import GenerationContext


def test_an_engine_gets_one_token_and_one_file_for_each_picture(make_engine: Any, tokenizer: Any) -> None:
    features = {
        "engine_ids": np.array([5, 9, 6, 9]),
        "picture_token": np.array([9]),
        "picture_png": np.frombuffer(b"abcde", np.uint8),
        "picture_sizes": np.array([3, 2]),
    }
    images = {"image": ["a.png", "b.png"]}
    prompt = Prompt(0, 0, "a.jsonl:1", "", [5, 9, 9, 9, 6, 9], multimodal=images, features=features)
    engine, sample = make_engine(), Sample(prompt, 0)

    async def extend(max_context_len: int, most: int) -> None:
        context = GenerationContext(
            EngineRouter([engine], 1),
            sampling=SamplingParams(max_new_tokens=most, temperature=0),
            max_context_len=max_context_len,
            tokenizer=tokenizer,
            version=0,
            label="test",
        )
        await context.extend(sample, ignore_eos=True)

    asyncio.run(extend(8, 3))
    request = engine.requests[0]
    assert request.input_ids == [5, 9, 6, 9]
    assert request.multimodal == {"image": ["data:image/png;base64,YWJj", "data:image/png;base64,ZGU="]}
    assert len(sample.tokens) == 2, "limits count the tokens that the model sees"
    sample.append([9], [-1.0], 0)
    with pytest.raises(ValueError, match=r"a.jsonl:1 response 0: its response has token 9, which stands for a picture"):
        asyncio.run(extend(20, 9))
