"""Interrupted responses on a real SGLang server: they end where uninterrupted ones end, wherever the seam lies.

A full batch interrupts them, as ``--partial-rollout`` does. The server is held in the forward pass in which the abort
arrives, so that the seam lies behind an exact token.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_gate import KEY, Gate
from relax_data.types import Sample, SampleStatus
from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, GenerateResult
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings
from relax_rollout.weight_sync import push
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.value import SendValues

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

TOKENS = 40
VERSION = 3
SOCKET_S = 0.1
"""After an abort was answered, the time in which the scheduler's socket has it. What this decides is looked at: see
:data:`TRIES`."""
TRIES = 5
"""Runs after which a seam that is never where it was wanted is a failure."""
ABORT_PASSES = 1
"""Passes from the held one to the one at whose end the server answers the abort."""


class InterruptedEngine(SGLangEngine):
    """The client of a real server, which hands answers over so that one response is interrupted where it is wanted.

    The response to ``long`` begins when the other prompt of the rollout was answered. That answer is handed over when
    ``long`` is held at the next seam: the batch is full then, and the loop aborts. Behind the last seam it comes when
    ``long`` has ended.

    Attributes:
        seams: numbers of tokens of the response to ``long`` at which the server answered with an abort.
    """

    def __init__(self, url: str, *, gate: Gate, long: Sequence[int], seams: Sequence[int]) -> None:
        super().__init__(url, key=KEY, name="engine0")
        self._gate, self._long, self._wanted = gate, list(long), list(seams)
        self._other_answered, self._other_may_go = asyncio.Event(), asyncio.Event()
        self.seams: list[int] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if list(request.input_ids[: len(self._long)]) == self._long:
            await self._other_answered.wait()
            self._other_answered.clear()
            return await self._generate_long(request)
        result = await super().generate(request)
        self._other_answered.set()
        await self._other_may_go.wait()
        self._other_may_go.clear()
        return result

    async def _generate_long(self, request: GenerateRequest) -> GenerateResult:
        before = len(request.input_ids) - len(self._long)
        watch = None
        if self._wanted:
            self._gate.hold_at(self._wanted.pop(0) - before - ABORT_PASSES)
            watch = asyncio.ensure_future(self._gate.held())
            watch.add_done_callback(lambda task: None if task.cancelled() else self._other_may_go.set())
        result = await super().generate(request)
        if watch is not None:
            watch.cancel()
        if result.finish_reason == "abort":
            self.seams.append(before + len(result.tokens))
        else:
            self._other_may_go.set()
        return result

    async def abort(self, rid: str | None = None) -> None:
        await super().abort(rid)
        await asyncio.sleep(SOCKET_S)
        self._gate.open()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """Of the shape of the server's; its greedy responses change from token to token, and differ between prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=generator)
    return model


@pytest.fixture
async def server(sglang_server: Any, model: Any, tiny: Any) -> AsyncIterator[Any]:
    """The server with the weights of ``model``; afterwards with those it started with."""
    engine = SGLangEngine(sglang_server.url, key=KEY, name="engine0", log_path=sglang_server.log_path)

    async def load(weights: Any, version: int) -> None:
        sent = [(name, tensor) for name, tensor in weights.state_dict().items() if name != "lm_head.weight"]
        buckets = Bucket.split(sent, 10**6)
        await asyncio.to_thread(push.push_weights, [engine], buckets, version, send=SendValues(), ranks=OneRank())

    await load(model, VERSION)
    yield sglang_server
    sglang_server.gate.open()
    await load(tiny, 0)
    await engine.close()


@pytest.fixture(scope="module")
def answers(model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """Greedy responses of :data:`TOKENS` tokens by prompt, of transformers, that go on behind the end of sequence."""
    texts = [f"{a}{sign}{b}=" for a in range(10) for b in range(10) for sign in "+*"]
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False) for text in texts])
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return {text: row[-TOKENS:].tolist() for text, row in zip(texts, ids, strict=True)}


