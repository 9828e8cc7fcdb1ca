"""Samples and engines agree about how long a sample may be."""

from pathlib import Path

import pytest
from relax_cli.checks.lengths import ContextLengths, context_lengths, decode_graphs
from relax_cli.checks.plan import plan_text
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError

START = ("--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl", "--rm-type", "math", "--num-rollout", "1")

DYNAMIC = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "1500")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ContextLengths(sample=2042, trained=2042, engine=None)),  # the model has 2048 positions
        (("--rollout-max-context-len", "100"), ContextLengths(sample=100, trained=100, engine=106)),
        (("--rollout-max-context-len", "2042"), ContextLengths(sample=2042, trained=2042, engine=2048)),
        (("--rollout-max-context-len", "2048"), ContextLengths(sample=2042, trained=2042, engine=2048)),
        (("--sglang-context-length", "512"), ContextLengths(sample=506, trained=506, engine=None)),
        (
            ("--sglang-context-length", "512", "--rollout-max-context-len", "100"),
            ContextLengths(sample=100, trained=100, engine=None),
        ),
        (
            ("--sglang-context-length", "512", "--rollout-max-context-len", "600"),
            ContextLengths(sample=506, trained=506, engine=None),
        ),
        # Nothing bounds the context but the model: a micro-batch does.
        (DYNAMIC, ContextLengths(sample=2042, trained=1500, engine=None)),
        ((*DYNAMIC, "--debug-rollout-only"), ContextLengths(sample=2042, trained=2042, engine=None)),
        ((*DYNAMIC, "--context-parallel-size", "2"), ContextLengths(sample=2042, trained=2042, engine=None)),
        ((*DYNAMIC, "--log-probs-max-tokens-per-gpu", "1100"), ContextLengths(sample=2042, trained=1100, engine=None)),
        (
            (*DYNAMIC, "--rollout-max-context-len", "1200"),
            ContextLengths(sample=1200, trained=1200, engine=1206),
        ),
    ],
)
def test_the_engine_holds_every_sample_and_the_tokens_it_keeps_for_itself(
    workspace: Path, words: tuple[str, ...], expected: ContextLengths
) -> None:
    assert context_lengths(resolve([*START, "--label-key", "label", "--dry-run", *words], {})) == expected


def test_the_plan_says_what_bounds_a_sample(workspace: Path) -> None:
    text = plan_text(resolve([*START, *DYNAMIC, "--dry-run"], {}))
    (line,) = (line for line in text.splitlines() if "longest sample" in line)
    assert "1500 tokens, what a micro-batch holds (--max-tokens-per-gpu)" in line
    assert "--rollout-max-context-len sets it" in line


def test_the_engine_is_not_given_more_positions_than_the_model_has(workspace: Path) -> None:
    with pytest.raises(ConfigError, match="--sglang-context-length 4096 is more than the model's") as refused:
        resolve([*START, "--label-key", "label", "--sglang-context-length", "4096"], {})
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("samples", "gpus", "words", "graphs"),
    [
        (8, 1, (), None),  # 32 prompts x 8 responses: what SGLang has graphs for by itself
        (10, 1, (), 320),
        (16, 2, (), None),  # of two engines
        (64, 1, (), 512),  # --sglang-server-concurrency
        (64, 1, ("--sglang-server-concurrency", "1000"), 1000),
        (16, 1, ("--sglang-max-running-requests", "300"), 300),
        (16, 1, ("--sglang-cuda-graph-max-bs-decode", "8"), None),
        (16, 1, ("--sglang-cuda-graph-backend-decode", "disabled"), None),
        (16, 1, ("--sglang-cuda-graph-max-bs-prefill", "4096"), 512),  # of another phase
        (8, 1, ("--rollout-function-path", "json:dumps"), 512),
    ],
)
def test_an_engine_has_graphs_for_all_that_it_generates_at_once(
    workspace: Path, samples: int, gpus: int, words: tuple[str, ...], graphs: int | None
) -> None:
    given = ["--label-key", "label", "--dry-run", "--actor-num-gpus-per-node", f"{gpus}"]
    config = resolve([*START, *given, "--n-samples-per-prompt", f"{samples}", *words], {})
    assert decode_graphs(config) == graphs
