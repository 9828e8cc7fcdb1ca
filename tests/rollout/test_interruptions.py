"""Samples that are interrupted: finished ones are kept, none for ever, and those of other weights start again."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from relax_data.types import Prompt, Sample, SampleStatus
from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import GenerationContext
from relax_rollout.loop.context import MAX_INTERRUPTIONS
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.settings import RolloutSettings

Make = Callable[..., Any]


class ScriptedEngine:
    """Responses of ``length(request)`` tokens, one at each turn of the event loop; an abort keeps what there is.

    ``late``: the last token of a response is out before the abort is, as when both cross on the wire.
    """

    def __init__(self, length: Callable[[GenerateRequest], int], *, late: bool = False) -> None:
        self.name, self.version = "engine0", 0
        self._length, self._late = length, late
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._running.add(request.rid)
        limit = request.sampling.max_new_tokens
        wanted = self._length(request)
        reason: Any = "length" if wanted >= limit else "stop"
        tokens: list[int] = []
        while len(tokens) < min(wanted, limit):
            await asyncio.sleep(0)
            if request.rid in self._aborted and not (self._late and len(tokens) == limit - 1):
                reason = "abort"
                break
            tokens.append(20 + len(tokens) % 9)
        while self._late and wanted >= limit and request.rid not in self._aborted:
            await asyncio.sleep(0)  # whole, but not handed over before the abort
        if self._late and request.rid in self._aborted:
            reason = "abort"
        self._running.discard(request.rid)
        n = len(tokens)
        return GenerateResult(
            tokens=tokens, log_probs=[-1.0] * n, versions=[self.version] * n, finish_reason=reason, cached_tokens=0
        )

    async def abort(self, rid: str | None = None) -> None:
        self._aborted |= self._running if rid is None else self._running & {rid}

    async def weight_version(self) -> int:
        return self.version


def loop_of(engine: Any, source: Any, reward: Any, tokenizer: Any, **options: Any) -> RolloutLoop:
    loop_options = {k: options.pop(k) for k in ("max_staleness",) if k in options}
    settings = RolloutSettings(**({"n_samples_per_prompt": 1} | options))
    return RolloutLoop(settings, engines=[engine], source=source, reward=reward, tokenizer=tokenizer, **loop_options)


async def test_an_abort_of_a_response_that_is_whole_keeps_it(
    make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    """Its budget is used: nothing is left to generate, so it counts as ended by its length, and is scored."""
    first = tokenizer.encode("0+1=", add_special_tokens=False)
    engine = ScriptedEngine(lambda request: 1 if request.input_ids[: len(first)] == first else 6, late=True)
    loop = loop_of(
        engine,
        make_source(),
        length_reward,
        tokenizer,
        rollout_batch_size=1,
        over_sampling_batch_size=2,
        rollout_max_response_len=6,
    )
    result = await loop.generate(0, 0)
    assert [g.prompt.prompt_id for g in result.groups] == [0]
    assert result.metrics["rollout/restarted_samples"] == 0
    (group,) = loop.ledger.ready
    (sample,) = group.samples
    assert (group.prompt.prompt_id, sample.status, len(sample.tokens)) == (1, SampleStatus.TRUNCATED, 6)
    assert sample.reward is not None
    assert sample.aborted_count == 0


async def test_a_long_response_is_waited_for_in_the_end(make_source: Make, length_reward: Any, tokenizer: Any) -> None:
    """Over-sampling would else throw it away for ever, and train on short responses alone."""
    slow = tokenizer.encode("0+1=", add_special_tokens=False)
    engine = ScriptedEngine(lambda request: 60 if request.input_ids[: len(slow)] == slow else 4)
    loop = loop_of(
        engine,
        make_source(50),
        length_reward,
        tokenizer,
        rollout_batch_size=4,
        over_sampling_batch_size=8,
        n_samples_per_prompt=2,
        rollout_max_response_len=100,
        max_staleness=0,
    )
    returned, interrupted = [], []
    for rollout_id in range(MAX_INTERRUPTIONS + 1):
        engine.version = rollout_id
        result = await loop.generate(rollout_id, rollout_id)
        assert len(result.groups) == 4
        returned += [g.prompt.prompt_id for g in result.groups]
        interrupted.append(result.metrics["rollout/interrupted_max"])
    assert interrupted == [1, 2, 3, 4, 4]
    assert 0 in [g.prompt.prompt_id for g in result.groups], "returned by the rollout that waited for it"
    assert len(returned) == len(set(returned))
    assert [len(s.tokens) for g in result.groups if g.prompt.prompt_id == 0 for s in g.samples] == [60, 60]


async def test_samples_of_later_weights_than_the_rollout_has_start_again(
    make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    """``--start-rollout-id`` below the checkpoint's: the same version numbers are other weights from there on."""
    engine = ScriptedEngine(lambda request: 4)
    options: dict[str, Any] = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "rollout_max_response_len": 8,
    }
    before = loop_of(engine, make_source(), length_reward, tokenizer, **options)
    engine.version = 7
    await before.generate(7, 7)
    state = before.state_dict()
    assert before.ledger.ready, "something is buffered"

    for version, restarts in ((7, False), (8, False), (3, True)):
        again = loop_of(engine, make_source(), length_reward, tokenizer, **options)
        again.load_state_dict(state)
        buffered = {g.prompt.prompt_id for g in again.ledger.ready}
        engine.version = version
        result = await again.generate(version, version)
        assert buffered <= {g.prompt.prompt_id for g in result.groups}, "no prompt is lost"
        assert result.metrics["rollout/restarted_samples"] == (len(buffered) if restarts else 0)
        assert all(v <= version for g in result.groups for s in g.samples for v in s.versions)


class PushedEngine:
    """Holds each response after two tokens for a push of weights, until the fourth request."""

    name = "engine0"

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        n = len(self.requests)
        reason: Any = "held" if n < 4 else "length"
        tokens = [20, 21] if n > 1 else []  # the first push comes before the first token
        versions = [n + 2] * len(tokens)
        return GenerateResult(
            tokens=tokens, log_probs=[-1.0] * len(tokens), versions=versions, finish_reason=reason, engine=self.name
        )


@pytest.mark.parametrize("keep_cache", [True, False])
async def test_a_push_leaves_what_was_computed_if_it_is_to_be_kept(tokenizer: Any, keep_cache: bool) -> None:
    engine = PushedEngine()
    context = GenerationContext(
        EngineRouter([engine], 1),  # type: ignore[list-item]
        sampling=SamplingParams(max_new_tokens=6),
        max_context_len=None,
        tokenizer=tokenizer,
        version=3,
        label="run",
        keep_cache=keep_cache,
    )
    sample = Sample(Prompt(0, 0, "a:1", "", [5, 6]), 0)
    assert await context.extend(sample) == "length"
    assert sample.versions == [4, 4, 5, 5, 6, 6]
    # The weights that it began with name what it has computed, at the engine where it ran.
    kept: list[Any] = [(None, None), (None, "engine0"), (4, "engine0"), (4, "engine0")]
    asked = [(r.cache_version, r.engine) for r in engine.requests]
    assert asked == (kept if keep_cache else [(None, None)] * 4)
