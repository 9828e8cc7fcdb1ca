"""The long-tailed variant of the arithmetic example: lengths, loss mask and reward, interrupted anywhere."""

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_data.types import Sample, SampleGroup, SampleStatus
from relax_rollout.engines.base import GenerateRequest, SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import GenerationContext, load_generate_function
from relax_rollout.loop.runner import GroupRunner
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings
from relax_rollout.timer import PhaseTimer
from rollout.conftest import TransformersEngine
from tiny_models import SHAPE, random_model

FILE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "longtail.py"
ANSWER = 8
MEAN = 24.0


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("longtail", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lengths_have_a_long_tail_and_are_the_same_every_time(example: Any) -> None:
    def draw(spread: float) -> list[int]:
        return [example.response_length(p, s, mean=100, spread=spread) for p in range(500) for s in range(8)]

    drawn = draw(1.0)
    lengths = sorted(drawn)
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.1)
    assert lengths[len(lengths) // 2] < 70, "most are short"
    assert lengths[-len(lengths) // 50] > 300, "some are several times as long as the mean"
    assert draw(1.0) == drawn
    assert set(draw(0.0)) == {100}
    of_prompt = [statistics.fmean(drawn[i : i + 8]) for i in range(0, 400, 8)]
    assert max(of_prompt) > 4 * min(of_prompt), "some prompts are long for all their responses"


@dataclasses.dataclass
class Ends:
    """A tokenizer with another end of sequence: one that the random model samples."""

    tokenizer: Any
    eos_token_id: int

    def decode(self, tokens: Any, **options: Any) -> str:
        text: str = self.tokenizer.decode([t for t in tokens if t != self.eos_token_id], **options)
        return text


class Respond:
    """Generates one response as a rollout does, and cuts requests when the response has one of some lengths."""

    def __init__(self, example: Any, make_engine: Any, source: Any, tokenizer: Any) -> None:
        self.generate = example.long_tailed(mean=MEAN, spread=1.0, answer_tokens=ANSWER)
        self.make_engine, self.tokenizer = make_engine, tokenizer
        (self.prompt,) = source.next(1)
        self.requests: list[GenerateRequest] = []

    async def __call__(self, *cuts: int, end: int = -1, cap: int = 100) -> Sample:
        left = set(cuts)

        def cut(request: GenerateRequest, position: int) -> int:
            done = len(request.input_ids) - len(self.prompt.input_ids) + position
            if done in left:
                left.remove(done)
                engine._aborted.add(request.rid)
            return 0

        engine = self.make_engine(delay=cut, eos=end)
        router = EngineRouter([engine], 8)
        context = GenerationContext(
            router,
            sampling=SamplingParams(max_new_tokens=cap, temperature=0),
            max_context_len=None,
            tokenizer=Ends(self.tokenizer, end),
            version=0,
            label="test",
        )
        reward = build_reward(RewardSettings(rm_type="exact-match"))
        runner = GroupRunner(
            router, context, generate=self.generate, reward=reward, timer=PhaseTimer(), keep_interrupted=True
        )
        group = SampleGroup.start(dataclasses.replace(self.prompt, label="?"), 1)
        assert await runner.run_group(group)
        await reward.close()
        assert not left, "every cut happened"
        self.requests = engine.requests
        return group.samples[0]


@pytest.fixture(scope="module")
def model() -> Any:
    """One whose likeliest tokens differ from position to position."""
    options = SHAPE | {"tie_word_embeddings": False, "max_position_embeddings": 512}
    return random_model("Qwen3", options).eval()


@pytest.fixture
def respond(example: Any, model: Any, make_source: Callable[..., Any], tokenizer: Any) -> Respond:
    def make_engine(**options: Any) -> TransformersEngine:
        return TransformersEngine(model, **options)

    return Respond(example, make_engine, make_source(1), tokenizer)


@pytest.mark.parametrize("ends", [True, False])
async def test_an_interrupted_response_is_that_of_an_uninterrupted_one(
    example: Any, respond: Respond, ends: bool
) -> None:
    """In the answer, at its end, in the tail: the same tokens, mask, status and rewarded text."""
    greedy = (await respond()).tokens
    end = next(t for i, t in enumerate(greedy) if 0 < i < ANSWER and t not in greedy[:i]) if ends else -1
    answer = greedy.index(end) + 1 if ends else ANSWER
    whole = await respond(end=end)
    length = example.response_length(whole.prompt.prompt_id, 0, mean=MEAN, spread=1.0)
    assert len(whole.tokens) == length > ANSWER + 3
    assert whole.loss_mask == [1] * answer + [0] * (length - answer)
    assert whole.status is (SampleStatus.COMPLETED if ends else SampleStatus.TRUNCATED)
    text = respond.tokenizer.decode(whole.tokens[: answer - ends], skip_special_tokens=True)
    assert whole.response.strip() == text.strip(), "the reward does not see the tail, also where the answer is empty"
    for cuts in [(i,) for i in range(len(whole.tokens))] + [(1, answer, answer + 1, ANSWER, length - 1)]:
        again = await respond(*cuts, end=end)
        assert (again.tokens, again.loss_mask) == (whole.tokens, whole.loss_mask), cuts
        assert (again.status, again.response, again.reward) == (whole.status, whole.response, whole.reward)
        assert again.aborted_count == len({c for c in cuts if c})


async def test_the_cap_holds_for_answer_and_tail_together(respond: Respond) -> None:
    for cap in (ANSWER, ANSWER + 3):
        for cuts in ((), (cap - 2,), (2, cap - 1)):
            sample = await respond(*cuts, cap=cap)
            assert len(sample.tokens) == cap
            assert sample.loss_mask == [1] * ANSWER + [0] * (cap - ANSWER)
            assert [r.sampling.max_new_tokens for r in respond.requests][-1] >= 1


def test_partial_rollout_takes_the_function_of_the_example() -> None:
    assert load_generate_function(f"{FILE}:generate", resumable=True).resumable  # type: ignore[attr-defined]
