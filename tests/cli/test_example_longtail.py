"""The long-tailed arithmetic example on real parts: lengths and loss mask, through interruptions and new weights."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_cli.run.debug_data import load_groups

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
ANSWER, MEAN, CAP = 8, 64, 1000
ROLLOUTS = 6
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_interrupted_responses_have_the_lengths_that_were_drawn(relax: Callable[..., Any], tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("longtail", EXAMPLE / "longtail.py")
    assert spec is not None
    assert spec.loader is not None
    longtail = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(longtail)
    run = relax(
        "train",
        *("--config", str(EXAMPLE / "longtail.toml"), "--num-rollout", str(ROLLOUTS), "--tb-experiment-name", "run"),
        *("--skip-eval-before-train", "--eval-interval", "1000"),
        *("--save-debug-rollout-data", str(tmp_path / "rollout_{rollout_id}.jsonl")),
        folder=tmp_path,
    )
    assert run.finish() == 0, run.output
    groups = [g for i in range(ROLLOUTS) for g in load_groups(tmp_path / f"rollout_{i}.jsonl")]
    samples = [s for g in groups for s in g.samples]
    assert len(samples) == ROLLOUTS * 8 * 4
    for sample in samples:
        drawn = longtail.response_length(sample.prompt.prompt_id, sample.index, mean=MEAN, spread=1.5)
        assert len(sample.tokens) == min(max(drawn, ANSWER), CAP), sample.name
        trained = sum(sample.loss_mask)
        assert 1 <= trained <= ANSWER
        assert sample.loss_mask == [1] * trained + [0] * (len(sample.tokens) - trained)
    interrupted = [s for s in samples if s.aborted_count]
    assert interrupted, "short responses end the rollouts, so that long ones are interrupted"
    assert any(len(set(s.versions)) > 1 for s in interrupted)
    steps = run.steps()
    assert sum(row["rollout/kept_tokens"] for row in steps) > 0
    assert max(row["staleness/max"] for row in steps) <= 4
    assert run.survivors() == []
