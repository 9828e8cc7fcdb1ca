"""The rollout loop against a real model: order, over-sampling, staleness, filters, limits, custom functions."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from relax_data.prompts.ledger import LedgerError, PromptLedger
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus
from relax_rollout.engines.base import GenerateRequest
from relax_rollout.filters import reward_nonzero_std
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings

Make = Callable[..., Any]
Hooks = Callable[[str, str], str]


def prompt_id(request: GenerateRequest) -> int:
    """Of the prompt that a request belongs to."""
    return int(request.rid.split("-p")[1].split("-")[0])


@pytest.fixture
def make_loop(make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any) -> Make:
    """A loop with one engine on eight prompts; settings and arguments by name."""

    def make(engine: Any = None, source: Any = None, settings: dict[str, Any] | None = None, **options: Any) -> Any:
        values = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 4}
        engines = engine if isinstance(engine, list) else [engine or make_engine()]
        arguments: dict[str, Any] = {"reward": length_reward, "tokenizer": tokenizer} | options
        return RolloutLoop(
            RolloutSettings(**(values | (settings or {}))),
            engines=engines,
            source=source or make_source(),
            **arguments,
        )

    return make


def prompt_ids(groups: list[SampleGroup]) -> list[int]:
    return [g.prompt.prompt_id for g in groups]


async def test_every_prompt_once_in_order_with_true_log_probs(make_loop: Make, tiny: Any, tokenizer: Any) -> None:
    loop = make_loop()
    first, second = await loop.generate(0, 0), await loop.generate(1, 0)
    assert prompt_ids(first.groups) == [0, 1, 2, 3]
    assert prompt_ids(second.groups) == [4, 5, 6, 7]
    for sample in (s for g in first.groups for s in g.samples):
        prompt = sample.prompt.input_ids
        with torch.no_grad():
            logits = tiny(input_ids=torch.tensor([prompt + sample.tokens])).logits[0].float()
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
        expected = rows[torch.arange(len(sample.tokens)), torch.tensor(sample.tokens)].tolist()
        assert sample.log_probs == pytest.approx(expected, abs=1e-5)
        assert sample.response == tokenizer.decode(sample.tokens, skip_special_tokens=True)
        assert sample.reward == sample.tokens[0] / 128
    assert first.dropped == []


async def test_greedy_rollouts_are_equal(make_loop: Make, make_engine: Make) -> None:
    runs = []
    for engines in ([make_engine()], [make_engine(name="engine0"), make_engine(name="engine1")]):
        loop = make_loop(engine=engines, settings={"rollout_temperature": 0.0})
        runs.append([s.tokens for _ in range(2) for g in (await loop.generate(0, 0)).groups for s in g.samples])
    assert runs[0] == runs[1]


async def test_over_sampling_takes_the_first_finished_and_loses_nothing(make_loop: Make, make_engine: Make) -> None:
    # Prompts 0 and 2 are slow; 1 finishes with 3, 4 and 5 in the same turn, one group more than is wanted.
    engine = make_engine(delay=lambda r, i: 10**9 if prompt_id(r) in (0, 2) and r.rid.startswith("r0") else 0)
    loop = make_loop(engine, settings={"rollout_batch_size": 3, "over_sampling_batch_size": 6})
    first = await loop.generate(0, 0)
    assert prompt_ids(first.groups) == [1, 3, 4]
    assert not engine.running
    assert first.metrics["rollout/buffered_groups"] == 3

    engine.version = 1
    asked = len(engine.requests)
    second = await loop.generate(1, 1)
    # The whole surplus group is used as it is; the interrupted ones come before any new prompt.
    assert 5 in prompt_ids(second.groups)
    assert [prompt_id(r) for r in engine.requests[asked : asked + 4]] == [0, 0, 2, 2]
    surplus = next(g for g in second.groups if g.prompt.prompt_id == 5)
    assert {v for s in surplus.samples for v in s.versions} == {0}
    assert second.metrics["staleness/max"] == 1.0

    seen = prompt_ids(first.groups) + prompt_ids(second.groups)
    for k in range(2, 5):
        seen += prompt_ids((await loop.generate(k, 1)).groups)
    assert sorted(seen) == sorted(set(seen))
    assert set(range(8)) <= set(seen)


async def test_interrupted_samples_restart_from_the_clean_prompt(make_loop: Make, make_engine: Make) -> None:
    # Prompt 1 hangs after two tokens of its second sample; the first one finishes.
    engine = make_engine(delay=lambda r, i: 10**9 if "r0-p1-s1" in r.rid and i == 2 else 0)
    loop = make_loop(
        engine,
        settings={"rollout_batch_size": 1, "over_sampling_batch_size": 2, "rollout_max_response_len": 6},
    )
    first = await loop.generate(0, 0)
    assert prompt_ids(first.groups) == [0]
    (group,) = loop.ledger.waiting
    assert group.prompt.prompt_id == 1
    assert group.samples[0].status.finished
    assert group.samples[1] == Sample(group.prompt, 1, aborted_count=1)
    ledger = PromptLedger()
    ledger.load_state_dict(loop.state_dict()["ledger"])
    assert ledger.waiting == [dataclasses.replace(group, start_version=0)]
    assert first.metrics["rollout/restarted_samples"] == 1
    engine.version = 1
    second = await loop.generate(1, 1)
    assert prompt_ids(second.groups) == [1]
    whole, restarted = second.groups[0].samples
    assert set(whole.versions) == {0}
    assert set(restarted.versions) == {1}
    again = [r for r in engine.requests if r.rid.startswith("r1-p1-")]
    assert [list(r.input_ids) for r in again] == [restarted.prompt.input_ids]


@pytest.mark.parametrize(("max_staleness", "versions"), [(0, {5}), (4, {5}), (5, {0}), (None, {0})])
async def test_surplus_that_is_too_old_restarts(
    make_loop: Make, make_engine: Make, max_staleness: int | None, versions: set[int]
) -> None:
    engine = make_engine()
    loop = make_loop(
        engine, settings={"rollout_batch_size": 1, "over_sampling_batch_size": 2}, max_staleness=max_staleness
    )
    await loop.generate(0, 0)
    assert len(loop.ledger.ready) == 1
    engine.version = 5
    result = await loop.generate(1, 5)
    assert prompt_ids(result.groups) == [1]
    assert {v for s in result.groups[0].samples for v in s.versions} == versions


async def test_filter_drops_are_counted_and_replaced(make_loop: Make) -> None:
    def even(group: SampleGroup) -> tuple[bool, str]:
        return group.prompt.prompt_id % 2 == 0, "odd"

    result = await make_loop(filter=even).generate(0, 0)
    assert prompt_ids(result.groups) == [0, 2, 4, 6]
    assert [(d.prompt_id, d.reason) for d in result.dropped] == [(1, "odd"), (3, "odd"), (5, "odd")]
    assert result.dropped[0].source == "data.jsonl:2"
    assert result.metrics["rollout/dropped/odd"] == 3


async def test_shipped_filter_drops_groups_of_equal_rewards(make_loop: Make, hooks: Hooks) -> None:
    path = hooks("parity", "def f(s):\n    return 1.0 if s.prompt.prompt_id % 2 else float(s.index)\n")
    loop = make_loop(
        reward=build_reward(RewardSettings(custom_rm_path=f"{path}:f")),
        settings={"dynamic_sampling_filter_path": "relax_rollout.filters:reward_nonzero_std"},
    )
    result = await loop.generate(0, 0)
    assert prompt_ids(result.groups) == [0, 2, 4, 6]
    assert {d.reason for d in result.dropped} == {"equal_rewards_1.0"}


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ([0.3, 0.1 + 0.2], False),
        ([1e6, 1e6 + 0.0625, 1e6], False),
        ([-1.0, -1.0 - 2**-23], False),
        ([0.0, 0.0], False),
        ([0.0, 0.3 - 0.1 - 0.2], False),
        ([0.0, 2e-9], True),
        ([1e-9, 3e-9], True),
        ([1e6, 1e6 + 1], True),
        ([-1.0, 1.0], True),
    ],
)
def test_the_shipped_filter_compares_rewards_relative_to_their_size(rewards: list[float], kept: bool) -> None:
    prompt = Prompt(prompt_id=0, epoch=0, source="data.jsonl:1", text="a", input_ids=[1])
    group = SampleGroup(prompt, [Sample(prompt, i, reward=r) for i, r in enumerate(rewards)])
    assert reward_nonzero_std(group)[0] is kept


async def test_a_filter_that_rejects_everything_is_an_error(make_loop: Make) -> None:
    loop = make_loop(filter=lambda group: (False, "never"), max_rejected=8)
    with pytest.raises(ValueError, match=r"8 prompts in a row were dropped \(never: 8\), last data.jsonl:8"):
        await loop.generate(0, 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("return 1 / 0", "raised ZeroDivisionError"),
        ("return 'yes'", "returned 'yes'"),
        ("return 10**5000", "returned a int that cannot be shown"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
        ("import asyncio; raise asyncio.CancelledError", "raised CancelledError: "),
        ("raise type('Mute', (Exception,), {'__str__': lambda e: 1 / 0})", "raised Mute: (its message cannot be shown"),
    ],
)
async def test_a_broken_filter_is_named(make_loop: Make, hooks: Hooks, code: str, expected: str) -> None:
    path = hooks("broken_filter", f"def keep(group):\n    {code}\n")
    loop = make_loop(settings={"dynamic_sampling_filter_path": f"{path}:keep"})
    with pytest.raises(ValueError, match=r"data.jsonl:1: the filter keep") as caught:
        await loop.generate(0, 0)
    assert expected in str(caught.value)


async def test_least_loaded_engine_and_concurrency_cap(make_loop: Make, make_engine: Make) -> None:
    engines = [make_engine(name="engine0"), make_engine(name="engine1")]
    loop = make_loop(engines, concurrency=2)
    await loop.generate(0, 0)
    assert [e.most_running for e in engines] == [2, 2]
    assert [len(e.requests) for e in engines] == [4, 4]


async def test_the_end_of_the_last_epoch(make_loop: Make, make_source: Make) -> None:
    loop = make_loop(source=make_source(3, num_epoch=2))
    assert prompt_ids((await loop.generate(0, 0)).groups) == [0, 1, 2, 3]
    assert not loop.exhausted
    last = await loop.generate(1, 0)
    assert prompt_ids(last.groups) == [4, 5]
    assert [g.prompt.epoch for g in last.groups] == [1, 1]
    assert loop.exhausted
    assert (await loop.generate(2, 0)).groups == []


async def test_context_limit_bounds_the_response_and_drops_what_has_no_room(
    make_loop: Make, make_source: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(12)  # "9+1=" has 4 tokens, "10+1=" has 5
    loop = make_loop(source=source, settings={"rollout_batch_size": 10, "rollout_max_context_len": 5})
    result = await loop.generate(0, 0)
    assert all(len(s.tokens) == 1 for g in result.groups for s in g.samples)
    assert all(s.status is SampleStatus.TRUNCATED or s.tokens == [1] for g in result.groups for s in g.samples)
    result = await loop.generate(1, 0)
    assert [(d.source, d.reason) for d in result.dropped] == [
        ("data.jsonl:11", "prompt_too_long"),
        ("data.jsonl:12", "prompt_too_long"),
    ]
    assert "data.jsonl:11" in caplog.text
    assert "--rollout-max-prompt-len 4" in caplog.text


async def test_only_prompts_without_room_is_an_error(make_loop: Make) -> None:
    loop = make_loop(settings={"rollout_max_context_len": 2})
    with pytest.raises(ValueError, match=r"dropped \(prompt_too_long: "):
        await loop.generate(0, 0)


async def test_custom_generate_function_with_a_tool_turn(make_loop: Make, hooks: Hooks) -> None:
    path = hooks(
        "turns",
        "async def two_turns(sample, context):\n"
        "    reason = await context.extend(sample, max_new_tokens=1)\n"
        "    if reason != 'abort':\n"
        "        tool = context.tokenizer.encode('=7', add_special_tokens=False)\n"
        "        sample.append(tool, [0.0] * len(tool), context.version, loss_mask=0)\n"
        "        reason = await context.extend(sample)\n"
        "    context.finish(sample, reason)\n",
    )
    loop = make_loop(settings={"custom_generate_function_path": f"{path}:two_turns"})
    result = await loop.generate(0, 0)
    for sample in (s for g in result.groups for s in g.samples):
        assert sample.loss_mask[:3] == [1, 0, 0]
        assert len(sample.tokens) <= 4
        assert "=7" in sample.response


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", "generation with g raised UserFunctionError: SystemExit: 3"),
        ("raise __import__('asyncio').CancelledError", "generation with g raised UserFunctionError: CancelledError: "),
        ("raise KeyError('tool')", "generation with g raised KeyError: 'tool'"),
        ("pass", "g left it pending; a function of --custom-generate-function-path must end with"),
        ("context.finish(sample, 'stop')", "without a single response token"),
    ],
)
async def test_a_broken_generate_function_is_named(make_loop: Make, hooks: Hooks, code: str, expected: str) -> None:
    path = hooks("broken_generate", f"async def g(sample, context):\n    {code}\n")
    loop = make_loop(settings={"custom_generate_function_path": f"{path}:g"})
    with pytest.raises(ValueError, match=r"data.jsonl:1 response 0: ") as caught:
        await loop.generate(0, 0)
    assert expected in str(caught.value)


async def test_custom_rollout_function(make_loop: Make, hooks: Hooks) -> None:
    path = hooks(
        "collector",
        "async def last_first(rollout):\n"
        "    groups = rollout.take(4)\n"
        "    for group in groups[2:]:\n"
        "        await rollout.run_group(group)\n"
        "    return groups[:1:-1]\n"
        "async def unfinished(rollout):\n"
        "    return rollout.take(1)\n"
        "async def twice(rollout):\n"
        "    groups = rollout.take(1)\n"
        "    await rollout.run_group(groups[0])\n"
        "    return groups * 2\n"
        "async def keeps_too_early(rollout):\n"
        "    rollout.keep(rollout.take(1)[0])\n"
        "async def leaves(rollout):\n"
        "    raise SystemExit(3)\n"
        "def plain(rollout):\n"
        "    return []\n",
    )
    loop = make_loop(settings={"rollout_function_path": f"{path}:last_first"})
    assert prompt_ids((await loop.generate(0, 0)).groups) == [2, 3]
    # What it took and did not return comes first next time.
    assert prompt_ids((await loop.generate(1, 0)).groups) == [4, 5]
    assert prompt_ids(loop.ledger.waiting) == [0, 1]
    for name, message in [
        ("unfinished", "returned an unfinished group for data.jsonl:1"),
        (
            "twice",
            r"returned a group for data.jsonl:1 that it did not get from rollout.take .*, or returned it twice",
        ),
        ("leaves", "raised SystemExit: 3"),
        ("plain", "raised TypeError: it is not async; write async def"),
    ]:
        loop = make_loop(settings={"rollout_function_path": f"{path}:{name}"})
        with pytest.raises(ValueError, match=rf"--rollout-function-path .*:{name} {message}"):
            await loop.generate(0, 0)
        assert prompt_ids(loop.ledger.groups()) == prompt_ids(loop.ledger.waiting)
    loop = make_loop(settings={"rollout_function_path": f"{path}:keeps_too_early"})
    with pytest.raises(LedgerError, match=r"prompt 0 \(data.jsonl:1\) cannot become buffered: its group is not whole"):
        await loop.generate(0, 0)


async def test_group_reward_sees_whole_groups(make_loop: Make, hooks: Hooks) -> None:
    path = hooks("ranks", "def f(samples):\n    return [len(samples) + s.index for s in samples]\n")
    reward = build_reward(RewardSettings(custom_rm_path=f"{path}:f", group_rm=True))
    result = await make_loop(reward=reward).generate(0, 0)
    assert [g.rewards for g in result.groups] == [[2.0, 3.0]] * 4
    assert result.metrics["rollout/reward"] == 2.5
    assert result.metrics["rollout/reward_std"] == 0.5


async def test_metrics(make_loop: Make) -> None:
    metrics = (await make_loop().generate(0, 0)).metrics
    assert metrics["rollout/groups"] == 4
    assert metrics["rollout/tokens"] == pytest.approx(metrics["rollout/response_length"] * 8)
    assert metrics["staleness/max"] == 0
    assert 0 <= metrics["rollout/truncated"] <= 1
    assert metrics["time/generate"] + metrics["time/reward"] <= metrics["time/rollout"] + 1e-6, "but for rounding"
    assert metrics["time/generate"] > 0


async def test_one_loop_in_several_event_loops(make_loop: Make) -> None:
    loop = make_loop(concurrency=1)
    seen = []
    for k in range(2):
        # The task is made in the thread, on a loop of its own.
        result = await asyncio.to_thread(lambda k: asyncio.run(loop.generate(k, 0)), k)
        seen += prompt_ids(result.groups)
    assert seen == list(range(8))
