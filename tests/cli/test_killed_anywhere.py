"""A run that is killed anywhere, any number of times, trains every prompt once or drops it with a reason.

The real controller, rollout loop, ledger, checkpoint folders and metrics file; the engine answers from a script, the
ranks learn which prompts they have seen. A kill is an exception that every later step raises again, and what was not
flushed to the disk may be cut off then.
"""

import asyncio
import dataclasses
import io
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.settings import ClusterSettings, DebugSettings, RunSettings
from relax_cli.controllers.colocate import ColocateController
from relax_cli.run.progress import Progress
from relax_cli.run.tracking import JsonLinesTracker, Trackers, read_metrics
from relax_cli.workers.group import WorkerGroups
from relax_cli.workers.references import RolloutRows, RowReference
from relax_cli.workers.rollout import RolloutActor, RolloutOutput
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer_group import TrainerGroup
from relax_data.prompts.template import Drops
from relax_data.types import Prompt, Sample, SampleGroup, StepManifest, TrainBatch
from relax_rollout.engines.base import GenerateRequest, GenerateResult
from relax_rollout.engines.pool import EngineReport, EngineState, as_pool
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.loop.runner import GroupRunner
from relax_rollout.settings import RolloutSettings
from relax_rollout.weight_sync.base import PushReport
from relax_train.checkpoint import manifest
from relax_train.checkpoint.file_list import needed_files
from relax_train.checkpoint.folders import begin, prune, rollout_folder
from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
from rich.console import Console

PROMPT = [5, 6]
LONGEST = 5

POINTS = {
    # Where a kill hits, and the most times that the place is passed before.
    "resuming": 0,
    "generating": 40,
    "scoring": 12,
    "filtering": 8,
    "starting a sample again": 0,
    "between close and optimizer step": 5,
    "after the optimizer step": 5,
    "between report and save": 5,
    "saving, rollout worker": 4,
    "saving, ranks": 25,
    "after the save": 4,
    "before the push": 5,
    "after the push": 5,
    "evaluating": 3,
}


class Killed(BaseException):
    """The process is gone."""


LAYOUT = {
    f"{kind}_size": 1
    for kind in (
        "tensor_model_parallel",
        "pipeline_model_parallel",
        "context_parallel",
        "data_parallel",
        "expert_model_parallel",
        "expert_tensor_parallel",
    )
}


class Life:
    """One launch, which ends at the ``after + 1``-th time that it comes to a place."""

    def __init__(self, place: str, after: int) -> None:
        self.place, self.after, self.dead = place, after, False
        self.passed: Counter[str] = Counter()
        self.resumed_half_done = 0
        """Samples with tokens that generation goes on with."""
        self.place_of_fsync = ""
        """Where a flush to the disk happens now."""

    def reach(self, place: str) -> None:
        self.passed[place] += 1
        self.dead |= place == self.place and self.passed[place] > self.after
        if self.dead:
            raise Killed(place)


def answer(prompt_id: int, index: int) -> list[int]:
    """The whole response to a prompt, whatever it is interrupted by."""
    draw = random.Random(f"{prompt_id} {index}")
    return [draw.randrange(20, 90) for _ in range(draw.randint(1, LONGEST + 1))]


class ScriptedEngine:
    """Gives each sample its answer, a token at a turn of the event loop; an abort keeps what there is."""

    def __init__(self, life: Life, draw: random.Random) -> None:
        self.name, self.version = "engine0", 0
        self._life, self._draw = life, draw
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self.continued = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._running.add(request.rid)
        found = re.search(r"-p(\d+)-s(\d+)-", request.rid)
        assert found is not None
        whole, before = answer(int(found[1]), int(found[2])), list(request.input_ids[len(PROMPT) :])
        assert before == whole[: len(before)], "it goes on from its own tokens"
        self.continued += bool(before)
        rest, limit = whole[len(before) :], request.sampling.max_new_tokens
        tokens: list[int] = []
        reason: Any = "length" if len(rest) > limit else "stop"
        for token in rest[:limit]:
            for _ in range(self._draw.choice([1, 1, 2, 5])):
                await asyncio.sleep(0)
            self._life.reach("generating")
            if request.rid in self._aborted:
                reason = "abort"
                break
            tokens.append(token)
        self._running.discard(request.rid)
        n = len(tokens)
        return GenerateResult(
            tokens=tokens, log_probs=[-0.1] * n, versions=[self.version] * n, finish_reason=reason, cached_tokens=0
        )

    async def abort(self, rid: str | None = None) -> None:
        self._aborted |= self._running if rid is None else self._running & {rid}


