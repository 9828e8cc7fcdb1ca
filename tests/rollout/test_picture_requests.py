"""Requests of prompts with pictures: what the engine gets, and a response that it cannot go on behind."""

from typing import Any

import numpy as np
import pytest
from relax_data.types import Prompt, Sample, SampleStatus
from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import GenerationContext

PICTURED = {
    "engine_ids": np.array([5, 9, 6, 9]),
    "media_tokens": np.array([9, 10]),
    "picture_png": np.frombuffer(b"abcde", np.uint8),
    "picture_sizes": np.array([3, 2]),
}


def pictured(features: dict[str, Any] = PICTURED) -> Sample:
    images = {"image": ["a.png", "b.png"]}
    return Sample(Prompt(0, 0, "a.jsonl:1", "", [5, 9, 9, 9, 6, 9], multimodal=images, features=features), 0)


def make_context(
    tokenizer: Any, engine: Any, *, most: int = 9, max_context_len: int | None = None
) -> GenerationContext:
    return GenerationContext(
        EngineRouter([engine], 1),
        sampling=SamplingParams(max_new_tokens=most, temperature=0),
        max_context_len=max_context_len,
        tokenizer=tokenizer,
        version=0,
        label="test",
    )


async def test_an_engine_gets_one_token_and_one_file_for_each_picture(make_engine: Any, tokenizer: Any) -> None:
    engine, sample = make_engine(), pictured()
    await make_context(tokenizer, engine, most=3, max_context_len=8).extend(sample, ignore_eos=True)
    request = engine.requests[0]
    assert request.input_ids == [5, 9, 6, 9]
    assert request.multimodal == {"image": ["data:image/png;base64,YWJj", "data:image/png;base64,ZGU="]}
    assert len(sample.tokens) == 2, "limits count the tokens that the model sees"


@pytest.mark.parametrize("token", [9, 10])
async def test_a_response_with_the_mark_of_a_picture_ends_where_it_is(
    token: int, make_engine: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine, sample = make_engine(), pictured()
    context = make_context(tokenizer, engine)
    sample.append([20, token, 21], [-1.0] * 3, 0)
    context.continue_from(sample)
    for _ in range(2):
        assert await context.extend(sample) == "length"
    assert context.budget(sample) == 0, "a loop that asks for it ends"
    assert (engine.requests, len(sample.tokens)) == ([], 3)
    assert context.cut_at_pictures == {"a.jsonl:1 response 0"}
    assert ["a.jsonl:1 response 0: its response ends after 3 tokens" in m for m in caplog.messages] == [True]
    text = Sample(Prompt(1, 0, "a.jsonl:2", "", [5, 6]), 0)
    text.append([20, token, 21], [-1.0] * 3, 0)
    assert await context.extend(text, max_new_tokens=1) == "length"
    assert len(text.tokens) == 4, "to a prompt without pictures it is text"


async def test_a_mark_in_letters_counts_as_one(make_engine: Any, tokenizer: Any) -> None:
    """SGLang makes text of the tokens, and there a mark is a mark, whatever tokens wrote it."""
    letters = tokenizer.encode("3+4", add_special_tokens=False)
    assert len(letters) == 3

    class Written:
        """Its token 10 is written with three characters."""

        def decode(self, ids: Any, **options: Any) -> str:
            text: str = "3+4" if list(ids) == [10] else tokenizer.decode(ids, **options)
            return text

    engine, sample = make_engine(), pictured()
    sample.append(letters, [-1.0] * 3, 0)
    assert await make_context(Written(), engine).extend(sample) == "length"
    assert engine.requests == []


class HeldEngine:
    """Writes a picture's token and is then held by a push."""

    name, requests = "engine0", 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests += 1
        return GenerateResult(tokens=[20, 9], log_probs=[-1.0] * 2, versions=[0] * 2, finish_reason="held")


async def test_a_push_behind_such_a_mark_ends_the_response(tokenizer: Any) -> None:
    engine, sample = HeldEngine(), pictured()
    context = make_context(tokenizer, engine)
    context.finish(sample, await context.extend(sample))
    assert (sample.status, sample.tokens, engine.requests) == (SampleStatus.TRUNCATED, [20, 9], 1)
    assert context.cut_at_pictures
