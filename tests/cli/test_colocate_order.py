"""What the colocate controller asks of its actors, and in which order. The actors here only write it down."""

import dataclasses
import io
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from relax_cli.cluster.waits import StopFlag, StopRequested
from relax_cli.config.settings import ClusterSettings, DebugSettings, RunSettings
from relax_cli.controllers.base import Outcome, PhaseTimer
from relax_cli.controllers.modes import CONTROLLERS
from relax_cli.run.debug_data import FileRows, save_groups
from relax_cli.run.progress import Progress
from relax_cli.run.tracking import Histograms, Tracker, Trackers
from relax_cli.workers.group import WorkerGroups
from relax_cli.workers.references import RolloutRows, RowReference
from relax_cli.workers.rollout import RolloutOutput
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer_group import TrainerGroup
from relax_data.types import Prompt, SampleGroup, SampleStatus, StepManifest, TrainBatch
from relax_rollout.engines.pool import EngineReport, EngineState
from relax_rollout.weight_sync.base import PushReport
from relax_train.checkpoint.manifest import Loaded
from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
from rich.console import Console

if TYPE_CHECKING:
    from relax_rollout.engines.base import MemoryTag

Checkpoint = tuple[int, dict[str, Any]]


@dataclasses.dataclass
class Config:
    run: RunSettings
    train: TrainSettings
    debug: DebugSettings
    cluster: ClusterSettings


