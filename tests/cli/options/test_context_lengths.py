"""Samples and engines agree about how long a sample may be."""

from pathlib import Path

import pytest
from relax_cli.config import resolve
from relax_cli.lengths import ContextLengths, context_lengths

START = ("--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl", "--rm-type", "math", "--num-rollout", "1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ContextLengths(sample=2042, engine=None)),  # the model has 2048 positions
        (("--rollout-max-context-len", "100"), ContextLengths(sample=100, engine=106)),
        (("--rollout-max-context-len", "2042"), ContextLengths(sample=2042, engine=2048)),
        (("--rollout-max-context-len", "2048"), ContextLengths(sample=2042, engine=2048)),
        (("--sglang-context-length", "512"), ContextLengths(sample=506, engine=None)),
        (
            ("--sglang-context-length", "512", "--rollout-max-context-len", "100"),
            ContextLengths(sample=100, engine=None),
        ),
        (
            ("--sglang-context-length", "512", "--rollout-max-context-len", "600"),
            ContextLengths(sample=506, engine=None),
        ),
    ],
)
def test_the_engine_holds_every_sample_and_the_tokens_it_keeps_for_itself(
    workspace: Path, words: tuple[str, ...], expected: ContextLengths
) -> None:
    assert context_lengths(resolve([*START, "--label-key", "label", "--dry-run", *words], {})) == expected
