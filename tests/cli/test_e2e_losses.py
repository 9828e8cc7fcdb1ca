"""Processes of a run that are killed: an engine comes back and no prompt is lost; another ends the run and is named."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_gate import Gate, underway
from relax_cli.run.debug_data import load_groups

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 6


def is_server(process: psutil.Process) -> bool:
    words = process.cmdline()  # unlike its supervisor's, which has the command as arguments
    return words[1:3] == ["-m", "sglang.launch_server"]


def is_actor(name: str) -> Callable[[psutil.Process], bool]:
    return lambda process: process.cmdline()[:1] == [f"ray::{name}"] or process.name().startswith(f"ray::{name}")


def find(run: Any, wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
    run.look()
    found = [p for p in run.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE and wanted(p)]
    assert len(found) == 1, found
    return found[0]


def kill_in_mid_response(run: Any, gate: Gate, wanted: Callable[[psutil.Process], bool]) -> None:
    """Kills -9 a process while requests run at the engine."""
    gate.close()
    words = find(run, is_server).cmdline()
    asyncio.run(underway(f"http://127.0.0.1:{words[words.index('--port') + 1]}", 1))
    find(run, wanted).kill()
    gate.open()


def gated(relax: Callable[..., Any], gate: Gate, *words: str) -> Any:
    hooks = [w for name, value in gate.options().items() for w in (f"--sglang-{name}", str(value))]
    with gate.importable():
        return relax("train", *words, *hooks)


def test_the_only_engine_is_killed_twice_and_no_prompt_is_lost(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """Its server, then the whole actor that owns it, both in mid-response."""
    gate = Gate(tmp_path)
    run = gated(
        relax,
        gate,
        *task.flags(
            num_rollout=STEPS,
            rollout_max_response_len=60,
            rollout_temperature=0,
            entropy_coef=0.01,
            max_tokens_per_gpu=2048,
            save_debug_rollout_data=tmp_path / "rollout_{rollout_id}.jsonl",
        ),
    )
    run.wait_for(lambda: len(run.steps()) >= 1, "first step")
    kill_in_mid_response(run, gate, is_server)
    run.wait_for(lambda: "engine0 joined" in run.output, "the engine to come back")
    steps = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > steps, "a step with the engine that came back")
    kill_in_mid_response(run, gate, is_actor("EngineActor"))
    assert run.finish() == 0, run.output
    for restart in (1, 2):
        assert f"restarting it, {restart} of 3; its requests wait for it" in run.output
    assert run.output.count("engine0 joined with the weights of version") == 2
    rollouts = [load_groups(tmp_path / f"rollout_{i}.jsonl") for i in range(STEPS)]
    ids = [g.prompt.prompt_id for groups in rollouts for g in groups]
    assert ids == list(range(4 * STEPS)), "every prompt once, in order"
    for rollout_id, groups in enumerate(rollouts):
        assert {v for g in groups for s in g.samples for v in s.versions} == {rollout_id}
    steps = run.steps()
    assert [m["step"] for m in steps] == list(range(STEPS))
    # The weights of the trainer, and not those that its server starts with.
    assert max(m["train/logprob_diff_max"] for m in steps) < 1e-4
    assert (steps[-1]["engines/restarts"], steps[-1]["engines/serving"]) == (2, 1)
    assert steps[-1]["prompts/trained"] + steps[-1]["prompts/out"] == 4 * STEPS
    assert run.survivors() == []


def test_an_engine_that_cannot_be_restarted_ends_the_run_with_its_last_words(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    model = shutil.copytree(task.model, tmp_path / "model")
    words = task.flags(hf_checkpoint=model, num_rollout=10**6, rollout_max_response_len=200, debug_rollout_only=True)
    run = gated(relax, gate, *words)
    run.wait_for(lambda: len(run.steps()) >= 1, "first step")
    (model / "config.json").unlink()
    kill_in_mid_response(run, gate, is_server)
    assert run.finish() == 1, run.output
    assert "after 3 restarts it is out for good" in run.output
    assert "EngineDied: no engine is left after 3 restarts each. engine0 ended with exit code" in run.output
    assert "Last lines of" in run.output
    assert str(model) in run.output.split("FAILED")[1], "SGLang's own reason"
    assert run.survivors() == []


def test_a_trainer_rank_that_dies_ends_the_run_and_the_last_checkpoint_stands(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    flags = task.flags(num_rollout=10**6, save=tmp_path / "checkpoints", save_interval=2)
    run = relax("train", *flags)
    run.wait_for(lambda: len(run.steps()) >= 3, "third step")
    find(run, is_actor("TrainActor")).kill()
    assert run.finish() == 1, run.output
    assert "That process was trainer rank 0; see its log trainer_rank0.log." in run.output
    assert run.survivors() == []
    done = run.steps()[-1]["step"]
    again = relax("train", *task.flags(num_rollout=done + 2, load=tmp_path / "checkpoints"))
    assert again.finish() == 0, again.output
    assert "resumed from rollout" in again.output
    assert again.steps()[-1]["step"] == done + 1
    assert again.survivors() == []


def test_a_rollout_worker_that_dies_ends_the_run(task: Any, relax: Callable[..., Any]) -> None:
    run = relax("train", *task.flags(num_rollout=10**6))
    run.wait_for(lambda: len(run.steps()) >= 1, "first step")
    find(run, is_actor("RolloutActor")).kill()
    assert run.finish() == 1, run.output
    assert "That process was the rollout worker; see its log rollout.log." in run.output
    assert run.survivors() == []