@dataclasses.dataclass
class Responses:
    """Generates the response to a prompt on the server, interrupted or not."""

    server: Any
    make_source: Callable[..., Any]
    tokenizer: Any

    async def _rollouts(self, engine: SGLangEngine, text: str, open_groups: int, **options: Any) -> tuple[Sample, int]:
        settings: dict[str, Any] = {"n_samples_per_prompt": 1, "rollout_temperature": 0.0}
        settings |= {"rollout_batch_size": 1, "over_sampling_batch_size": open_groups, "partial_rollout": True}
        loop = RolloutLoop(
            RolloutSettings(**(settings | {"rollout_max_response_len": TOKENS} | options)),
            engines=[engine],
            source=self.make_source(texts=[text, *(f"{i}-{i}=" for i in range(10))]),
            reward=build_reward(RewardSettings(rm_type="exact-match")),
            tokenizer=self.tokenizer,
            max_staleness=4,
        )
        try:
            for rollout_id in range(10):
                for group in (await asyncio.wait_for(loop.generate(rollout_id, VERSION), 400)).groups:
                    if group.prompt.prompt_id == 0:
                        return group.samples[0], rollout_id
        finally:
            self.server.gate.open()
            await engine.close()
        raise AssertionError("no rollout returned the response")

    async def whole(self, text: str, **options: Any) -> Sample:
        sample, _ = await self._rollouts(SGLangEngine(self.server.url, key=KEY, name="engine0"), text, 1, **options)
        assert sample.aborted_count == 0
        return sample

    async def interrupted(self, text: str, seams: Sequence[int], **options: Any) -> Sample:
        """A response that was interrupted behind exactly so many tokens."""
        long = self.tokenizer.encode(text, add_special_tokens=False)
        for _ in range(TRIES):
            engine = InterruptedEngine(self.server.url, gate=self.server.gate, long=long, seams=seams)
            sample, rollout_id = await self._rollouts(engine, text, 2, **options)
            if engine.seams == list(seams):
                assert rollout_id == sample.aborted_count
                return sample
        raise AssertionError(f"interrupted at {engine.seams} tokens and never at {seams}")


@pytest.fixture
def responses(server: Any, make_source: Any, tokenizer: Any) -> Responses:
    return Responses(server, make_source, tokenizer)


def assert_equal(sample: Sample, whole: Sample) -> None:
    assert sample.tokens == whole.tokens
    assert sample.response == whole.response
    assert sample.status is whole.status
    assert sample.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert sample.versions == whole.versions == [VERSION] * len(whole.tokens)
    assert sample.loss_mask == whole.loss_mask == [1] * len(whole.tokens)


@dataclasses.dataclass(frozen=True)
class Ending:
    """A prompt whose greedy response is ended by something other than its budget.

    Attributes:
        first: tokens before those that end it.
        length: tokens of the response, those that end it among them.
        options: of the rollout, that make it end there.
    """

    text: str
    first: int
    length: int
    options: dict[str, Any]


@pytest.fixture(scope="module")
def endings(answers: dict[str, list[int]], endless: str, tokenizer: Any) -> dict[str, Ending]:
    """What may end a response, in the middle of it: the end of sequence, a stop token, a stop string of five tokens."""
    eos = tokenizer.eos_token_id
    found = {}
    for text, tokens in answers.items():
        if eos in tokens[6:30] and eos not in tokens[:6]:
            end = tokens.index(eos)
            found["end of sequence"] = Ending(text, end, end + 1, {})
    tokens = answers[endless]
    end = next(i for i in range(8, TOKENS) if tokens[i] not in tokens[:i])
    found["stop token"] = Ending(endless, end, end + 1, {"rollout_stop_token_ids": (tokens[end],)})
    decoded = tokenizer.decode(tokens)
    for first in range(8, TOKENS - 5):
        stop = tokenizer.decode(tokens[first : first + 5])
        # Not so in a row of equal letters; and characters are tokens, which holds without special ones.
        if len(stop) == 5 and len(set(stop)) > 2 and decoded.index(stop) == len(tokenizer.decode(tokens[:first])):
            found["stop string"] = Ending(endless, first, first + 5, {"rollout_stop": (stop,)})
            break
    assert len(found) == 3, found
    return found