class Book:
    """The calls of one run in order, each as its name and its numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.on_call: dict[str, Callable[[], object]] = {}
        self.served = 0
        self.ended = False

    def note(self, method: str, *numbers: int) -> None:
        self.calls.append(" ".join([method, *map(str, numbers)]))
        if self.calls[-1] in self.on_call:
            self.on_call[self.calls[-1]]()


class RecordingRollout(RolloutWorker):
    """A rollout worker whose prompts last for ``rollouts`` rollouts."""

    def __init__(self, book: Book, rollouts: int, trains: bool) -> None:
        self._book, self._left, self._trains = book, rollouts, trains

    def generate(self, rollout_id: int, version: int, *, save_to: Path | None = None) -> RolloutOutput:
        self._book.note("generate", rollout_id, version)
        self._left -= 1
        if self._left < 0:
            return RolloutOutput(0, None, {})
        if save_to is not None:
            save_groups([group(rollout_id)], save_to)
        manifest = StepManifest.of(TrainBatch.from_groups([group(rollout_id)], rollout_id))
        return RolloutOutput(1, manifest if self._trains else None, {"rollout/reward": 1.0})

    def rows(self, rollout_id: int) -> RolloutRows:
        return RolloutRows(None, rollout_id)  # type: ignore[arg-type]

    def evaluate(self, version: int) -> dict[str, float]:
        self._book.note("evaluate", version)
        return {"eval/held-out/reward": 0.5}

    def check_engines(self) -> list[EngineReport]:
        return [EngineReport("engine0", EngineState.SERVING, 0, "")]

    def engine_reports(self) -> list[EngineReport]:
        return self.check_engines()

    def weight_versions(self) -> list[int]:
        self._book.note("weight_versions")
        return [self._book.served]

    def release_memory(self) -> None:
        self._book.note("release_memory")

    def resume_memory(self, tag: "MemoryTag") -> None:
        self._book.note("resume_memory")

    def save_state(self, directory: str, rollout_id: int) -> dict[str, Any]:
        self._book.note("save_state", rollout_id)
        return {"cursor": sum(c.startswith("generate") for c in self._book.calls)}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        self._book.note("load_state", int(folder.name))


class RecordingTrainers(TrainerGroup):
    """Ranks that find ``checkpoint`` when they load one."""

    def __init__(self, book: Book, checkpoint: Checkpoint | None) -> None:
        self._book, self._checkpoint = book, checkpoint
        self.rows: list[RowReference] = []
        self.saved_state: dict[str, Any] = {}
        self.saved_files: Path | None = None

    def measure_room(self) -> None:
        self._book.note("measure_room")

    def begin_traces(self) -> None:
        assert not self._book.calls[-1].startswith("generate"), "after the step, and before the next rollout"

    def finish_traces(self) -> None:
        self._book.ended = True

    def train(self, manifest: StepManifest, rows: RowReference, rollout_id: int) -> dict[str, float]:
        assert manifest.rollout_id == rollout_id
        self.rows.append(rows)
        self._book.note("train", rollout_id)
        return {"train/loss": 0.0}

    def push_weights(self, version: int, engines: Sequence[str] | None = None) -> PushReport:
        assert engines in (None, ["engine0"])
        self._book.note("push_weights", version)
        self._book.served = version
        return PushReport()

    def sleep(self) -> None:
        self._book.note("sleep")

    def wake(self) -> None:
        self._book.note("wake")

    def save(self, directory: str, rollout_id: int, extra: dict[str, Any], files: Path | None = None) -> None:
        self._book.note("save", rollout_id)
        self.saved_state, self.saved_files = extra, files

    def load(self, directory: str) -> Loaded | None:
        self._book.note("load")
        if self._checkpoint is None:
            return None
        rollout_id, extra = self._checkpoint
        return Loaded(rollout_id, extra, optimizer=True, folder=Path(directory) / str(rollout_id))

    def save_hf(self, directory: str) -> None:
        self._book.note("save_hf")


class RecordingWorkers(WorkerGroups):
    """Answers like the actors of a run, in one book."""

    def __init__(
        self,
        *,
        shares_gpu: bool = False,
        rollouts: int = 1000,
        checkpoint: Checkpoint | None = None,
        trains: bool = True,
    ) -> None:
        self._book, self._shares_gpu = Book(), shares_gpu
        self._rollout = RecordingRollout(self._book, rollouts, trains)
        self._trainers = self.ranks = RecordingTrainers(self._book, checkpoint)

    @property
    def shares_gpu(self) -> bool:
        return self._shares_gpu

    @property
    def book(self) -> Book:
        return self._book

    @property
    def calls(self) -> list[str]:
        return self._book.calls

    @property
    def on_call(self) -> dict[str, Callable[[], object]]:
        return self._book.on_call

    @property
    def saved_state(self) -> dict[str, Any]:
        return self.ranks.saved_state

    @property
    def rows(self) -> list[RowReference]:
        return self.ranks.rows

    def serve(self, version: int) -> None:
        """Makes the engines name another version than was pushed."""
        self._book.served = version


def group(prompt_id: int) -> SampleGroup:
    found = SampleGroup.start(
        Prompt(prompt_id=prompt_id, epoch=0, source=f"a:{prompt_id}", text="1+1=", input_ids=[5]), 2
    )
    for sample in found.samples:
        sample.append([7], [-0.5], [0])
        sample.status, sample.response, sample.reward = SampleStatus.COMPLETED, "2", 1.0
    return found


def run(
    workers: RecordingWorkers,
    *,
    stop: StopFlag | None = None,
    save: dict[str, Any] | None = None,
    trackers: list[Tracker] | None = None,
    outcome: Outcome | None = None,
    **options: Any,
) -> Outcome:
    debug = {k: options.pop(k) for k in list(options) if "debug" in k}
    config = Config(
        RunSettings(**options),
        TrainSettings(model=ModelSettings(hf_checkpoint="m"), checkpoint=CheckpointSettings(**(save or {}))),
        DebugSettings(**debug),
        ClusterSettings(),
    )
    progress, controller = Progress(Console(file=io.StringIO())), CONTROLLERS[config.cluster.mode]
    return controller(config, workers, Trackers(trackers or []), progress, stop or StopFlag(), outcome).run()  # type: ignore[arg-type]


class RecordingTracker:
    """Notes each step between the calls of the actors, and keeps its scalars."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        self._book.note("log", step)
        self.rows.append((step, scalars))

    def close(self) -> None:
        self._book.note("close")


def only(calls: list[str], *methods: str) -> list[str]:
    return [c for c in calls if c.split()[0] in methods]


def test_a_step_generates_trains_and_pushes_the_next_version() -> None:
    workers = RecordingWorkers()
    outcome = run(workers, num_rollout=2)
    assert workers.calls == [
        *("push_weights 0", "weight_versions"),
        *("generate 0 0", "train 0", "push_weights 1", "weight_versions"),
        *("generate 1 1", "train 1", "push_weights 2", "weight_versions"),
    ]
    assert (outcome.first_rollout, outcome.next_rollout) == (0, 2)
    assert [rows.rollout_id for rows in workers.rows if isinstance(rows, RolloutRows)] == [0, 1]


def test_engines_and_trainer_take_turns_on_shared_gpus() -> None:
    workers = RecordingWorkers(shares_gpu=True)
    run(workers, num_rollout=1, save={"save": "s"})
    assert workers.calls == [
        *("resume_memory", "push_weights 0", "sleep", "resume_memory", "weight_versions"),
        "generate 0 0",
        *("measure_room", "release_memory", "wake", "train 0"),
        *("resume_memory", "push_weights 1", "sleep", "resume_memory", "weight_versions"),
        *("release_memory", "wake", "save_state 0", "save 0"),
    ]
    assert workers.book.ended, "what is profiled is written before the ranks end"


