"""The fully-async mode as it is: Ray, SGLang and the trainer at work at the same time."""

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import relax_profiling
from cli.test_e2e_loop import documented_metrics, weights
from cli.test_e2e_losses import gated, kill_in_mid_response
from engine_gate import Gate
from relax_data.prompts.saved_groups import SAMPLES_FILE, read_arrays
from relax_profiling.timeline.shares import WAITS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

BUCKET_BYTES = 64 << 10
"""So few that the tiny model is sent in three buckets or more."""


def test_without_staleness_it_equals_colocate(task: Any, relax: Callable[..., Any], tmp_path: Path) -> None:
    """Greedy, float32: the same prompts, responses, losses and weights after three steps."""
    runs = {}
    for mode, words in (("colocate", []), ("async", ["--fully-async", "--max-staleness", "0"])):
        folder = tmp_path / mode
        folder.mkdir()
        # Greedy responses to one prompt are equal, so their advantages are zero: the entropy bonus moves the weights.
        flags = task.flags(
            num_rollout=3,
            rollout_temperature=0,
            entropy_coef=0.01,
            rollout_shuffle=True,
            eval_interval=3,
            eval_prompt_data=["heldout", task.heldout],
            save_hf=folder / "hf_{rollout_id}",
        )
        run = relax("train", *flags, *words, folder=folder)
        assert run.finish() == 0, run.output
        assert run.survivors() == []
        runs[mode] = run
    check_timeline(runs["async"])
    check_turns(runs["colocate"])
    one, two = runs["colocate"].steps(), runs["async"].steps()
    assert [m["step"] for m in two] == [0, 1, 2]
    same = ("rollout/reward", "rollout/response_length", "train/loss", "train/entropy", "train/grad_norm")
    for a, b in zip(one, two, strict=True):
        assert b["staleness/max"] == 0
        assert b["histograms"] == a["histograms"]
        assert [b[name] for name in same] == pytest.approx([a[name] for name in same], abs=1e-6)
        assert b["train/logprob_diff_max"] < 1e-4
    for a, b in zip(evals(runs["colocate"]), evals(runs["async"]), strict=True):
        assert a == b
    start, last, other = (weights(p) for p in (task.model, tmp_path / "colocate" / "hf_2", tmp_path / "async" / "hf_2"))
    assert max((last[k] - start[k]).abs().max().item() for k in last) > 1e-4, "training changed the weights"
    assert max((last[k] - other[k]).abs().max().item() for k in last) <= 1e-6


def evals(run: Any) -> list[tuple[int, float]]:
    return [(m["step"], m["eval/heldout/reward"]) for m in run.metrics() if "eval/heldout/reward" in m]


def check_timeline(run: Any) -> None:
    """The report shows every step, with the shares that the metrics have."""
    report = relax_profiling.analyze(run.folder / "runs" / "run")
    assert report.problems == []
    (timeline,) = report.timelines
    assert [step.step for step in timeline.steps] == [m["step"] for m in run.steps()]
    for step, m in zip(timeline.steps, run.steps(), strict=True):
        assert step.seconds == pytest.approx(m["time/step"], abs=1e-5)
        assert step.spent(*WAITS) / step.seconds == pytest.approx(m["async/trainer_idle_share"], abs=0.02)
        for state in ("busy", "idle", "paused"):
            assert step.engines["engine0"].share(state) == pytest.approx(m[f"async/engine_{state}_share"], abs=1e-4)
        # An engine's time ends with the samples of the step, which the driver has before it trains.
        taken = max(end for name, _, end in step.phases if name == "wait_for_rollout")
        assert step.engines["engine0"].intervals[-1][2] <= taken + 0.5


def check_turns(run: Any) -> None:
    """With colocate the engine is busy in its turn, and only then."""
    (timeline,) = relax_profiling.analyze(run.folder / "runs" / "run").timelines
    for step, m in zip(timeline.steps, run.steps(), strict=True):
        assert step.spent("generate") == pytest.approx(m["time/generate"], abs=0.01), (
            "nothing else was written meanwhile"
        )
        turns = step.spent("generate", "eval")
        assert 0 < step.engines["engine0"].seconds["busy"] <= turns + 0.01
        assert step.spent("train_step") > 0