class Numbers:
    """Prompts 0, 1, 2, ... up to ``n``."""

    drops: Any = ()

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0
        self.drops = Drops()

    def next(self, n: int) -> list[Prompt]:
        first, self.at = self.at, min(self.n, self.at + n)
        return [Prompt(i, 0, f"a:{i + 1}", "1+1=", PROMPT) for i in range(first, self.at)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def restore(self, prompt: Prompt) -> None:
        """Nothing: prompts of text are whole."""

    def __len__(self) -> int:
        return self.n


class Texts:
    """A tokenizer, as far as the loop needs one."""

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


class Scores:
    """A reward."""

    per_group = False

    def __init__(self, life: Life) -> None:
        self._life = life

    async def __call__(self, target: SampleGroup | Sample) -> None:
        assert isinstance(target, Sample)
        await asyncio.sleep(0)
        self._life.reach("scoring")
        target.reward = target.tokens[0] / 8

    async def close(self) -> None:
        pass


@dataclasses.dataclass
class Config:
    run: RunSettings
    train: TrainSettings
    debug: DebugSettings
    cluster: ClusterSettings


class Rollout(RolloutWorker):
    """The rollout actor in this process."""

    def __init__(self, life: Life, actor: RolloutActor, events: asyncio.AbstractEventLoop) -> None:
        self._life, self.real, self._events = life, actor, events

    def _run(self, call: Any) -> Any:
        return self._events.run_until_complete(call)

    def generate(self, rollout_id: int, version: int, *, save_to: Path | None = None) -> RolloutOutput:
        output: RolloutOutput = self._run(self.real.generate(rollout_id, version))
        return output

    def rows(self, rollout_id: int) -> RolloutRows:
        return RolloutRows(None, rollout_id)  # type: ignore[arg-type]

    def evaluate(self, version: int) -> dict[str, float]:
        self._life.reach("evaluating")
        return {"eval/held-out/reward": 0.5}

    def check_engines(self) -> list[EngineReport]:
        return [EngineReport("engine0", EngineState.SERVING, 0, "")]

    def engine_reports(self) -> list[EngineReport]:
        return self.check_engines()

    def weight_versions(self) -> list[int]:
        (engine,) = as_pool(self.real._loop.engines).serving
        assert isinstance(engine, ScriptedEngine)
        self._life.reach("after the push")
        return [engine.version]

    def save_state(self, directory: str, rollout_id: int) -> dict[str, Any]:
        self._life.reach("between report and save")
        self._life.place_of_fsync = "saving, rollout worker"
        state: dict[str, Any] = self._run(self.real.save_state(directory, rollout_id))
        return state

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        self._run(self.real.load_state(state, folder))
        ledger = self.real._loop.ledger
        self._life.resumed_half_done = sum(
            bool(x.tokens) and not x.status.finished for g in ledger.groups() for x in g.samples
        )
        self._life.reach("resuming")


class Ranks(TrainerGroup):
    """Ranks whose weights are the list of what they have seen: rollout id and prompts of each step."""

    def __init__(self, life: Life, rollout: Rollout, engine: ScriptedEngine, run: "Run") -> None:
        self._life, self._rollout, self._engine, self._of = life, rollout, engine, run
        self.weights: list[tuple[int, list[int]]] = []

    def train(self, manifest: StepManifest, rows: RowReference, rollout_id: int) -> dict[str, float]:
        self._life.reach("between close and optimizer step")
        batch = self._rollout.real._rows
        assert batch is not None
        self._of.check_batch(batch, rollout_id)
        self.weights.append((rollout_id, [int(i) for i in dict.fromkeys(manifest.group_ids)]))
        self._life.reach("after the optimizer step")
        return {"train/loss": 0.0}

    def push_weights(self, version: int, engines: Sequence[str] | None = None) -> PushReport:
        self._life.reach("before the push")
        self._engine.version = version
        return PushReport()

    def save(self, directory: str, rollout_id: int, extra: dict[str, Any], files: Path | None = None) -> None:
        self._life.place_of_fsync = "saving, ranks"
        target = rollout_folder(Path(directory), rollout_id)
        unfinished = target.with_name(target.name + ".tmp")
        begin(unfinished, files)
        content = {"format": manifest.FORMAT, "rollout_id": rollout_id, "world_size": 1, "extra": extra}
        content |= {"dtype": "float32", "scheduler": {"num_steps": rollout_id + 1}}
        content |= {"layout": LAYOUT, "model": {}, "optimizer": {"name": manifest.OPTIMIZER, "steps": rollout_id + 1}}
        (unfinished / manifest.MANIFEST).write_text(json.dumps(content))
        self._life.reach("saving, ranks")
        for name in needed_files(unfinished, content):
            (unfinished / name).touch()
        (unfinished / "weights").write_text(json.dumps(self.weights))
        self._life.reach("saving, ranks")
        manifest.complete(unfinished, target)
        if self._of.keep is not None:
            prune(Path(directory), self._of.keep)
        self._life.reach("after the save")

    def load(self, directory: str) -> manifest.Loaded | None:
        found = manifest.find(Path(directory))
        if found is None:
            return None
        folder, content = found
        assert manifest.files_problem(folder, content) is None
        self.weights = [(i, ids) for i, ids in json.loads((folder / "weights").read_text())]
        return manifest.Loaded(content["rollout_id"], content["extra"], optimizer=True, folder=folder)


class Workers(WorkerGroups):
    """Both of them."""

    def __init__(self, rollout: Rollout, ranks: Ranks) -> None:
        self._rollout, self._trainers = rollout, ranks

    @property
    def shares_gpu(self) -> bool:
        return False


class Run:
    """Launches of one run, until its prompts are used up."""

    def __init__(self, folder: Path, seed: int, events: asyncio.AbstractEventLoop) -> None:
        self.draw = draw = random.Random(seed)
        self.folder, self.events = folder, events
        restarts = list(POINTS)[seed % len(POINTS)] == "starting a sample again"  # it is to die there, so it gets there
        self.total = draw.randint(8 if restarts else 1, 12)
        self.rejected = {i for i in range(self.total) if draw.random() < 0.2}
        batch = draw.randint(1, 3)
        partial = draw.random() < 0.6 and not restarts
        self.max_staleness = draw.choice([None, 0, 1, 2])
        self.settings = RolloutSettings(
            rollout_batch_size=batch,
            over_sampling_batch_size=batch + draw.randint(2 if restarts else 0, 3),
            n_samples_per_prompt=draw.randint(1, 2),
            rollout_max_response_len=LONGEST,
            partial_rollout=partial,
            partial_rollout_max_aborted_count=draw.choice([None, 1, 3]) if partial else None,
        )
        self.keep = draw.choice([None, 1])
        evals = draw.choice([None, 1, 2])
        self.config = Config(
            RunSettings(eval_interval=evals),
            TrainSettings(
                model=ModelSettings(hf_checkpoint="m"),
                checkpoint=CheckpointSettings(
                    save=str(folder / "s"), load=str(folder / "s"), save_interval=draw.choice([None, 1, 1, 2, 3])
                ),
            ),
            DebugSettings(),
            ClusterSettings(),
        )
        self.kills: Counter[str] = Counter()
        self.continued = self.resumed = 0

    def check_batch(self, batch: TrainBatch, rollout_id: int) -> None:
        n = self.settings.n_samples_per_prompt
        for i, prompt_id in enumerate(batch.group_ids):
            assert batch.tokens[i].tolist() == [*PROMPT, *answer(int(prompt_id), i % n)[:LONGEST]]
        if self.max_staleness is not None:
            assert (rollout_id - batch.oldest_versions <= self.max_staleness).all()
        assert (batch.oldest_versions <= rollout_id).all()

    def start(self, life: Life) -> Workers:
        def keep(group: SampleGroup) -> tuple[bool, str]:
            life.reach("filtering")
            return group.prompt.prompt_id not in self.rejected, "unlucky"

        engine = ScriptedEngine(life, self.draw)
        actor = RolloutActor.__new__(RolloutActor)  # without the model and the files that it opens
        actor._config = self.config  # type: ignore[assignment]
        actor._profiler = actor._rows = actor._processor = None
        actor._loop = RolloutLoop(
            self.settings,
            engines=[engine],  # type: ignore[list-item]
            source=Numbers(self.total),
            reward=Scores(life),
            tokenizer=Texts(),
            filter=keep,
            max_staleness=self.max_staleness,
            max_rejected=10**6,
        )
        actor._engines = as_pool(actor._loop.engines)
        rollout = Rollout(life, actor, self.events)
        return Workers(rollout, Ranks(life, rollout, engine, self))

    def launch(self, life: Life) -> Workers | None:
        """The workers when the run has ended, None when it was killed."""
        workers = self.start(life)
        trackers = Trackers([JsonLinesTracker(self.folder / "metrics.jsonl")])
        progress = Progress(Console(file=io.StringIO()))
        controller = ColocateController(self.config, workers, trackers, progress, StopFlag())  # type: ignore[arg-type]
        try:
            controller.run()
        except BaseException:
            if not life.dead:
                raise
            self.kills[life.place] += 1
            self.lose_unwritten()
            return None
        finally:
            trackers.__exit__(None, None, None)
            engine = as_pool(workers.rollout.real._loop.engines).serving[0]  # type: ignore[attr-defined]
            assert isinstance(engine, ScriptedEngine)
            self.continued += engine.continued
            self.resumed += life.resumed_half_done
        return workers

    def lose_unwritten(self) -> None:
        """A kill in the middle of a write: what belongs to no checkpoint is cut off somewhere."""
        for file in (self.folder / "s").glob("*.tmp/*"):
            os.truncate(file, self.draw.randint(0, file.stat().st_size))

    def go(self, lives: Iterator[Life]) -> None:
        workers = None
        while workers is None:
            self.life = next(lives, Life("", 0))
            workers = self.launch(self.life)
        ranks, ledger = workers.trainers, workers.rollout.real._loop.ledger  # type: ignore[attr-defined]
        assert isinstance(ranks, Ranks)
        steps = [i for i, _ in ranks.weights]
        assert steps == list(range(len(steps))), "steps go on without a gap"
        trained = sorted(i for _, ids in ranks.weights for i in ids)
        assert trained == sorted(set(range(self.total)) - self.rejected), "every prompt once"
        assert ledger.dropped == ({"unlucky": len(self.rejected)} if self.rejected else {})
        assert ledger.trained == len(trained)
        ledger.check(self.total)
        assert ledger.groups() == []
        rows = [m["step"] for m in read_metrics(self.folder / "metrics.jsonl") if "time/step" in m]
        assert rows == steps, "one row of metrics a step"
        assert not list((self.folder / "s").glob("rollout_*.tmp")), "nothing unfinished is left"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Run]]:
    """Makes runs, whose flushes to the disk and restarts of samples are places to be killed at."""
    events, made = asyncio.new_event_loop(), []

    def make(seed: int) -> Run:
        folder = tmp_path / str(seed)
        folder.mkdir()
        made.append(Run(folder, seed, events))
        return made[-1]

    def fsync(handle: int) -> None:
        made[-1].life.reach(made[-1].life.place_of_fsync)

    restart, rename = GroupRunner.restart, Path.rename

    def restart_and_die(self: GroupRunner, sample: Sample) -> None:
        restart(self, sample)
        made[-1].life.reach("starting a sample again")

    def rename_and_die(self: Path, target: Path) -> Path:
        made[-1].life.reach(made[-1].life.place_of_fsync)
        moved = rename(self, target)
        made[-1].life.reach(made[-1].life.place_of_fsync)
        return moved

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(GroupRunner, "restart", restart_and_die)
    monkeypatch.setattr(Path, "rename", rename_and_die)
    yield make
    events.close()


@pytest.mark.parametrize("schedules", [140, pytest.param(2100, marks=pytest.mark.slow)])
def test_killed_anywhere_every_prompt_is_trained_once_or_dropped(runs: Callable[[int], Run], schedules: int) -> None:
    """The slow one takes about 30 s of CPU time."""
    kills: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(schedules):
        run = runs(seed)
        first = list(POINTS)[seed % len(POINTS)]
        places = [first, *run.draw.choices(list(POINTS), k=run.draw.randint(0, 2))]
        try:
            run.go(Life(place, run.draw.randint(0, POINTS[place])) for place in places)
        except BaseException as error:
            error.add_note(f"seed {seed}, killed at {dict(run.kills)}")
            raise
        shutil.rmtree(run.folder)
        kills += run.kills
        seen["continued"] += run.continued
        seen["resumed half done"] += run.resumed
    assert set(kills) == set(POINTS), kills
    assert min(kills.values()) > schedules / 100, kills
    assert min(seen["continued"], seen["resumed half done"]) > schedules / 40, seen