def test_an_engine_that_serves_other_weights_ends_the_run() -> None:
    workers = RecordingWorkers()
    workers.on_call["weight_versions"] = lambda: workers.serve(7)
    with pytest.raises(RuntimeError, match=r"version 0 the engines serve \[7\]"):
        run(workers, num_rollout=1)


def test_the_checkpoint_of_a_step_holds_the_prompts_after_it() -> None:
    """Neither trained twice nor lost: the state is taken after the rollout of that id, before the next one."""
    workers = RecordingWorkers()
    states = []
    workers.on_call["push_weights 2"] = lambda: states.append(workers.saved_state)
    outcome = run(workers, num_rollout=3, save={"save": "s", "save_interval": 2})
    assert states == [{"rollout": {"cursor": 2}}]
    assert only(workers.calls, "save") == ["save 1", "save 2"], "the interval, and the last step"
    assert workers.saved_state == {"rollout": {"cursor": 3}}
    assert workers.ranks.saved_files == Path("s").absolute() / "rollout_2.rollout.tmp"
    assert outcome.last_checkpoint == "s"
    assert outcome.saved_rollout == outcome.next_rollout - 1


def test_the_metrics_of_a_step_are_written_before_its_checkpoint() -> None:
    """A driver that dies in between does the step again; the other way round its metrics would be lost."""
    workers = RecordingWorkers()
    tracker = RecordingTracker(workers.book)
    run(workers, num_rollout=3, save={"save": "s", "save_interval": 2}, trackers=[tracker])
    assert only(workers.calls, "train", "log", "save") == [
        *("train 0", "log 0", "train 1", "log 1", "save 1", "train 2", "log 2", "save 2"),
    ]
    assert [step for step, _ in tracker.rows] == [0, 1, 2], "one row a step"
    assert all(row["time/weight_update"] > 0 for _, row in tracker.rows)
    assert ["time/save" in row for _, row in tracker.rows] == [False, False, True], "that of the step before"
    for _, row in tracker.rows:
        phases = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step")
        assert phases == pytest.approx(row["time/step"])


def test_rows_that_were_left_out_are_told_once() -> None:
    told = io.StringIO()
    model = ModelSettings(hf_checkpoint="m")
    config = Config(RunSettings(num_rollout=3), TrainSettings(model=model), DebugSettings(), ClusterSettings())
    progress = Progress(Console(file=told, soft_wrap=True))
    controller = CONTROLLERS["colocate"](config, RecordingWorkers(), Trackers([]), progress, StopFlag())  # type: ignore[arg-type]
    for rollout, bad in enumerate((0.0, 3.0, 4.0)):
        controller._report(rollout, {"prompts/bad_rows": bad} if bad else {}, PhaseTimer(), None)
    assert told.getvalue().count("rows of the prompt data were left out (--skip-bad-rows)") == 1
    assert "3 rows of the prompt data" in told.getvalue()


def test_a_driver_that_dies_while_it_saves_has_logged_the_step() -> None:
    workers = RecordingWorkers()
    tracker = RecordingTracker(workers.book)

    def die() -> None:
        raise KeyboardInterrupt

    workers.on_call["save 1"] = die
    with pytest.raises(KeyboardInterrupt):
        run(workers, num_rollout=3, save={"save": "s", "save_interval": 2}, trackers=[tracker])
    assert {"train/loss", "rollout/reward", "time/step"} <= tracker.rows[-1][1].keys()
    assert tracker.rows[-1][0] == 1


def test_a_last_step_on_the_interval_is_saved_once() -> None:
    workers = RecordingWorkers()
    run(workers, num_rollout=2, save={"save": "s", "save_interval": 1})
    assert only(workers.calls, "save") == ["save 0", "save 1"]


def test_an_export_alone_is_written_too() -> None:
    workers = RecordingWorkers()
    run(workers, num_rollout=3, save={"save_hf": "hf/{rollout_id}", "save_interval": 2})
    assert only(workers.calls, "save", "save_hf", "save_state") == ["save_hf", "save_hf"]


def test_resume_goes_on_after_the_saved_rollout_with_its_version() -> None:
    workers = RecordingWorkers(checkpoint=(4, {"rollout": {"cursor": 5}}))
    outcome = run(workers, num_rollout=6, save={"load": "s", "save": "s"})
    assert workers.calls[:5] == ["load", "load_state 4", "push_weights 5", "weight_versions", "generate 5 5"]
    assert only(workers.calls, "save") == ["save 5"]
    assert (outcome.first_rollout, outcome.next_rollout) == (5, 6)


