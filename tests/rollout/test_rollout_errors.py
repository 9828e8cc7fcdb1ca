"""What goes wrong during a rollout: it is named, nothing hangs or keeps running, and no prompt is lost."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from relax_rollout.engines.base import EngineDied, GenerateRequest, GenerateResult
from relax_rollout.generation.generate import GenerationError
from relax_rollout.loop.context import RolloutProgress
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import RewardError, build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings

Make = Callable[..., Any]
Hooks = Callable[[str, str], str]

SETTINGS = RolloutSettings(rollout_batch_size=4, n_samples_per_prompt=2, rollout_max_response_len=4)


def others() -> set[Any]:
    """Tasks besides the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_engine_that_dies_is_named_and_the_prompts_are_kept(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    dying, healthy = make_engine(name="engine0"), make_engine(name="engine1")
    dying.dies_after = 2
    loop = RolloutLoop(
        SETTINGS, engines=[dying, healthy], source=make_source(), reward=length_reward, tokenizer=tokenizer
    )
    with pytest.raises(EngineDied, match=r"engine0: the process ended with code -9; last line of its log: Killed"):
        await loop.generate(0, 0)
    assert others() == set()
    assert not dying.running
    assert not healthy.running
    loop.engines = [healthy]
    result = await loop.generate(0, 0)
    assert [g.prompt.prompt_id for g in result.groups] == [0, 1, 2, 3]


async def test_reward_that_raises_stops_the_rollout(
    make_engine: Make, make_source: Make, hooks: Hooks, tokenizer: Any
) -> None:
    path = hooks("third", "def f(s):\n    return {}['x'] if s.prompt.prompt_id == 2 else 1.0\n")
    engine = make_engine()
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:f"))
    loop = RolloutLoop(SETTINGS, engines=[engine], source=make_source(), reward=reward, tokenizer=tokenizer)
    with pytest.raises(RewardError, match=r"data.jsonl:3 response [01]: --custom-rm-path .*KeyError: 'x'") as caught:
        await loop.generate(0, 0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert others() == set()
    assert not engine.running


async def test_cancelled_rollout_leaves_nothing_running_and_loses_nothing(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    engine = make_engine()
    loop = RolloutLoop(SETTINGS, engines=[engine], source=make_source(), reward=length_reward, tokenizer=tokenizer)
    task = asyncio.create_task(loop.generate(0, 0))
    while not engine.running:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert others() == set()
    assert not engine.running
    assert [g.prompt.prompt_id for g in (await loop.generate(0, 0)).groups] == [0, 1, 2, 3]


async def test_engine_paused_by_someone_else_is_no_error(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    engine = make_engine()
    loop = RolloutLoop(SETTINGS, engines=[engine], source=make_source(), reward=length_reward, tokenizer=tokenizer)
    task = asyncio.create_task(loop.generate(0, 0))
    while len(engine.running) < 8:
        await asyncio.sleep(0)
    await engine.pause("abort")
    result = await task
    samples = [s for g in result.groups for s in g.samples]
    assert all(s.status.finished for s in samples)
    assert len(engine.requests) > 8
    prompts = {tuple(s.prompt.input_ids) for s in samples}
    assert all(tuple(r.input_ids) in prompts for r in engine.requests)


async def test_a_loop_without_engines_says_so_and_works_once_it_has_one(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    loop = RolloutLoop(SETTINGS, engines=(), source=make_source(), reward=length_reward, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="a rollout needs at least one engine"):
        await loop.generate(0, 0)
    loop.engines = [make_engine()]
    assert [g.prompt.prompt_id for g in (await loop.generate(0, 0)).groups] == [0, 1, 2, 3]


async def test_a_source_that_raises_loses_no_buffered_prompt(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    source = make_source()
    engine = make_engine()
    loop = RolloutLoop(SETTINGS, engines=[engine], source=source, reward=length_reward, tokenizer=tokenizer)
    engine.dies_after = 0
    with pytest.raises(EngineDied):
        await loop.generate(0, 0)
    engine.dies_after = None
    real, loop.settings = source.next, RolloutSettings(rollout_batch_size=6, rollout_max_response_len=4)

    def unreadable(n: int) -> Any:
        raise ValueError("data.jsonl:5: no JSON")

    source.next = unreadable
    with pytest.raises(ValueError, match=r"data.jsonl:5: no JSON"):
        await loop.generate(0, 0)
    source.next = real
    assert [g.prompt.prompt_id for g in (await loop.generate(0, 0)).groups] == [0, 1, 2, 3, 4, 5]


class AbortingEngine:
    """Ends every request at once, as an engine that somebody keeps paused; the real one cannot be made to."""

    name = "engine0"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(0)
        return GenerateResult(tokens=[5], log_probs=[-1.0], versions=[0], finish_reason="abort")

    async def abort(self, rid: str | None = None) -> None:
        pass


async def test_engine_that_aborts_for_ever_is_an_error(make_source: Make, length_reward: Any, tokenizer: Any) -> None:
    engine: Any = AbortingEngine()
    loop = RolloutLoop(SETTINGS, engines=[engine], source=make_source(), reward=length_reward, tokenizer=tokenizer)
    with pytest.raises(GenerationError, match=r"data.jsonl:1 response 0: an engine aborted its request 8 times"):
        await loop.generate(0, 0)


class SilentEngine(AbortingEngine):
    """Never answers; the real one has deadlines of its own."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_a_wait_reports_what_it_waits_for_and_ends(make_source: Make, length_reward: Any, tokenizer: Any) -> None:
    reports: list[RolloutProgress] = []
    engine: Any = SilentEngine()
    loop = RolloutLoop(
        SETTINGS,
        engines=[engine],
        source=make_source(),
        reward=length_reward,
        tokenizer=tokenizer,
        progress=reports.append,
        progress_interval_s=0.02,
        stall_timeout_s=0.2,
    )
    with pytest.raises(TimeoutError, match=r"waiting for 8 requests at engine0; first prompt data.jsonl:1"):
        await loop.generate(3, 0)
    assert others() == set()
    report = reports[0]
    assert (report.rollout_id, report.groups_done, report.groups_wanted, report.groups_running) == (3, 0, 4, 4)
    assert report.waiting_for == "8 requests at engine0; first prompt data.jsonl:1"


async def test_an_abort_that_misses_its_request_is_repeated(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    engine = make_engine(delay=lambda r, i: 0 if "-p0-" in r.rid else 10**9)
    calls: list[str | None] = []
    real = engine.abort

    async def deaf_at_first(rid: str | None = None) -> None:
        calls.append(rid)
        if len(calls) > 2:
            await real(rid)

    engine.abort = deaf_at_first
    settings = RolloutSettings(
        rollout_batch_size=1, over_sampling_batch_size=2, n_samples_per_prompt=2, rollout_max_response_len=2
    )
    loop = RolloutLoop(settings, engines=[engine], source=make_source(), reward=length_reward, tokenizer=tokenizer)
    result = await loop.generate(0, 0)
    assert [g.prompt.prompt_id for g in result.groups] == [0]
    assert len(calls) == 4
    assert others() == set()


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ("loss_mask = [1]", "loss_mask"),
        ("loss_mask = [0] * 2", "loss_mask"),
        ("loss_mask = [2] * len(sample.tokens)", "loss_mask"),
        ("log_probs = sample.log_probs[:1]", "log_probs"),
        ("log_probs = [None] * len(sample.tokens)", "log_probs"),
        ("tokens = sample.tokens + [9]", "log_probs"),
        ("versions = [7]", "versions"),
    ],
)
async def test_columns_that_a_generate_function_leaves_apart_are_named(
    make_engine: Make, make_source: Make, hooks: Hooks, length_reward: Any, tokenizer: Any, change: str, column: str
) -> None:
    """A mask of one entry would be spread over the response, and the sample would weigh as much as it has tokens."""
    path = hooks(
        "apart",
        "async def generate(sample, context):\n"
        "    reason = await context.extend(sample)\n"
        f"    sample.{change}\n"
        "    context.finish(sample, reason)\n",
    )
    settings = dataclasses.replace(SETTINGS, custom_generate_function_path=f"{path}:generate")
    loop = RolloutLoop(
        settings, engines=[make_engine()], source=make_source(), reward=length_reward, tokenizer=tokenizer
    )
    with pytest.raises(GenerationError, match=rf"data\.jsonl:\d+ response [01]: .*\b{column}\b.*generate left it so"):
        await loop.generate(0, 0)
