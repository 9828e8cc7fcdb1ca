"""The example with pictures: learnt beyond what text alone can reach, resumed with another layout, exported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shapes"
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
FIRST, LAST = 12, 14
"""Rollouts of the first launch, and of both."""


def test_a_run_learns_to_look_and_goes_on_with_other_sizes(relax: Callable[..., Any], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    command = [sys.executable, str(EXAMPLE / "make_task.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (tmp_path / "train.toml").write_text((EXAMPLE / "train.toml").read_text())
    metrics: list[dict[str, Any]] = []
    resumed = ["--load", "checkpoints", "--tensor-model-parallel-size", "2"]
    for number, more in ((FIRST, ["--mm-processor-pool-size", "1"]), (LAST, resumed)):
        words = ["--num-rollout", str(number), "--no-freeze-vision-model", "--tb-experiment-name", f"run{number}"]
        saves = ["--save", "checkpoints", "--save-hf", "hf_{rollout_id}", "--eval-interval", "100"]
        run = relax("train", "--config", "train.toml", *words, *saves, *more)
        assert run.finish() == 0, run.output
        assert run.survivors() == []
        lines = (tmp_path / "runs" / f"run{number}" / "metrics.jsonl").read_text().splitlines()
        metrics += [m for m in map(json.loads, lines) if "time/step" in m]
    assert [m["step"] for m in metrics] == list(range(LAST))
    # The engine's tower gets what was trained too, and the engine computes what the trainer does after every push.
    assert max(m["train/logprob_diff_max"] for m in metrics) < 1e-4
    rewards = [m["rollout/reward"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > 0.6, f"text alone is right in a quarter of the cases: {rewards}"

    last: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        tmp_path / f"hf_{LAST - 1}", dtype=torch.float32, output_loading_info=True
    )
    model, info = last
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    again, exported, start = (
        load_file(tmp_path / name / "model.safetensors") for name in ("again", f"hf_{LAST - 1}", "model")
    )
    assert set(again) == set(exported) == set(start)
    assert all(torch.equal(again[name], exported[name]) for name in exported)
    assert not torch.equal(exported["visual.merger.mlp.2.weight"], start["visual.merger.mlp.2.weight"])