def test_a_checkpoint_that_does_not_say_which_prompts_come_next_is_refused() -> None:
    """The run would begin with the first prompt again, and end with exit code 0."""
    workers = RecordingWorkers(checkpoint=(4, {}))
    with pytest.raises(ValueError, match=r"--load s: the checkpoint of rollout 4 does not say which prompts come next"):
        run(workers, num_rollout=6, save={"load": "s", "save": "s"})
    assert only(workers.calls, "generate", "train") == []


def test_a_checkpoint_of_a_run_without_rollouts_begins_with_the_first_prompt() -> None:
    workers = RecordingWorkers(checkpoint=(4, {"rollout": None}))
    run(workers, num_rollout=6, save={"load": "s", "save": "s"})
    assert only(workers.calls, "load_state", "generate") == ["generate 5 5"]


def test_a_finished_run_that_is_resumed_does_nothing() -> None:
    workers = RecordingWorkers(checkpoint=(4, {"rollout": {"cursor": 5}}))
    run(workers, num_rollout=5, save={"load": "s", "save": "s"})
    assert only(workers.calls, "generate", "train", "save") == []


def test_an_earlier_start_saves_its_last_step_although_the_loaded_checkpoint_has_that_id() -> None:
    workers = RecordingWorkers(checkpoint=(1, {"rollout": {"cursor": 2}}))
    run(workers, num_rollout=2, save={"load": "s", "save": "t", "start_rollout_id": 0})
    assert only(workers.calls, "generate", "save") == ["generate 0 0", "generate 1 1", "save 1"]


def test_the_end_of_the_data_ends_the_run_with_one_evaluation_and_a_checkpoint() -> None:
    workers = RecordingWorkers(rollouts=2)
    outcome = run(workers, num_epoch=1, eval_interval=1, save={"save": "s"})
    assert only(workers.calls, "evaluate", "train", "save") == [
        *("evaluate 0", "train 0", "evaluate 1", "train 1", "evaluate 2"),
        "save 1",
    ]
    assert outcome.next_rollout == 2
    assert [i for i, _ in outcome.evals] == [0, 1, 2]


def test_evaluations_before_between_and_after() -> None:
    workers = RecordingWorkers()
    run(workers, num_rollout=5, eval_interval=2, skip_eval_before_train=True)
    assert only(workers.calls, "evaluate") == ["evaluate 2", "evaluate 4", "evaluate 5"]


def test_a_stop_finishes_the_step_and_saves_it() -> None:
    workers, stop = RecordingWorkers(), StopFlag()
    workers.on_call["generate 1 1"] = lambda: stop.set(signal.SIGTERM)
    outcome = run(workers, num_rollout=9, eval_interval=1, stop=stop, save={"save": "s"})
    assert only(workers.calls, "train", "save") == ["train 0", "train 1", "save 1"]
    assert "evaluate 2" not in workers.calls
    assert outcome.stopped_by == signal.SIGTERM


def test_a_step_counts_although_the_stop_cuts_what_follows_it() -> None:
    """It has trained and has its metrics: the summary names it, and that no checkpoint has it."""

    def cut() -> None:
        raise StopRequested("weights 2 to reach the engines")

    for call in ("push_weights 2", "save 1", "save_state 1"):
        workers, outcome = RecordingWorkers(), Outcome()
        workers.on_call[call] = cut
        with pytest.raises(StopRequested):
            run(workers, num_rollout=9, save={"save": "s", "save_interval": 2}, outcome=outcome)
        assert outcome.next_rollout == 2, call
        assert outcome.saved_rollout == (1 if call == "push_weights 2" else None)


def test_rollouts_alone_train_and_push_nothing_and_keep_the_start_weights(tmp_path: Path) -> None:
    workers = RecordingWorkers(trains=False)
    run(workers, num_rollout=2, debug_rollout_only=True, save_debug_rollout_data=str(tmp_path / "{rollout_id}.jsonl"))
    assert workers.calls == ["generate 0 0", "generate 1 0"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.jsonl", "1.jsonl"]


def test_training_alone_asks_no_engine(tmp_path: Path) -> None:
    save_groups([group(0)], tmp_path / "0.jsonl")
    workers = RecordingWorkers()
    data = str(tmp_path / "{rollout_id}.jsonl")
    run(workers, num_rollout=1, debug_train_only=True, load_debug_rollout_data=data, save={"save": "s"})
    assert workers.calls == ["train 0", "save 0"]
    assert workers.rows == [FileRows(tmp_path / "0.jsonl", 0)], "each rank reads the file itself"
    assert workers.saved_state == {"rollout": None}
    assert workers.ranks.saved_files is None
