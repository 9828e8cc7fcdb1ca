"""The whole loop: Ray, SGLang, megatron-core, weight updates; resume after a kill; nothing left behind."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_cli.run.debug_data import load_groups
from relax_data.prompts.saved_groups import SAMPLES_FILE, read_arrays

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 6

# Not equal for all prompts, so that greedy responses have advantages too. Prompts from the number on that the file of
# HELD_REWARD holds get no reward before it holds a larger one, or is gone: steps go on up to where they are needed.
REWARD = """
import asyncio, os

def held():
    try:
        with open(os.environ.get("HELD_REWARD", "")) as file:
            return int(file.read())
    except FileNotFoundError:
        return 10**9

async def reward(sample):
    if sample.prompt.prompt_id >= held():
        with open(os.environ["HELD_REWARD"] + ".waiting", "a") as file:
            file.write("one\\n")
    while sample.prompt.prompt_id >= held():
        await asyncio.sleep(0.05)
    return float(sample.response.strip() == sample.prompt.label) + sample.prompt.prompt_id % 3
"""

ALL_PROFILERS = {
    "sglang_profile": True,
    "sglang_profile_steps": 1,
    "use_pytorch_profiler": True,
    "profile_step_start": 1,
    "profile_step_end": 1,
    "record_memory_history": True,
    "memory_recorder": "memray",
    "memory_snapshot_num_steps": 2,
}


def hold_from(file: Path, prompt_id: int) -> None:
    """Lets prompts from this one on wait for their rewards."""
    new = file.with_suffix(".new")
    new.write_text(str(prompt_id))
    new.rename(file)


def waiting(file: Path) -> int:
    """Samples that have waited, or wait, for their rewards: they are generated."""
    name = file.with_name(file.name + ".waiting")
    return len(name.read_text().splitlines()) if name.exists() else 0


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


def test_six_steps_equal_three_a_kill_and_three(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    """Invariants 1, 6 and 12 over a real run, and everything a run writes; then only the trainer, on its rollouts."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    held = tmp_path / "held"
    hold_from(held, 16)  # the fifth rollout, of four prompts each, is the first that waits

    # REINFORCE++ compares all samples of a step: greedy responses to one prompt are equal.
    learning = {"rollout_temperature": 0, "entropy_coef": 0.01, "advantage_estimator": "reinforce_plus_plus"}

    def flags(name: str, **changes: Any) -> list[str]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return task.flags(
            num_rollout=STEPS,
            rm_type=None,
            custom_rm_path=f"{tmp_path}/my_reward.py:reward",
            rollout_shuffle=True,
            save=folder / "checkpoints",
            save_interval=3,
            save_hf=folder / "hf_{rollout_id}",
            save_debug_rollout_data=folder / "rollout_{rollout_id}.jsonl",
            **learning,
            **changes,
        )

    straight = relax(
        "train",
        *flags("straight", eval_interval=3, eval_prompt_data=["heldout", task.heldout], **ALL_PROFILERS),
        folder=mkdir(tmp_path / "a"),
    )
    assert straight.finish() == 0, straight.output
    assert straight.survivors() == []
    check_artifacts(straight)
    check_traces(straight.folder / "traces" / "run")

    killed = relax("train", *flags("parts"), folder=mkdir(tmp_path / "b"), env={"HELD_REWARD": str(held)})
    killed.wait_for(lambda: len(killed.steps()) >= 4, "fourth step")
    # A push that meets an engine that is stopped says so, and goes on with it when it does.
    killed.wait_for(lambda: waiting(held) == 8, "the responses of the fifth rollout")
    killed.find_server().suspend()
    hold_from(held, 20)
    killed.wait_for(lambda: "engines: engine0 does not answer" in killed.output, "a word about the engine")
    killed.find_server().resume()
    killed.wait_for(lambda: waiting(held) == 16, "the responses of the sixth rollout")
    killed.kill()

    resumed = relax("train", *flags("parts", load=tmp_path / "parts" / "checkpoints"), folder=mkdir(tmp_path / "c"))
    assert resumed.finish() == 0, resumed.output
    assert "resumed from rollout 2" in resumed.output
    assert [m["step"] for m in resumed.steps()] == list(range(3, STEPS)), "rollout ids are absolute"
    for whole, part in zip(straight.steps(), killed.steps()[:3] + resumed.steps(), strict=True):
        assert comparable(part) == pytest.approx(comparable(whole), rel=1e-6, abs=1e-6)

    one, two = prompts_by_rollout(tmp_path / "straight"), prompts_by_rollout(tmp_path / "parts")
    assert sorted(one) == list(range(STEPS))
    assert one == two, "a resumed run takes the same prompts in the same order"
    in_order = [prompt_id for rollout_id in range(STEPS) for prompt_id in one[rollout_id]]
    assert in_order == list(range(len(in_order))), "every prompt once"

    first, last = weights(task.model), weights(tmp_path / "straight" / f"hf_{STEPS - 1}")
    again = weights(tmp_path / "parts" / f"hf_{STEPS - 1}")
    assert max((last[k] - first[k]).abs().max().item() for k in first) > 1e-4, "training changed the weights"
    assert max((last[k] - again[k]).abs().max().item() for k in last) <= 1e-5

    trained = relax(
        "train",
        *task.flags(
            num_rollout=STEPS,
            load_debug_rollout_data=tmp_path / "straight" / "rollout_{rollout_id}.jsonl",
            debug_train_only=True,
            **learning,
        ),
        folder=mkdir(tmp_path / "d"),
    )
    assert trained.finish() == 0, trained.output
    assert not (trained.folder / "runs" / "run" / "logs" / "engine0.log").exists(), "needs no engine"
    for a, b in zip(straight.steps(), trained.steps(), strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], abs=1e-6)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-4)


