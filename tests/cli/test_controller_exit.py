"""The exit code and the last words of `relax train`, whatever happens below the controller."""

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_cli.cluster.ray_watch import RayLost
from relax_cli.cluster.waits import StopFlag, StopRequested
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import RunConfig
from relax_cli.controllers.base import Outcome
from relax_cli.run import launch as controller
from relax_cli.run.tracking import JsonLinesTracker
from relax_cli.workers.group import WorkerGroups
from relax_cli.workers.process import actor_environment
from relax_cli.workers.trainer import _profiles_log_probs
from relax_data.errors import DataError
from relax_data.prompts.template import PromptBuilder, SourcedRow
from relax_data.settings import DataSettings


@pytest.fixture
def config(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    return resolve(task.flags(), {})


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[StopFlag, Outcome], None]], None]:
    """Puts a function in the place of everything that needs Ray."""

    def replace(action: Callable[[StopFlag, Outcome], None]) -> None:
        monkeypatch.setattr(controller, "_run_on_ray", lambda config, progress, stop, outcome: action(stop, outcome))

    return replace


def test_a_failure_is_one_explained_line_and_code_1(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(stop: StopFlag, outcome: Outcome) -> None:
        raise ConnectionError("engine0 lives but the connection was lost")

    below(fail)
    assert controller.run(config) == 1
    out, err = capsys.readouterr()
    assert "FAILED ConnectionError: engine0 lives" in out
    assert "Traceback" not in out + err
    assert "Traceback" in (config.run_dir / "logs" / "driver.log").read_text()


def test_a_stop_in_the_middle_of_a_step_keeps_what_was_done(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(stop: StopFlag, outcome: Outcome) -> None:
        outcome.first_rollout, outcome.next_rollout = 3, 5
        outcome.evals.append((3, {"eval/a/reward": 0.25}))
        tracker = JsonLinesTracker(config.run_dir / "metrics.jsonl")
        for step in (3, 4):
            tracker.log({"time/step": 1.0, "rollout/reward": 0.5}, step)
        tracker.close()
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        raise StopRequested("rollout 5 to be generated")

    below(interrupted)
    assert controller.run(config) == 128 + signal.SIGINT
    out = capsys.readouterr().out
    assert "stopped by request while waiting for rollout 5" in out
    assert "2 (rollouts 3 to 4)" in out
    assert "SIGINT: stopping; a second signal ends the run at once, without summary" in out
    assert "eval/a" in out


def test_an_error_after_a_signal_is_the_stop(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch system signals every process of the job: engines may be gone before the driver has stopped."""

    def die(stop: StopFlag, outcome: Outcome) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("engine0 is gone")

    below(die)
    assert controller.run(config) == 128 + signal.SIGTERM
    assert "FAILED" not in capsys.readouterr().out


def test_a_sigterm_while_ray_connects_is_a_stop(config: RunConfig, below: Callable[..., None]) -> None:
    def connecting(stop: StopFlag, outcome: Outcome) -> None:
        raise SystemExit(signal.SIGTERM)  # what the handler of ray.init does

    below(connecting)
    assert controller.run(config) == 128 + signal.SIGTERM


def test_the_summary_counts_the_steps_of_this_launch(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "time/step": 1.0}\n')

    def one_step(stop: StopFlag, outcome: Outcome) -> None:
        tracker = JsonLinesTracker(config.run_dir / "metrics.jsonl")
        tracker.log({"time/step": 1.0, "rollout/reward": 0.5}, 1)
        tracker.close()
        outcome.first_rollout, outcome.next_rollout = 1, 2

    below(one_step)
    assert controller.run(config) == 0
    assert "1 (rollouts 1 to 1)" in capsys.readouterr().out
    log = (config.run_dir / "logs" / "driver.log").read_text()
    assert f"run directory {config.run_dir}" in log, "what the user was told is in the log of a good run, too"
    assert "steps: 1 (rollouts 1 to 1)" in log


def test_a_run_directory_that_cannot_be_written_is_said(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config.run_dir.parent.write_text("a file where the folder should be")
    assert controller.run(config) == 1
    assert f"cannot write the run directory {config.run_dir}" in capsys.readouterr().out


def test_a_trainer_on_cpu_sees_no_gpu() -> None:
    assert actor_environment("cpu", threads=1)["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in actor_environment("cuda", threads=1)


def test_a_profile_of_the_log_prob_phase_makes_it_happen(task: Any) -> None:
    def profiles(*words: str) -> bool:
        return _profiles_log_probs(resolve([*task.flags(), *words], {}))

    assert not profiles()
    assert not profiles("--use-pytorch-profiler")
    assert profiles("--use-pytorch-profiler", "--profile-target", "train_actor", "train_log_probs")


def test_every_engine_has_a_sampler_seed_of_its_own(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from relax_cli.cluster.slots import Slot

    assert config.placement is not None
    several = dataclasses.replace(config, placement=dataclasses.replace(config.placement, engines=3))
    seeds: list[int] = []
    monkeypatch.setattr(
        WorkerGroups, "_actor", lambda self, cls, bundle, **options: lambda config, **kw: seeds.append(kw["seed"])
    )
    workers = WorkerGroups(several, stop=StopFlag(), note=print)
    workers._create_engines([Slot(i, "node", "127.0.0.1", None) for i in range(3)])
    assert seeds == [42, 43, 44]


@pytest.mark.parametrize(
    ("flags", "saved", "expected"),
    [
        ({}, None, "rollouts 2 to 4; to keep the model, add --save FOLDER"),
        ({"save": "s"}, None, "rollouts 2 to 4: the run was ended before it could save them"),
        ({"save": "s"}, 3, "rollout 4: the run was ended"),
        ({"save": "s"}, 4, None),
        ({"save_hf": "x{rollout_id}"}, 4, None),
        ({"debug_rollout_only": True}, None, None),
    ],
)
def test_the_summary_names_what_was_trained_and_not_saved(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], saved: int | None, expected: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = Outcome(first_rollout=2, next_rollout=5, saved_rollout=saved)
    found = controller._not_saved(resolve(task.flags(**flags), {}), outcome)
    assert found is None if expected is None else found is not None and expected in found


def test_a_launch_that_trained_nothing_has_nothing_to_save(config: RunConfig) -> None:
    assert controller._not_saved(config, Outcome(first_rollout=2, next_rollout=2)) is None


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        ({"next_rollout": 3}, "no checkpoint was written yet: --save FOLDER --save-interval N"),
        ({"next_rollout": 3, "last_checkpoint": "c", "saved_rollout": 1}, "the checkpoint of rollout 1 in c is whole"),
        ({"last_checkpoint": "c"}, "the checkpoint in c is whole; to go on from there, start the same command with"),
        ({}, None),
    ],
)
def test_a_failure_says_what_is_whole_and_how_to_go_on(
    config: RunConfig,
    below: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    done: dict[str, Any],
    expected: str | None,
) -> None:
    def fail(stop: StopFlag, outcome: Outcome) -> None:
        for name, value in done.items():
            setattr(outcome, name, value)
        raise RayLost("Ray's process raylet (pid 7) has ended")

    below(fail)
    assert controller.run(config) == 1
    out = capsys.readouterr().out
    assert "FAILED RayLost: Ray's process raylet (pid 7) has ended" in out
    assert ("checkpoint" in out) is (expected is not None)
    assert expected is None or expected in " ".join(out.split())


def test_after_a_bad_row_the_same_command_goes_on_only_without_it(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The row mended, the file would be another one than that of the checkpoint, which a resume refuses."""

    def fail(stop: StopFlag, outcome: Outcome) -> None:
        outcome.last_checkpoint, outcome.saved_rollout = "c", 1
        builder = PromptBuilder(DataSettings(prompt_data=("odd.jsonl",)), tokenizer=None)
        builder.build([SourcedRow("odd.jsonl:61", DataError("odd.jsonl:61: not valid JSON"))])

    below(fail)
    assert controller.run(config) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "odd.jsonl:61: not valid JSON. Pass --skip-bad-rows to go on without it, or mend the row and start" in out
    assert "start the same command with --skip-bad-rows --load c" in out


def test_a_lost_ray_is_said_once(
    config: RunConfig, below: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, by whoever looks after it; what breaks then says nothing more."""

    def fail(stop: StopFlag, outcome: Outcome) -> None:
        stop.broken = RayLost("told already")
        raise ConnectionError("an actor died, since Ray did")

    below(fail)
    assert controller.run(config) == 1
    assert "FAILED" not in capsys.readouterr().out
