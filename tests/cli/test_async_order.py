"""What the fully-async controller asks of its actors, and in which order. The actors here only write it down."""

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from cli import test_colocate_order as order
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.settings import ClusterSettings, DebugSettings, RunSettings
from relax_cli.controllers.base import Outcome
from relax_cli.controllers.fully_async import FullyAsyncController
from relax_cli.run.progress import Progress
from relax_cli.run.tracking import Tracker, Trackers
from relax_cli.workers.rollout import RolloutOutput
from relax_data.types import StepManifest, TrainBatch
from relax_rollout.engines.pool import EngineReport, EngineState
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
from rich.console import Console


class AsyncRollout(order.RecordingRollout):
    """A rollout worker whose samples at a step have ``age`` versions."""

    age = 0
    lost: str | None = None

    def next_step(self, step: int) -> RolloutOutput:
        self._book.note("next_step", step)
        self._left -= 1
        if self._left < 0:
            return RolloutOutput(0, None, {})
        group = order.group(step)
        for sample in group.samples:
            sample.versions[:] = [step - self.age]
        manifest = StepManifest.of(TrainBatch.from_groups([group], step))
        return RolloutOutput(1, manifest, {"rollout/reward": 1.0, "time/rollout": 1.0})

    def settle(self, step: int) -> None:
        self._book.note("settle", step)

    def begin_push(self) -> dict[str, float]:
        self._book.note("begin_push")
        return {"pause": 0.0, "land": 0.25}

    def end_push(self, version: int) -> None:
        self._book.note("end_push", version)

    def start_evaluation(self, version: int) -> None:
        self._book.note("start_evaluation", version)

    def finish_evaluation(self) -> dict[str, float]:
        self._book.note("finish_evaluation")
        return {"eval/held-out/reward": 0.5}

    def drop_evaluation(self) -> None:
        self._book.note("drop_evaluation")

    def check_engines(self) -> list[EngineReport]:
        states = {0: EngineState.LOST if self.lost else EngineState.SERVING, 1: EngineState.SERVING}
        return [EngineReport(f"engine{i}", s, int(s is EngineState.LOST), self.lost or "") for i, s in states.items()]

    def exclude_engine(self, name: str, why: str) -> None:
        self._book.note(f"exclude_engine {name}")
        self.lost = why


class AsyncTrainers(order.RecordingTrainers):
    """Ranks whose push does not reach some engines."""

    unreached: tuple[str, ...] = ()
    failures = 0

    def push_weights(self, version: int, engines: Any = None) -> PushReport:
        self._book.note("push_weights", version)
        if self.failures:
            self.failures -= 1
            raise WeightPushFailed(f"weights of version {version} did not reach any engine")
        self._book.served = version
        failed = {name: "it said no" for name in self.unreached if name in engines}
        return PushReport(1, 1, 10**9, failed=failed, seconds={"send": 0.5})


class AsyncWorkers(order.RecordingWorkers):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.samples = self._rollout = AsyncRollout(self._book, options.get("rollouts", 1000), True)
        self.ranks = self._trainers = self.pushes = AsyncTrainers(self._book, options.get("checkpoint"))


def run(
    workers: AsyncWorkers,
    *,
    stop: StopFlag | None = None,
    save: dict[str, Any] | None = None,
    trackers: list[Tracker] | None = None,
    staleness: int = 1,
    **options: Any,
) -> tuple[Outcome, str]:
    config = order.Config(
        RunSettings(**options),
        TrainSettings(model=ModelSettings(hf_checkpoint="m"), checkpoint=CheckpointSettings(**(save or {}))),
        DebugSettings(),
        ClusterSettings(colocate=False, fully_async=True, max_staleness=staleness),
    )
    console = Console(file=io.StringIO(), width=1000)
    controller = FullyAsyncController(config, workers, Trackers(trackers or []), Progress(console), stop or StopFlag())  # type: ignore[arg-type]
    outcome = controller.run()
    return outcome, console.file.getvalue()  # type: ignore[attr-defined]


PUSH = ("begin_push", "push_weights {0}", "weight_versions", "end_push {0}")


def push(version: int) -> list[str]:
    return [call.format(version) for call in PUSH]


def test_samples_go_on_after_each_push() -> None:
    workers = AsyncWorkers()
    run(workers, num_rollout=2)
    assert workers.calls == [
        *push(0),
        *("next_step 0", "train 0", "settle 0", *push(1)),
        *("next_step 1", "train 1", "settle 1", *push(2)),
    ]