def comparable(step: dict[str, Any]) -> dict[str, float]:
    """The metrics of a step that do not say how long something took, nor by how much engine and trainer differ."""
    found = {k: v for k, v in step.items() if k.partition("/")[0] in ("train", "rollout", "staleness", "prompts")}
    assert {"train/loss", "train/grad_norm", "rollout/reward"} <= set(found), sorted(found)
    return {k: v for k, v in found.items() if not re.search(r"seconds|_per_s|_s$|logprob_diff", k)}


def check_traces(folder: Path) -> None:
    """The three profilers at once give exactly this tree."""
    patterns = {
        "sglang_trace": r"rollout_1/engine0-\d{10}-TP-0\.trace\.json\.gz",
        "train_trace": r"train_overall_rank0_dp0_tp0_pp0\.\d{10}\.pt\.trace\.json\.gz",
        "memory_snapshot": r"memory_snapshot_time\d{10}_rank0_dp0_tp0_pp0_snapshot\.bin",
    }
    assert sorted(p.name for p in folder.iterdir()) == sorted(patterns)
    for name, pattern in patterns.items():
        files = [p for p in (folder / name).rglob("*") if p.is_file()]
        assert len(files) == 1, files
        assert re.fullmatch(pattern, str(files[0].relative_to(folder / name))), files
        assert files[0].stat().st_size > 0


def test_an_epoch_of_interrupted_samples_outlives_a_rank_and_the_rollout_worker(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """Over-sampling leaves responses half done; they are in the checkpoint, and every prompt is trained once.

    A trainer rank that dies, and a rollout worker that does, each end the run with a name; the last checkpoint stands.
    """
    prompts, batch, staleness = 32, 2, 2
    most_open = batch * (staleness + 1)
    data, held, checkpoints = tmp_path / "prompts.jsonl", tmp_path / "held", tmp_path / "checkpoints"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:prompts]))
    (tmp_path / "my_reward.py").write_text(REWARD)
    flags = task.flags(
        prompt_data=data,
        num_rollout=None,
        num_epoch=1,
        rm_type=None,
        custom_rm_path=f"{tmp_path}/my_reward.py:reward",
        rollout_batch_size=batch,
        over_sampling_batch_size=most_open,
        partial_rollout=True,
        max_staleness=staleness,
        rollout_max_response_len=48,
        sglang_server_concurrency=5,  # groups start one after the other, so that they do not end together
        save=checkpoints,
        load=checkpoints,
        save_interval=1,
        save_debug_rollout_data=tmp_path / "rollout_{rollout_id}.jsonl",
    )
    folder, kept = mkdir(tmp_path / "run"), []
    for steps, actor, says in (
        (4, "TrainActor", "That process was trainer rank 0; see its log trainer_rank0.log."),
        (8, "RolloutActor", "That process was the rollout worker; see its log rollout.log."),
    ):
        # At its beginning step `n`, from 0, has opened `most_open + batch * n` prompts: `steps` steps go by without
        # one that is held.
        hold_from(held, most_open + batch * (steps - 1))
        run = relax("train", *flags, folder=folder, env={"HELD_REWARD": str(held)})
        run.wait_for(lambda run=run, steps=steps: len(run.steps()) >= steps, f"step {steps}")
        process = run.find_actor(actor)
        process.kill()
        hold_from(held, prompts)
        assert run.finish() == 1, run.output
        assert says in run.output
        assert run.survivors() == []
        kept += [tokens for saved in checkpoints.glob("rollout_*[0-9]") for tokens in half_done(saved)]
    assert sum(kept) > 0, "responses were interrupted"

    resumed = relax("train", *flags, folder=folder)
    assert resumed.finish() == 0, resumed.output
    assert "resumed from rollout" in resumed.output
    steps = resumed.steps()
    assert [m["step"] for m in steps] == list(range(prompts // batch)), "no step is missing, none is there twice"
    assert max(m["staleness/max"] for m in steps) <= staleness
    assert max(m["rollout/open_groups"] for m in steps) <= most_open, "also in the first step of a resume"
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
        assert m["train/logprob_diff_max"] < 1e-4
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
