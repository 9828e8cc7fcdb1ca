"""Partial rollout: interrupted samples go on from their tokens, in time, and end where uninterrupted ones end."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from relax_data.prompts.template import Drops
from relax_data.types import Prompt, Sample, SampleStatus
from relax_rollout.engines.base import GenerateRequest, GenerateResult
from relax_rollout.generation.seam import cut_at_seam, ends_response
from relax_rollout.loop.context import RolloutProgress
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.settings import RolloutSettings

Make = Callable[..., Any]
SLOW = 0
"""Prompt whose response is longer than any other."""


class Letters:
    """One token a character."""

    eos_token_id = 1

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(chr(t) for t in tokens)


class SlowEngine:
    """The response to prompt 0 takes many turns; the abort gives back what there is, as SGLang does."""

    def __init__(self, length: int = 60, end: int | None = None, *, first_after: int = 0) -> None:
        """Makes one.

        Args:
            length: of the response to prompt 0.
            end: its last token when it is aborted.
            first_after: turns before its first token, in the first request.
        """
        self.name, self.version, self.length, self._end = "engine0", 0, length, end
        self._wait = first_after
        self.requests: list[GenerateRequest] = []
        self._running: set[str] = set()
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        self._running.add(request.rid)
        slow = f"-p{SLOW}-" in request.rid
        done = len(request.input_ids) - 2
        wanted = (self.length if slow else 2) - done
        tokens: list[int] = []
        reason: Any = "length" if wanted >= request.sampling.max_new_tokens else "stop"
        while len(tokens) < min(wanted, request.sampling.max_new_tokens):
            await asyncio.sleep(0)
            if slow and self._wait and request.rid not in self._aborted:
                self._wait -= 1
                continue
            if request.rid in self._aborted:
                reason = "abort"
                break
            tokens.append(20 + (done + len(tokens)) % 70)
        if self._end is not None and reason == "abort" and tokens:
            tokens[-1] = self._end
        self._running.discard(request.rid)
        n = len(tokens)
        return GenerateResult(
            tokens=tokens, log_probs=[-1.0] * n, versions=[self.version] * n, finish_reason=reason, cached_tokens=1
        )

    async def abort(self, rid: str | None = None) -> None:
        self._aborted |= self._running if rid is None else self._running & {rid}

    async def weight_version(self) -> int:
        return self.version


class Source:
    drops = Drops()
    at = 0

    def next(self, n: int) -> list[Prompt]:
        first, self.at = self.at, self.at + n
        return [Prompt(i, 0, f"a:{i + 1}", "1+", [5, 6]) for i in range(first, self.at)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def restore(self, prompt: Prompt) -> None:
        """Nothing: prompts of text are whole."""

    def __len__(self) -> int:
        return 10**6


def make_loop(
    engine: Any, reward: Any, *, max_staleness: int = 3, source: Source | None = None, **options: Any
) -> RolloutLoop:
    values: dict[str, Any] = {
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 4,
        "rollout_max_response_len": 100,
        "partial_rollout": True,
    }
    settings = RolloutSettings(**(values | options))
    return RolloutLoop(
        settings,
        engines=[engine],
        source=source or Source(),
        reward=reward,
        tokenizer=Letters(),
        max_staleness=max_staleness,
    )


async def steps(loop: RolloutLoop, engine: SlowEngine, n: int) -> list[Any]:
    results = []
    for t in range(n):
        engine.version = t
        results.append(await loop.generate(t, t))
    return results


async def test_an_interrupted_sample_asks_for_the_rest_only(length_reward: Any) -> None:
    engine = SlowEngine()
    loop = make_loop(engine, length_reward)
    results = await steps(loop, engine, 4)
    asked = [r for r in engine.requests if f"-p{SLOW}-" in r.rid]
    assert len(asked) > 1
    for before, after in itertools.pairwise(asked):
        new = len(after.input_ids) - len(before.input_ids)
        assert new > 0
        assert after.input_ids[: len(before.input_ids)] == before.input_ids
        assert after.sampling.max_new_tokens == before.sampling.max_new_tokens - new
    assert asked[-1].sampling.max_new_tokens == 100 - (len(asked[-1].input_ids) - 2)
    (sample,) = [s for r in results for g in r.groups if g.prompt.prompt_id == SLOW for s in g.samples]
    assert sample.tokens == [20 + i % 70 for i in range(60)], "as if it had not been interrupted"
    assert len(sample.tokens) == len(sample.log_probs) == len(sample.versions) == len(sample.loss_mask)
    assert sample.versions == sorted(sample.versions)
    assert set(sample.versions) == {0, 1, 2, 3}
    assert sample.aborted_count == 3
    assert sample.loss_mask == [1] * 60
    assert [r.metrics["rollout/restarted_samples"] for r in results] == [0, 0, 0, 0]
    last = results[-1].metrics
    assert last["staleness/max"] == 3
    assert last["rollout/kept_tokens"] == len(asked[-1].input_ids) - 2
    assert last["rollout/reprefilled_tokens"] == len(asked[-1].input_ids) - 1
    assert last["rollout/waited_for_deadline_s"] > 0
    assert 0 < last["train/off_policy_token_share"] < 1
    assert results[-1].histograms["staleness/samples"][3] == 1


async def test_a_picture_that_the_model_writes_ends_a_sample_and_not_the_run(length_reward: Any) -> None:
    class Pictured(Source):
        def next(self, n: int) -> list[Prompt]:
            marks = {"engine_ids": np.array([5, 6]), "media_tokens": np.array([25])}
            return [dataclasses.replace(prompt, features=marks) for prompt in super().next(n)]

    engine = SlowEngine()
    loop = make_loop(engine, length_reward, source=Pictured())
    results = await steps(loop, engine, 4)
    (sample,) = [s for r in results for g in r.groups if g.prompt.prompt_id == SLOW for s in g.samples]
    assert (sample.status, sample.aborted_count) == (SampleStatus.TRUNCATED, 1)
    assert 5 < len(sample.tokens) < 60
    assert [r.metrics.get("rollout/cut_at_pictures") for r in results if r is not results[0]].count(1.0) == 1
    assert len([r for r in engine.requests if f"-p{SLOW}-" in r.rid]) == 1


IN_PARTS = """
async def generate(sample, context):
    reason = await context.extend(sample, max_new_tokens=4 - len(sample.tokens))
    if reason != "abort":
        reason = await context.extend(sample)
    context.finish(sample, reason)


