"""The whole loop: Ray, SGLang, megatron-core, weight updates; resume after a kill; nothing left behind."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_cli.run.debug_data import load_groups
from relax_data.prompts.saved_groups import SAMPLES_FILE, read_arrays

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 10

# Exact match. While the file of HELD_REWARD is there, the seventh rollout (four prompts each) waits for its rewards.
REWARD = """
import asyncio, os

async def reward(sample):
    while sample.prompt.prompt_id >= 24 and os.path.exists(os.environ.get("HELD_REWARD", "")):
        await asyncio.sleep(0.05)
    return float(sample.response.strip() == sample.prompt.label)
"""


def prompts_by_rollout(folder: Path) -> dict[int, list[int]]:
    """Ids of the prompts of each saved rollout."""
    found = {}
    for path in folder.glob("rollout_*.jsonl"):
        found[int(path.stem.removeprefix("rollout_"))] = [g.prompt.prompt_id for g in load_groups(path)]
    return found


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors, f"no weights in {folder}"
    return tensors


def test_ten_steps_equal_five_a_kill_and_five(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    """Invariants 1 and 6 over a real run, and everything a run writes."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    held = tmp_path / "held"
    held.touch()

    def flags(name: str, **changes: Any) -> list[str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        # Greedy responses to one prompt are equal, so their advantages are zero: the entropy bonus moves the weights.
        return task.flags(
            num_rollout=STEPS,
            rm_type=None,
            custom_rm_path=f"{tmp_path}/my_reward.py:reward",
            rollout_temperature=0,
            entropy_coef=0.01,
            rollout_shuffle=True,
            save=folder / "checkpoints",
            save_interval=5,
            save_hf=folder / "hf_{rollout_id}",
            save_debug_rollout_data=folder / "rollout_{rollout_id}.jsonl",
            **changes,
        )

    straight = relax(
        "train",
        *flags("straight", eval_interval=5, eval_prompt_data=["heldout", task.heldout]),
        folder=mkdir(tmp_path / "a"),
    )
    assert straight.finish() == 0, straight.output
    assert straight.survivors() == []
    check_artifacts(straight)

    killed = relax("train", *flags("parts"), folder=mkdir(tmp_path / "b"), env={"HELD_REWARD": str(held)})
    killed.wait_for(lambda: len(killed.steps()) >= 6, "sixth step")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    assert killed.survivors() == [], "processes outlive a killed driver"

    resumed = relax("train", *flags("parts", load=tmp_path / "parts" / "checkpoints"), folder=mkdir(tmp_path / "c"))
    assert resumed.finish() == 0, resumed.output
    assert "resumed from rollout 4" in resumed.output
    assert [m["step"] for m in resumed.steps()] == list(range(5, STEPS)), "rollout ids are absolute"

    one, two = prompts_by_rollout(tmp_path / "straight"), prompts_by_rollout(tmp_path / "parts")
    assert sorted(one) == list(range(STEPS))
    assert one == two, "a resumed run takes the same prompts in the same order"
    in_order = [prompt_id for rollout_id in range(STEPS) for prompt_id in one[rollout_id]]
    assert in_order == list(range(len(in_order))), "every prompt once"

    first, last = weights(task.model), weights(tmp_path / "straight" / f"hf_{STEPS - 1}")
    again = weights(tmp_path / "parts" / f"hf_{STEPS - 1}")
    assert max((last[k] - first[k]).abs().max().item() for k in first) > 1e-4, "training changed the weights"
    assert max((last[k] - again[k]).abs().max().item() for k in last) <= 1e-5


def test_a_killed_run_goes_on_with_the_tokens_of_interrupted_samples(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """Over-sampling leaves responses half done; they are in the checkpoint, and every prompt is trained once."""
    prompts, batch = 24, 2
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:prompts]))
    checkpoints = tmp_path / "checkpoints"
    flags = task.flags(
        prompt_data=data,
        num_rollout=None,
        num_epoch=1,
        rollout_batch_size=batch,
        over_sampling_batch_size=3 * batch,
        partial_rollout=True,
        max_staleness=2,
        rollout_max_response_len=48,
        sglang_server_concurrency=5,  # groups start one after the other, so that they do not end together
        save=checkpoints,
        load=checkpoints,
        save_interval=1,
        save_debug_rollout_data=tmp_path / "rollout_{rollout_id}.jsonl",
    )
    killed = relax("train", *flags, folder=mkdir(tmp_path / "run"))
    killed.wait_for(lambda: len(killed.steps()) >= 5, "fifth step")
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    assert killed.survivors() == [], "processes outlive a killed driver"
    kept = [tokens for folder in checkpoints.glob("rollout_*[0-9]") for tokens in half_done(folder)]
    assert sum(kept) > 0, "responses were interrupted"

    resumed = relax("train", *flags, folder=tmp_path / "run")
    assert resumed.finish() == 0, resumed.output
    assert "resumed from rollout" in resumed.output
    steps = resumed.steps()
    assert [m["step"] for m in steps] == list(range(prompts // batch)), "no step is missing, none is there twice"
    assert max(m["staleness/max"] for m in steps) <= 2
    trained = [i for prompt_ids in prompts_by_rollout(tmp_path).values() for i in prompt_ids]
    assert sorted(trained) == list(range(prompts)), "every prompt once"
    for path in tmp_path.glob("rollout_*.jsonl"):
        for sample in (s for g in load_groups(path) for s in g.samples):
            assert len(sample.tokens) <= 48
            assert sample.versions == sorted(sample.versions)
    assert resumed.survivors() == []


def half_done(checkpoint: Path) -> list[int]:
    """Tokens of each unfinished sample in a checkpoint."""
    arrays = read_arrays((checkpoint / SAMPLES_FILE).read_bytes())
    return [int(n) for n, status in zip(np.diff(arrays["offsets"]), arrays["status"], strict=True) if status == 0]


def mkdir(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def check_artifacts(run: Any) -> None:
    """Everything a finished run leaves for its user."""
    folder = run.folder / "runs" / "run"
    for name in ("summary.json", "metrics.jsonl", "reward.png", "config.toml"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").glob("events*"))
    for name in ("driver", "engine0", "rollout", "trainer_rank0"):
        assert (folder / "logs" / f"{name}.log").exists(), name
    steps = run.steps()
    assert [m["step"] for m in steps] == list(range(STEPS))
    for m in steps:
        # Invariant 6: greedy tokens, so the engine's log-probs are those of temperature 1 on both sides.
        assert m["staleness/max"] == 0
        for phase in ("generate", "train", "weight_update"):
            assert m[f"time/{phase}"] > 0, phase
    assert any("eval/heldout/reward" in m for m in run.metrics())
    assert run.output.count("step ") >= STEPS
    assert "\x1b[" not in run.output, "plain lines when the output is not a terminal"
    assert "Summary" in run.output
    assert str(folder) in run.output


def test_the_example_runs_as_it_is_shipped(relax: Callable[..., Any], tmp_path: Path) -> None:
    """The short form of the README's main job, from another folder."""
    example = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "smoke.toml"
    run = relax("train", "--config", str(example), "--tb-experiment-name", "run")
    assert run.finish() == 0, run.output
    assert len(run.steps()) == 4
    evals = [m["eval/heldout/reward"] for m in run.metrics() if "eval/heldout/reward" in m]
    assert 0 < evals[0] < 0.7, "the start model is right now and then"
    assert max(m["train/logprob_diff_max"] for m in run.steps()) < 1e-4
    assert {name for m in run.metrics() for name in m} <= documented_metrics() | {"step", "time", "histograms"}
    assert run.survivors() == []


def documented_metrics() -> set[str]:
    """The names in the README's table; one without a group belongs to that of the name before it."""
    readme = (Path(__file__).resolve().parents[2] / "packages" / "relax-cli" / "README.md").read_text(encoding="utf-8")
    names: set[str] = set()
    for row in readme.split("## Metrics")[1].split("## From Python")[0].splitlines():
        group = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1] if row.startswith("| `") else ""):
            group, name = name.rsplit("/", 1) if re.match(r"\w+/[^/]+$", name) else (group, name)
            names.add(f"{group}/{name}")
    return names | {f"eval/heldout/{n.removeprefix('rollout/')}" for n in names if n.startswith("rollout/")}
