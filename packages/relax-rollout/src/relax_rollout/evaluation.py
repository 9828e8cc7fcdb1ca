"""Evaluation: responses to held-out prompts, scored, and nothing else done with them."""

from collections.abc import Callable, Mapping, Sequence
from math import comb
from typing import Any

from relax_data.types import Prompt, SampleGroup, WeightVersion

from relax_rollout.engines.base import Engine
from relax_rollout.engines.pool import EnginePool
from relax_rollout.engines.router import EngineRouter
from relax_rollout.generation.generate import GenerationContext, eval_sampling_params, load_generate_function
from relax_rollout.loop.metrics import sample_metrics
from relax_rollout.loop.runner import STALL_TIMEOUT_S, GroupRunner, InflightGroups
from relax_rollout.rewards.base import RewardFunction
from relax_rollout.settings import EvalSettings, RolloutSettings
from relax_rollout.timer import PhaseTimer

CORRECT = 1.0
"""A response counts as correct for pass@k when its reward is at least this."""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of ``k`` responses is correct (Chen et al., arXiv 2107.03374, eq. 1)."""
    assert 0 <= correct <= samples, f"{correct} of {samples} correct"
    assert 1 <= k <= samples, f"pass@{k} of {samples} samples"
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


async def evaluate(  # noqa: PLR0913  # the parts of a rollout, by name
    engines: Sequence[Engine] | EnginePool,
    datasets: Mapping[str, Sequence[Prompt]],
    reward: RewardFunction,
    settings: EvalSettings,
    *,
    rollout: RolloutSettings,
    tokenizer: Any,
    version: WeightVersion,
    concurrency: int = 512,
    progress: Callable[[str], None] | None = None,
    progress_interval_s: float = 5.0,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> dict[str, float]:
    """Responses to all prompts of all evaluations, as metrics ``eval/<name>/...``.

    Reward, response length, share of truncated responses; with ``--n-samples-per-eval-prompt`` n > 1 also
    ``pass@k`` for k = 1, 2, 4, ... and n. Greedy evaluations are deterministic as far as the engine is.

    Args:
        datasets: prompts by name.
        rollout: where ``settings`` leave a value open, it is the rollout's; also the custom generate function.
        version: policy version that the engines serve.
        progress: called about every ``progress_interval_s`` seconds with a line that says how far it is.

    Raises:
        ValueError: a prompt leaves no room for a response, or the samples of an evaluation cannot be generated or
            scored; the message names the row.
        EngineDied: no engine is left, or one died that nobody restarts.
        TimeoutError: nothing moves any more.
        RuntimeError: a token is of another version.
    """
    timer = PhaseTimer()
    router = EngineRouter(engines, concurrency, timer)
    context = GenerationContext(
        router,
        sampling=eval_sampling_params(settings, rollout),
        max_context_len=rollout.rollout_max_context_len,
        tokenizer=tokenizer,
        version=version,
        label="eval",
    )
    generate = load_generate_function(rollout.custom_generate_function_path)
    runner = GroupRunner(router, context, generate=generate, reward=reward, timer=timer)
    groups = {
        name: [SampleGroup.start(p, settings.n_samples_per_eval_prompt) for p in prompts]
        for name, prompts in datasets.items()
    }
    every = [g for of_name in groups.values() for g in of_name]
    _check_room(context, groups, rollout.rollout_max_context_len)

    def report(running: InflightGroups) -> None:
        if progress is not None:
            done = len(every) - len(running)
            progress(f"evaluation: {done} of {len(every)} prompts, waiting for {running.waiting_for}")

    running = InflightGroups(runner, on_wait=report, interval_s=progress_interval_s, stall_timeout_s=stall_timeout_s)
    try:
        for group in every:
            running.submit(group)
        while len(running):
            await running.next_finished()
    except BaseException:
        await running.cancel()
        raise
    found = {v for g in every for s in g.samples for v in s.versions}
    if found - {version}:
        raise RuntimeError(
            f"the evaluation of version {version} has tokens of the versions {sorted(found)}: weights were pushed "
            "while it ran"
        )
    metrics = {"time/eval": timer.elapsed_s}
    for name, of_name in groups.items():
        metrics |= _metrics(name, of_name, settings.n_samples_per_eval_prompt)
    return metrics


def _metrics(name: str, groups: list[SampleGroup], n: int) -> dict[str, float]:
    metrics = sample_metrics([s for g in groups for s in g.samples], f"eval/{name}")
    if n > 1 and groups:
        correct = [sum(r >= CORRECT for r in g.rewards) for g in groups]
        for k in sorted({n, *(2**i for i in range(n.bit_length()) if 2**i <= n)}):
            metrics[f"eval/{name}/pass@{k}"] = sum(pass_at_k(n, c, k) for c in correct) / len(groups)
    return metrics


def _check_room(context: GenerationContext, groups: Mapping[str, list[SampleGroup]], limit: int | None) -> None:
    for name, of_name in groups.items():
        for group in of_name:
            if context.room(group.prompt) < 1:
                raise ValueError(
                    f"{group.prompt.source} (--eval-prompt-data {name}): the prompt of {len(group.prompt.input_ids)} "
                    f"tokens leaves no room in the {limit} tokens of a sample (--rollout-max-context-len, or what the "
                    "model allows); remove the row or raise the limit"
                )
