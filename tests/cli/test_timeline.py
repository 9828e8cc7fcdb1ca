"""The timeline that the driver writes, and that what the report says of it is what the metrics say."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import relax_profiling
from cli import test_async_order as order_async
from cli import test_colocate_order as order
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.settings import ClusterSettings, DebugSettings, RunSettings
from relax_cli.controllers.modes import CONTROLLERS
from relax_cli.run.progress import Progress
from relax_cli.run.timeline import TimelineFile
from relax_cli.run.tracking import Trackers
from relax_cli.workers.rollout import RolloutOutput
from relax_profiling.timeline.read import read_timeline
from relax_profiling.timeline.shares import WAITS
from relax_rollout.engines.usage import EngineTime
from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
from rich.console import Console

SETUP = {
    **{
        "mode": "fully_async",
        "device": "cpu",
        "train_gpus": 1,
        "train_unit": 1,
        "engine_gpus": 1,
        "gpus_per_engine": 1,
    },
    **{"rollout_batch_size": 1, "over_sampling_batch_size": 2, "max_staleness": 1},
}
NOW = time.time()
USAGE = {
    "engine0": EngineTime(
        {"busy": 3.0, "idle": 0.5, "paused": 0.5},
        {"busy": 12.0, "idle": 0.0, "paused": 0.1},
        (("busy", NOW, NOW + 3), ("paused", NOW + 3, NOW + 3.5), ("idle", NOW + 3.5, NOW + 4)),
    )
}


class Busy(order_async.AsyncRollout):
    def next_step(self, step: int) -> RolloutOutput:
        output = super().next_step(step)
        output.usage.update(USAGE)
        return output


def run(path: Path, setup: dict[str, Any], **options: Any) -> list[tuple[int, dict[str, float]]]:
    """Trains some steps with actors that do nothing; the metrics of each step."""
    mode = str(setup["mode"])
    if mode == "colocate":
        workers = order.RecordingWorkers()
    else:
        workers = order_async.AsyncWorkers()
        workers._rollout = Busy(workers.book, 1000, True)
    tracker = order.RecordingTracker(workers.book)
    config = order.Config(
        RunSettings(**options),
        TrainSettings(model=ModelSettings(hf_checkpoint="m"), checkpoint=CheckpointSettings(save="s", save_interval=1)),
        DebugSettings(),
        ClusterSettings(colocate=mode == "colocate", fully_async=mode != "colocate"),
    )
    progress = Progress(Console(file=io.StringIO()))
    timeline = TimelineFile(path, setup, progress.note)
    CONTROLLERS[mode](config, workers, Trackers([tracker]), progress, StopFlag(), None, timeline).run()  # type: ignore[arg-type]
    return [(step, row) for step, row in tracker.rows if "time/step" in row]


def test_its_shares_are_those_of_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    rows = run(path, SETUP, num_rollout=4, eval_interval=2)
    steps, problems = read_timeline(path)
    assert problems == []
    assert [step.step for step in steps] == [step for step, _ in rows] == [0, 1, 2, 3]
    for step, (_, row) in zip(steps, rows, strict=True):
        assert step.seconds == pytest.approx(row["time/step"], abs=1e-5)
        waits = row["async/trainer_idle_share"] * row["time/step"]
        assert step.spent(*WAITS) == pytest.approx(waits, abs=0.005), "phases are written in milliseconds"
        for name in ("wait_for_rollout", "weight_update", "pause"):
            assert step.spent(name) == pytest.approx(row[f"time/{name}"], abs=0.003)
        engine = step.engines["engine0"]
        assert [engine.share(state) for state in ("busy", "idle", "paused")] == [0.75, 0.125, 0.125]
        assert engine.running == {"busy": 4.0, "idle": 0.0, "paused": 0.2}
        assert step.start + engine.intervals[0][1] == pytest.approx(NOW, abs=0.002), "by the wall clock"
    names = [[name for name, _, _ in step.phases] for step in steps]
    assert names[0][:5] == ["wait_for_eval", "pause", "weight_update", "resume", "eval"]
    between = ["wait_for_eval", "pause", "save", "weight_update", "resume", "save"]
    assert names[1] == [*between, "wait_for_rollout", "train_step"]


def test_with_colocate(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    rows = run(path, SETUP | {"mode": "colocate"}, num_rollout=2, eval_interval=1)
    steps, _ = read_timeline(path)
    names = [name for name, _, _ in steps[1].phases]
    assert names == ["save", "weight_update", "weight_update", "eval", "generate", "train_step"]
    assert steps[1].seconds == pytest.approx(rows[1][1]["time/step"], abs=1e-5)
    report = relax_profiling.analyze(tmp_path)
    assert report.timelines[0].engines == {}, "nobody told what the engines did"


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    run(path, SETUP, num_rollout=2)
    with path.open("a") as file:
        file.write('{"step": 2, "sta')  # a kill
    run(path, SETUP, num_rollout=3)
    lines = path.read_text().splitlines()
    assert [json.loads(text)["step"] for text in lines if text.endswith("}")] == [0, 1, 0, 1, 2]
    steps, problems = read_timeline(path)
    assert [step.step for step in steps] == [0, 1, 2]
    assert len(problems) == 1
    assert f"{path}:3: " in problems[0]


def test_a_timeline_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    told: list[str] = []
    timeline = TimelineFile(tmp_path / "absent" / "timeline.jsonl", SETUP, told.append)
    for step in range(3):
        timeline.write(step, [], USAGE, began=0.0, seconds=1.0)
    assert len(told) == 1
    assert "the timeline ends before step 0" in told[0]