def open_samples(checkpoint: Path) -> int:
    """Samples of open groups in a checkpoint: whole or interrupted, as the speeds of engine and trainer have it."""
    return len(read_arrays((checkpoint / SAMPLES_FILE).read_bytes())["status"])


def test_it_is_killed_stopped_and_goes_on_in_the_other_mode(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """Every prompt of the data is trained once, over two kinds of kill -9, a SIGTERM and a change to colocate."""
    prompts, batch = 40, 2
    data, checkpoints, folder = tmp_path / "prompts.jsonl", tmp_path / "checkpoints", tmp_path / "run"
    data.write_text("".join(task.train.read_text().splitlines(keepends=True)[:prompts]))
    folder.mkdir()
    common: dict[str, Any] = {
        "prompt_data": data,
        "num_rollout": None,
        "num_epoch": 1,
        "rollout_batch_size": batch,
        "rollout_max_response_len": 48,
        "sglang_server_concurrency": 5,  # groups start one after the other, so that they do not end together
        "save": checkpoints,
        "load": checkpoints,
        "max_staleness": 2,
    }
    # The engine of this task ends a response at once when it likes to: only a slow one is interrupted for certain.
    background = task.flags(
        **common,
        fully_async=True,
        save_interval=1,
        eval_interval=4,
        eval_prompt_data=["heldout", task.heldout],
        over_sampling_batch_size=3 * batch,
    )
    killed = relax("train", *background, folder=folder)
    killed.wait_for(lambda: len(killed.steps()) >= 5, "fifth step")
    killed.kill()

    broken = relax("train", *background, "--num-data-storage-units", "2", folder=folder)
    before = len(broken.steps())
    broken.wait_for(lambda: "resumed from rollout" in broken.output and len(broken.steps()) > before, "another step")
    units = [p for p in broken.seen if p.is_running() and "SimpleStorageUnit" in " ".join(p.cmdline())]
    assert len(units) == 2
    units[0].kill()
    assert broken.finish(deadline_s=120) == 1, broken.output
    assert re.search(r"FAILED PlaneFailed: .*TransferQueueStorageUnit#\d has died", broken.output)
    assert broken.survivors() == []

    stopped = relax("train", *background, folder=folder)
    before = len(stopped.steps())
    stopped.wait_for(lambda: "resumed from rollout" in stopped.output and len(stopped.steps()) >= before + 2, "steps")
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.finish() == 128 + signal.SIGTERM, stopped.output
    assert stopped.survivors() == []
    assert all(open_samples(saved) for saved in checkpoints.glob("rollout_*[0-9]")), "groups were open"

    words = task.flags(**common, partial_rollout=True, over_sampling_batch_size=3 * batch)
    last = relax("train", *words, folder=folder)
    assert last.finish() == 0, last.output
    first = re.search(r"resumed from rollout (\d+)", last.output)
    assert first is not None
    done = [m["step"] for m in stopped.steps() if m["step"] <= int(first[1])]
    assert done[-1] == int(first[1]), "the stop saved the last finished step"
    steps = last.steps()
    assert [m["step"] for m in steps] == list(range(prompts // batch)), "no step is missing, none is there twice"
    assert max(m["staleness/max"] for m in steps) <= 2
    assert any(m["staleness/max"] > 0 for m in steps), "generation went on while steps trained"
    assert steps[-1]["prompts/trained"] + batch == prompts, "the metrics are of the moment before the last step"
    for m in steps[: int(first[1])]:
        shares = [m[f"async/engine_{kind}_share"] for kind in ("busy", "idle", "paused")]
        assert sum(shares) == pytest.approx(1.0)
        assert 0 <= m["async/trainer_idle_share"] <= 1
    assert last.survivors() == []


def test_engine_and_trainer_are_killed_in_the_middle_and_every_prompt_is_trained_once(
    task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    """The only engine while it generates and while it loads a bucket, then the trainer while it sends one; a resume."""
    gate, checkpoints = Gate(tmp_path), tmp_path / "checkpoints"
    prompts = 2 * len(task.train.read_text().splitlines())
    words = task.flags(
        fully_async=True,
        num_rollout=None,
        num_epoch=2,
        rollout_max_response_len=60,
        rollout_temperature=0,
        entropy_coef=0.01,
        max_tokens_per_gpu=2048,
        update_weight_buffer_size=BUCKET_BYTES,
        save=checkpoints,
        load=checkpoints,
        save_interval=1,
    )
    words = [*words, "--no-recompute-kv-cache-after-weight-updates"]
    run = gated(relax, gate, *words)
    run.wait_for(lambda: len(run.steps()) >= 1, "first step")
    kill_in_mid_response(run, gate, run.find_server)
    run.wait_for(lambda: "engine0 joined" in run.output, "the engine to come back")
    kill_in_bucket_two(run, gate, run.find_server)
    run.wait_for(lambda: run.output.count("engine0 joined") == 2, "the engine to come back again")
    assert "restarting it, 1 of 3" in run.output
    assert "restarting it, 2 of 3" in run.output
    kill_in_bucket_two(run, gate, lambda: run.find_actor("TrainActor"), release=False)
    # The engine is in the middle of a push whose sender is gone, and nobody waits for it.
    assert run.finish(deadline_s=60) == 1, run.output
    said = run.output.partition("FAILED")[2]
    assert "That process was trainer rank 0; see its log trainer_rank0.log." in said, said
    assert re.search(r"the checkpoint of rollout \d+ in \S+ is whole; to go on from there", said), said
    assert run.survivors() == []
    check_engine_weights(run)
    gate.open()

    last = gated(relax, gate, *words)
    assert last.finish() == 0, last.output
    assert "resumed from rollout" in last.output
    steps = last.steps()
    assert [m["step"] for m in steps] == list(range(prompts // 4)), "no step is missing, none is there twice"
    assert steps[-1]["prompts/trained"] + 4 == prompts, "the metrics are of the moment before the last step"
    assert max(m["staleness/max"] for m in steps) <= 1
    kept, again = (sum(m[f"rollout/{name}_tokens"] for m in steps[-20:]) for name in ("kept", "reprefilled"))
    assert kept > again, "what a push interrupts is not computed again, which would be prompts and all that is kept"
    check_engine_weights(last)
    assert last.survivors() == []


def kill_in_bucket_two(run: Any, gate: Gate, find: Callable[[], psutil.Process], *, release: bool = True) -> None:
    """Kills -9 a process while the engine is about to load the second bucket of a push."""
    gate.hold_bucket(2)
    asyncio.run(gate.held())
    find().kill()
    if release:
        gate.open()


def check_engine_weights(run: Any) -> None:
    """On-policy samples show that an engine that came back has the trainer's weights, not those it starts with."""
    exact = [m for m in run.steps() if m["train/off_policy_token_share"] == 0]
    assert all(m["train/logprob_diff_max"] < 1e-4 for m in exact)


def proportional_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def test_the_example_learns_as_it_is_shipped(relax: Callable[..., Any], tmp_path: Path) -> None:
    """A short form of it; the whole one takes a minute."""
    example = Path(__file__).resolve().parents[2] / "examples" / "arithmetic" / "async.toml"
    words = ["--num-rollout", "12", "--eval-interval", "6", "--tb-experiment-name", "run", "--weight-sync", "disk"]
    run = relax("train", "--fully-async", "--config", str(example), *words)
    run.wait_for(lambda: len(run.steps()) >= 8, "eight steps")
    # What processes share counts once.
    used = sum(proportional_bytes(p) for p in [psutil.Process(run.process.pid), *run.seen])
    assert used < 8e9, f"{used / 1e9:.1f} GB"
    assert run.finish() == 0, run.output
    steps = run.steps()
    assert len(steps) == 12
    assert [step for step, _ in evals(run)] == [0, 6, 12]
    assert evals(run)[-1][1] > evals(run)[0][1]
    assert max(m["staleness/max"] for m in steps) == 1, "at most --max-staleness, and no less: it is used"
    assert "trainer waits" in run.output
    check_timeline(run)
    assert {name for m in run.metrics() for name in m} <= documented_metrics() | {"step", "time", "histograms"}
    assert run.survivors() == []
    assert list((run.folder / "runs" / "run" / "weights").iterdir()) == [], "files of a push are gone after it"