generate.resumable = True
"""


async def test_a_call_that_asks_for_nothing_leaves_the_seam_to_the_next(
    length_reward: Any, hooks: Callable[[str, str], str]
) -> None:
    """A function in parts skips those that are done; what was kept is counted, and the text is looked at there."""
    path = hooks("parts", IN_PARTS)
    engine = SlowEngine()
    loop = make_loop(engine, length_reward, custom_generate_function_path=f"{path}:generate")
    last = (await steps(loop, engine, 4))[-1].metrics
    asked = [r for r in engine.requests if f"-p{SLOW}-" in r.rid]
    assert last["rollout/kept_tokens"] == len(asked[-1].input_ids) - 2 > 4
    assert last["rollout/reprefilled_tokens"] == len(asked[-1].input_ids) - 1


@pytest.mark.parametrize("eta", [1, 2, 3])
async def test_a_group_at_its_deadline_is_waited_for_and_never_too_old(length_reward: Any, eta: int) -> None:
    engine = SlowEngine(length=90)
    loop = make_loop(engine, length_reward, max_staleness=eta)
    results = await steps(loop, engine, 8)
    where = [t for t, r in enumerate(results) for g in r.groups if g.prompt.prompt_id == SLOW]
    assert where == [eta]
    assert max(r.metrics["staleness/max"] for r in results) <= eta
    assert sum(r.metrics["rollout/restarted_samples"] for r in results) == 0
    for result in results:
        assert result.metrics["rollout/open_groups"] <= 2 * (eta + 1)
        assert len(result.groups) == 2


async def test_a_protected_sample_is_not_interrupted_again(length_reward: Any) -> None:
    engine = SlowEngine(length=90)
    loop = make_loop(engine, length_reward, max_staleness=5, partial_rollout_max_aborted_count=2)
    results = await steps(loop, engine, 5)
    (sample,) = [s for r in results for g in r.groups if g.prompt.prompt_id == SLOW for s in g.samples]
    assert sample.aborted_count == 2
    assert max(r.metrics["rollout/interrupted_max"] for r in results) == 2


async def test_a_full_batch_says_which_group_it_waits_for(length_reward: Any) -> None:
    engine = SlowEngine(length=90)
    loop = make_loop(engine, length_reward, max_staleness=5, partial_rollout_max_aborted_count=2)
    reports: list[RolloutProgress] = []
    loop._progress, loop._progress_interval_s = reports.append, 0.0
    await steps(loop, engine, 3)
    waits = [r.waiting_for for r in reports if "the batch is full" in r.waiting_for]
    assert waits
    assert "a:1, 2 version(s) old, interrupted up to 2 times" in waits[-1]
    assert {r.rollout_id for r in reports if "the batch is full" in r.waiting_for} == {2}


async def test_an_abort_before_the_first_token_is_no_interruption(length_reward: Any) -> None:
    engine = SlowEngine(first_after=10**6)
    loop = make_loop(engine, length_reward)
    first, second, *_ = await steps(loop, engine, 2)
    asked = [r for r in engine.requests if f"-p{SLOW}-" in r.rid]
    assert asked[0].input_ids == asked[1].input_ids == [5, 6]
    assert asked[0].sampling.max_new_tokens == asked[1].sampling.max_new_tokens == 100
    assert first.metrics["rollout/interrupted_max"] == 0
    assert first.metrics["rollout/restarted_samples"] == second.metrics["rollout/restarted_samples"] == 0
    assert second.metrics["rollout/kept_tokens"] == 0


async def test_the_mask_leaves_the_tokens_of_the_newest_weights(length_reward: Any) -> None:
    engine = SlowEngine()
    loop = make_loop(engine, length_reward, mask_offpolicy_in_partial_rollout=True)
    results = await steps(loop, engine, 4)
    samples = {s.prompt.prompt_id: s for r in results for g in r.groups for s in g.samples}
    slow = samples.pop(SLOW)
    assert slow.loss_mask == [int(v == slow.versions[-1]) for v in slow.versions]
    assert 0 < sum(slow.loss_mask) < len(slow.loss_mask)
    assert all(s.loss_mask == [1, 1] for s in samples.values())
    assert results[-1].metrics["train/masked_token_share"] > 0


def test_mask_older_than_keeps_what_is_masked() -> None:
    sample = Sample(Prompt(0, 0, "a:1", "", [1]), 0)
    sample.append([1, 2, 3, 4, 5], [-1.0] * 5, [2, 2, 3, 3, 3], loss_mask=[1, 1, 1, 0, 1])
    sample.mask_older_than(3)
    assert sample.loss_mask == [0, 0, 1, 0, 1]


async def test_an_abort_behind_the_end_of_sequence_is_an_end(length_reward: Any) -> None:
    engine = SlowEngine(end=1)  # SGLang answers with abort although the end was just sampled
    loop = make_loop(engine, length_reward)
    (result,) = await steps(loop, engine, 1)
    (group,) = [g for g in (*result.groups, *loop.ledger.ready) if g.prompt.prompt_id == SLOW]
    assert group.samples[0].status is SampleStatus.COMPLETED
    assert group.samples[0].tokens[-1] == 1
    assert group.samples[0].aborted_count == 0


def ids(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("before", "new", "stops", "cut"),
    [
        ("abc<e", "nd> more", ["<end>"], 3),
        ("abc<end", "> more", ["<end>"], 1),
        ("abc", "<end>", ["<end>"], 5),
        ("abc<", "ende>", ["<end>"], None),
        ("", "d>", ["<end>"], None),
        ("abc<e", "nd>", [], None),
        ("a\n", "\nb", ["\n\n", "b"], 1),
        ("ab", "cd", ["bcd", "bc"], 1),
    ],
)
def test_a_stop_string_across_the_seam_ends_at_its_token(
    before: str, new: str, stops: list[str], cut: int | None
) -> None:
    assert cut_at_seam(ids(before), ids(new), stops, Letters().decode) == cut


def test_what_ends_a_response_beside_an_abort() -> None:
    decode = Letters().decode
    assert ends_response(ids("ab\x01"), {1}, [], decode)
    assert ends_response(ids("ab<end>"), {1}, ["<end>"], decode)
    assert not ends_response(ids("ab<end"), {1}, ["<end>"], decode)
    assert not ends_response([], {1}, ["a"], decode)


def test_a_function_that_cannot_go_on_is_refused(length_reward: Any, hooks: Callable[[str, str], str]) -> None:
    path = hooks(
        "turns",
        "async def once(sample, context):\n    pass\nasync def again(s, c):\n    pass\nagain.resumable = True\n",
    )
    with pytest.raises(ValueError, match=r"turns.py:once: with --partial-rollout .* `once.resumable = True`"):
        make_loop(SlowEngine(), length_reward, custom_generate_function_path=f"{path}:once")
    make_loop(SlowEngine(), length_reward, custom_generate_function_path=f"{path}:again")