@pytest.fixture(scope="module")
def endless(answers: dict[str, list[int]], tokenizer: Any) -> str:
    """The prompt whose response has the most different tokens, and no end in it."""
    eos = tokenizer.eos_token_id
    text = max((t for t in answers if eos not in answers[t]), key=lambda t: len(set(answers[t])))
    assert len(set(answers[text])) > 10
    return text


async def test_three_seams_leave_a_greedy_response_as_it_was(
    responses: Responses, answers: dict[str, list[int]], endless: str
) -> None:
    whole = await responses.whole(endless)
    assert whole.tokens == answers[endless]
    assert whole.status is SampleStatus.TRUNCATED
    sample = await responses.interrupted(endless, [9, 14, 33])
    assert sample.aborted_count == 3
    assert_equal(sample, whole)


@pytest.mark.parametrize("seams", [(0,), (1,), (2,), (3,), (4,), (5,), (1, 3), (2, 4), (1, 5), (-2, 0, 2)], ids=str)
async def test_a_stop_string_across_seams_ends_the_response_at_the_same_token(
    responses: Responses, answers: dict[str, list[int]], endings: dict[str, Ending], seams: tuple[int, ...]
) -> None:
    """Seams at tokens from the first of the stop string on; the fifth is the one that ends it."""
    ending = endings["stop string"]
    whole = await responses.whole(ending.text, **ending.options)
    assert whole.tokens == answers[ending.text][: ending.length]
    assert whole.status is SampleStatus.COMPLETED
    sample = await responses.interrupted(ending.text, [ending.first + seam for seam in seams], **ending.options)
    assert_equal(sample, whole)
    assert sample.aborted_count == sum(seam < 5 for seam in seams), "no interruption, when nothing was left"


@pytest.mark.parametrize("back", [2, 1, 0])
@pytest.mark.parametrize("kind", ["end of sequence", "stop token"])
async def test_an_end_at_the_seam_is_an_end(
    responses: Responses, answers: dict[str, list[int]], endings: dict[str, Ending], kind: str, back: int
) -> None:
    ending = endings[kind]
    whole = await responses.whole(ending.text, **ending.options)
    assert whole.tokens == answers[ending.text][: ending.length]
    assert whole.status is SampleStatus.COMPLETED
    sample = await responses.interrupted(ending.text, [ending.length - back], **ending.options)
    assert_equal(sample, whole)
    assert sample.aborted_count == (back > 0)


@pytest.mark.parametrize("left", [2, 1, 0])
async def test_the_budget_ends_the_response_with_so_many_tokens_left_at_the_seam(
    responses: Responses, answers: dict[str, list[int]], endless: str, left: int
) -> None:
    whole = await responses.whole(endless, rollout_max_response_len=12)
    assert whole.tokens == answers[endless][:12]
    assert whole.status is SampleStatus.TRUNCATED
    sample = await responses.interrupted(endless, [6, 12 - left], rollout_max_response_len=12)
    assert_equal(sample, whole)
    assert sample.aborted_count == 1 + (left > 0)


@pytest.mark.parametrize("back", [1, 0])
@pytest.mark.parametrize("kind", ["end of sequence", "stop token", "stop string"])
async def test_an_end_in_the_last_token_of_the_budget_is_what_the_engine_calls_it(
    responses: Responses, endings: dict[str, Ending], kind: str, back: int
) -> None:
    ending = endings[kind]
    options = ending.options | {"rollout_max_response_len": ending.length}
    whole = await responses.whole(ending.text, **options)
    assert len(whole.tokens) == ending.length
    assert_equal(await responses.interrupted(ending.text, [ending.length - back], **options), whole)