def test_a_checkpoint_has_the_samples_as_they_rest_at_the_push() -> None:
    workers = AsyncWorkers()
    run(workers, num_rollout=3, save={"save": "s", "save_interval": 2})
    begin = workers.calls.index("settle 1")
    assert workers.calls[begin : begin + 7] == [
        *("settle 1", "begin_push", "save_state 1", "push_weights 2", "weight_versions", "end_push 2", "save 1"),
    ]
    assert workers.calls[-3:] == ["begin_push", "save_state 2", "save 2"], "the last step is saved too"
    assert workers.ranks.saved_files == Path("s").absolute() / "rollout_2.rollout.tmp"


def test_an_evaluation_runs_beside_the_step_and_holds_up_the_push() -> None:
    workers = AsyncWorkers()
    outcome, _ = run(workers, num_rollout=4, eval_interval=2)
    calls = [c for c in workers.calls if not c.startswith(("weight_versions", "begin", "settle", "next"))]
    assert calls == [
        *("push_weights 0", "end_push 0", "start_evaluation 0", "finish_evaluation"),
        *("train 0", "push_weights 1", "end_push 1", "train 1", "push_weights 2", "end_push 2"),
        *("start_evaluation 2", "train 2", "finish_evaluation", "push_weights 3", "end_push 3"),
        *("train 3", "push_weights 4", "end_push 4", "start_evaluation 4", "finish_evaluation"),
    ]
    assert [rollout_id for rollout_id, _ in outcome.evals] == [0, 2, 4]


def test_a_stop_saves_the_finished_step_and_drops_the_evaluation() -> None:
    workers, stop = AsyncWorkers(), StopFlag()
    stop.stepping = True
    workers.on_call["end_push 2"] = lambda: stop.set(signal.SIGTERM)
    outcome, _ = run(workers, num_rollout=9, eval_interval=1, save={"save": "s"}, stop=stop)
    assert outcome.stopped_by == signal.SIGTERM
    assert workers.calls[-3:] == ["begin_push", "save_state 1", "save 1"]
    workers, stop = AsyncWorkers(), StopFlag()
    workers.on_call["start_evaluation 1"] = lambda: stop.set(signal.SIGTERM)
    workers.on_call["next_step 1"] = lambda: setattr(workers.samples, "_left", 0)
    run(workers, num_rollout=9, eval_interval=1, save={"save": "s"}, stop=stop)
    assert workers.calls[-4:] == ["drop_evaluation", "begin_push", "save_state 0", "save 0"]


@pytest.mark.parametrize("age", [2, -1])
def test_samples_beyond_the_bound_end_the_run(age: int) -> None:
    workers = AsyncWorkers()
    workers.samples.age = age
    with pytest.raises(RuntimeError, match=r"step 0 was given samples whose staleness is not within 0 and .* 1 \(a:0"):
        run(workers, num_rollout=2)
    assert "train 0" not in workers.calls


def test_an_engine_that_a_push_did_not_reach_is_left_behind() -> None:
    workers = AsyncWorkers()
    workers.pushes.unreached = ("engine0",)
    _, text = run(workers, num_rollout=1)
    assert workers.calls[:4] == ["begin_push", "push_weights 0", "exclude_engine engine0", "weight_versions"]
    assert "engine0 was lost (it did not take the weights of version 0: it said no): restarting it, 1 of 3" in text
    assert "its requests go on at engine1" in text


def test_a_push_that_reached_nobody_is_repeated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_cli.controllers.engine_recovery.DYING_S", 0.0)
    workers = AsyncWorkers()
    workers.pushes.failures = 1
    _, text = run(workers, num_rollout=1)
    assert workers.calls[:4] == ["begin_push", "push_weights 0", "push_weights 0", "weight_versions"]
    assert "the push of version 0 is repeated, to engine0, engine1" in text
    workers = AsyncWorkers()
    workers.pushes.failures = 2
    with pytest.raises(WeightPushFailed, match="version 0 did not reach any engine"):
        run(workers, num_rollout=1)


def test_the_metrics_say_who_waited_for_whom() -> None:
    workers = AsyncWorkers()
    tracker = order.RecordingTracker(workers.book)
    _, text = run(workers, num_rollout=2, trackers=[tracker])
    for _, row in tracker.rows:
        phases = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step")
        assert phases == pytest.approx(row["time/step"])
        assert 0 <= row["async/trainer_idle_share"] <= 1
        assert row["weights/land_s"] == 0.25
        assert row["weights/GBps"] == 2.0
        assert row["rollout/seconds_rollout"] == 1.0
    assert "trainer waits" in text
