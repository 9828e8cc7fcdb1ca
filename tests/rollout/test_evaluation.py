"""Evaluation against a real model."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from relax_rollout.engines.base import EngineDied
from relax_rollout.evaluation import evaluate, pass_at_k
from relax_rollout.rewards import build_reward
from relax_rollout.settings import EvalSettings, RewardSettings, RolloutSettings

Make = Callable[..., Any]
Hooks = Callable[[str, str], str]


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 1, 2), (5, 2, 3), (4, 0, 1), (3, 3, 2), (6, 4, 3)])
def test_pass_at_k_counts_subsets(samples: int, correct: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


async def test_metrics_of_each_evaluation(make_engine: Make, make_source: Make, hooks: Hooks, tokenizer: Any) -> None:
    # Of four samples to a prompt, as many are correct as the row says: 0, 1, 2.
    path = hooks("rows", "def f(s):\n    return float(s.index < s.prompt.metadata['row'])\n")
    prompts = make_source(3).next(3)
    engine = make_engine(version=7)
    metrics = await evaluate(
        [engine],
        {"three": prompts, "last": prompts[2:]},
        build_reward(RewardSettings(custom_rm_path=f"{path}:f")),
        EvalSettings(
            eval_prompt_data=("three", "x", "last", "y"), n_samples_per_eval_prompt=4, eval_max_response_len=3
        ),
        rollout=RolloutSettings(rollout_max_response_len=9),
        tokenizer=tokenizer,
        version=7,
        concurrency=4,
    )
    assert metrics["eval/three/reward"] == pytest.approx(3 / 12)
    assert metrics["eval/last/reward"] == pytest.approx(0.5)
    assert metrics["eval/three/pass@1"] == pytest.approx(3 / 12)
    assert metrics["eval/three/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6) / 3)
    assert metrics["eval/three/pass@4"] == pytest.approx(2 / 3)
    assert "eval/three/pass@3" not in metrics
    assert metrics["eval/three/response_length_max"] <= 3
    assert len(engine.requests) == 16
    assert engine.most_running == 4


async def test_greedy_evaluation_is_deterministic_and_takes_over_rollout_values(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    engine = make_engine()
    settings = EvalSettings(eval_prompt_data=("a", "x"), eval_temperature=0.0)
    runs = [
        await evaluate(
            [engine],
            {"a": make_source(4).next(4)},
            length_reward,
            settings,
            rollout=RolloutSettings(rollout_max_response_len=5, rollout_stop=("=",)),
            tokenizer=tokenizer,
            version=0,
        )
        for _ in range(2)
    ]
    times = ("time/eval",)
    assert {k: v for k, v in runs[0].items() if k not in times} == {k: v for k, v in runs[1].items() if k not in times}
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (0.0, 5, ("=",))
    assert "eval/a/pass@1" not in runs[0]


async def test_a_prompt_without_room_is_named(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=r"data.jsonl:1 \(--eval-prompt-data a\): the prompt of 4 tokens"):
        await evaluate(
            [make_engine()],
            {"a": make_source(2).next(2)},
            length_reward,
            EvalSettings(eval_prompt_data=("a", "x")),
            rollout=RolloutSettings(rollout_max_context_len=4),
            tokenizer=tokenizer,
            version=0,
        )


async def test_an_engine_that_dies_ends_the_evaluation(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    engine = make_engine(name="engine3")
    engine.dies_after = 1
    with pytest.raises(EngineDied, match="engine3"):
        await evaluate(
            [engine],
            {"a": make_source(4).next(4)},
            length_reward,
            EvalSettings(eval_prompt_data=("a", "x")),
            rollout=RolloutSettings(rollout_max_response_len=3),
            tokenizer=tokenizer,
            version=0,
        )
    assert not engine.running
