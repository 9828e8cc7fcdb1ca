"""The example with pictures: learnt beyond what text alone can reach, resumed with another layout, exported."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.test_e2e_loop import documented_metrics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shapes"
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
FIRST, LAST = 12, 14
"""Rollouts of the first launch, and of both."""


def make_task(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_task.py"), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "train.toml").write_text((EXAMPLE / "train.toml").read_text())


def test_a_run_learns_to_look_and_goes_on_with_other_sizes(relax: Callable[..., Any], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen2_5_VLForConditionalGeneration

    make_task(tmp_path)
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
    assert {m["data/processor_s"] for m in metrics} == {0.0}, "all pictures were read before the first step"
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


def test_pictures_go_through_the_queue_of_the_fully_async_mode(relax: Callable[..., Any], tmp_path: Path) -> None:
    """Without staleness engine and trainer agree on every token, also after pushes; then it goes on with staleness."""
    make_task(tmp_path)
    where = [
        "--fully-async",
        "--use-streaming-dataset",
        "--save",
        "checkpoints",
        "--load",
        "checkpoints",
        "--eval-interval",
        "100",
    ]
    sizes = ["--rollout-batch-size", "8", "--global-batch-size", "32", "--tensor-model-parallel-size", "2"]
    for number, staleness in ((3, "0"), (5, "1")):
        name = f"run{number}"
        words = ["--num-rollout", str(number), "--max-staleness", staleness, "--tb-experiment-name", name]
        run = relax("train", "--config", "train.toml", *where, *sizes, *words)
        assert run.finish() == 0, run.output
        assert run.survivors() == []
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [m for m in map(json.loads, lines) if "time/step" in m]
        assert [m["step"] for m in steps] == list(range(number - len(steps), number))
        assert max(m["staleness/max"] for m in steps) <= int(staleness)
        assert min(m["plane/rows"] for m in steps) >= 8 * 8
        assert max(m["data/processor_s"] for m in steps) > 0
        assert {name for m in steps for name in m} <= documented_metrics() | {"step", "time", "histograms"}
        if staleness == "0":
            assert len(steps) == 3
            assert max(m["train/logprob_diff_max"] for m in steps) < 1e-4
        else:
            assert len(steps) == 2
