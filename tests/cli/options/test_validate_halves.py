"""Options that the chosen half of the loop would leave without effect."""

from pathlib import Path

import pytest
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError

START = ("--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl", "--label-key", "label", "--rm-type", "math")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--num-rollout", "1", "--debug-rollout-only", "--load", "small"), ("--load", "trains nothing")),
        (
            ("--num-epoch", "1", "--debug-train-only", "--load-debug-rollout-data", "{rollout_id}.jsonl"),
            ("--num-epoch", "--num-rollout"),
        ),
    ],
)
def test_refused_before_anything_starts(workspace: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve([*START, *words], {})
    assert any(all(part in problem for part in parts) for problem in error.value.problems), error.value.problems
