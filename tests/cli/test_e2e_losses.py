"""An engine of a run that is killed: it comes back and no prompt is lost; or it ends the run, with its last words."""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_gate import Gate, underway
from relax_cli.run.debug_data import load_groups

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]


def kill_in_mid_response(run: Any, gate: Gate, find: Callable[[], psutil.Process]) -> None:
    """Kills -9 a process while requests run at the engine."""
    gate.close()
    words = run.find_server().cmdline()
    key = (run.folder / "runs" / "run" / "engine_key").read_text().strip()
    asyncio.run(underway(f"http://127.0.0.1:{words[words.index('--port') + 1]}", 1, key))
    find().kill()
    gate.open()


def gated(relax: Callable[..., Any], gate: Gate, *words: str) -> Any:
    hooks = [w for name, value in gate.options().items() for w in (f"--sglang-{name}", str(value))]
    with gate.importable():
        return relax("train", *words, *hooks)


def test_the_only_engine_is_killed_twice_and_a_signal_ends_the_run(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """Its server, then the whole actor that owns it, both in mid-response; no prompt is lost.

    SIGTERM, as of batch systems and `timeout`, finishes the step then and saves it, although none was due.
    """
    gate = Gate(tmp_path)
    run = gated(
        relax,
        gate,
        *task.flags(
            num_rollout=10**6,
            save=tmp_path / "checkpoints",
            rollout_max_response_len=60,
            rollout_temperature=0,
            entropy_coef=0.01,
            max_tokens_per_gpu=2048,
            save_debug_rollout_data=tmp_path / "rollout_{rollout_id}.jsonl",
        ),
    )
    run.wait_for(lambda: len(run.steps()) >= 1, "first step")
    kill_in_mid_response(run, gate, run.find_server)
    run.wait_for(lambda: "engine0 joined" in run.output, "the engine to come back")
    steps = len(run.steps())
    run.wait_for(lambda: len(run.steps()) > steps, "a step with the engine that came back")
    kill_in_mid_response(run, gate, lambda: run.find_actor("EngineActor"))
    steps = len(run.steps())
    run.wait_for(lambda: run.output.count("engine0 joined") == 2, "the engine to come back again")
    run.wait_for(lambda: len(run.steps()) > steps + 1, "steps with the engine that came back again")
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.finish() == 128 + signal.SIGTERM, run.output
    assert "SIGTERM" in run.output
    assert "Summary" in run.output
    steps = run.steps()
    done = len(steps)
    assert [m["step"] for m in steps] == list(range(done))
    assert [p.name for p in (tmp_path / "checkpoints").glob("rollout_*")] == [f"rollout_{done - 1}"]
    for restart in (1, 2):
        assert f"restarting it, {restart} of 3; its requests wait for it" in run.output
    assert run.output.count("engine0 joined with the weights of version") == 2
    rollouts = [load_groups(tmp_path / f"rollout_{i}.jsonl") for i in range(done)]
    ids = [g.prompt.prompt_id for groups in rollouts for g in groups]
    assert ids == list(range(4 * done)), "every prompt once, in order"
    for rollout_id, groups in enumerate(rollouts):
        assert {v for g in groups for s in g.samples for v in s.versions} == {rollout_id}
    # The weights of the trainer, and not those that its server starts with.
    assert max(m["train/logprob_diff_max"] for m in steps) < 1e-4
    assert (steps[-1]["engines/restarts"], steps[-1]["engines/serving"]) == (2, 1)
    assert steps[-1]["prompts/trained"] + steps[-1]["prompts/out"] == 4 * done
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
    kill_in_mid_response(run, gate, run.find_server)
    assert run.finish() == 1, run.output
    assert "after 3 restarts it is out for good" in run.output
    assert "EngineDied: no engine is left after 3 restarts each. engine0 ended with exit code" in run.output
    assert "Last lines of" in run.output
    assert str(model) in run.output.split("FAILED")[1], "SGLang's own reason"
    assert run.survivors() == []
