"""Engines that are lost in a colocate run: what the driver asks of whom, in which order. Actors only write it down."""

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from relax_cli.cluster.waits import StopFlag
from relax_cli.config.settings import DebugSettings, RunSettings
from relax_cli.controllers import engine_recovery
from relax_cli.controllers.colocate import ColocateController
from relax_cli.run.progress import Progress
from relax_cli.run.tracking import Trackers
from relax_cli.workers.engine_group import EngineGroup
from relax_cli.workers.group import WorkerGroups
from relax_cli.workers.references import RolloutRows, RowReference
from relax_cli.workers.rollout import RolloutOutput
from relax_cli.workers.rollout_worker import RolloutWorker
from relax_cli.workers.trainer_group import TrainerGroup
from relax_data.types import Prompt, SampleGroup, SampleStatus, StepManifest, TrainBatch
from relax_rollout.engines.base import EngineAddress, EngineDied
from relax_rollout.engines.pool import EnginePool, EngineReport, EngineState
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_train.settings import CheckpointSettings, ModelSettings, TrainSettings
from rich.console import Console

if TYPE_CHECKING:
    from relax_rollout.engines.base import MemoryTag

LOOKS, MOST_LOOKS = 8, 50
"""Times that the driver looks while a rollout runs: with an engine, and at most until there is one."""
Event = Callable[["World"], None]


class World:
    """Two engines or one, and the calls that reach the actors.

    Args:
        during: what happens in the middle of a call, by its line in ``calls``; each once.
        starts: False for restarts that fail.
        loads: times that the driver looks before a server has loaded, by engine; 1 for others.
    """

    def __init__(
        self,
        engines: int = 2,
        *,
        during: dict[str, Event] | None = None,
        starts: bool = True,
        loads: Mapping[str, int] | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.pool = EnginePool([self.client(f"engine{i}", 0) for i in range(engines)])
        self.silently_dead: set[str] = set()
        self.starts, self.loads = starts, dict(loads or {})
        self._during = dict(during or {})
        self._launches = 0

    @staticmethod
    def client(name: str, launch: int) -> Any:
        return SimpleNamespace(name=name, launch=launch)

    def calls_of(self, method: str) -> list[str]:
        return [c for c in self.calls if c.split()[0] == method]

    def note(self, *words: object) -> None:
        self.calls.append(" ".join(map(str, words)))
        if (event := self._during.pop(self.calls[-1], None)) is not None:
            event(self)

    def lose(self, name: str) -> None:
        """A request shows that the engine is dead."""
        (engine,) = [e for e in self.pool.in_use if e.name == name]
        self.pool.exclude(engine, EngineDied(f"{name} (http://x) is gone. Last lines of the log:\n  killed"))

    def dies_unseen(self, name: str) -> None:
        """Nobody asks it anything now."""
        self.silently_dead.add(name)

    def notice(self) -> None:
        for name in sorted(self.silently_dead):
            self.lose(name)
        self.silently_dead.clear()

    def address(self, name: str) -> EngineAddress:
        self._launches += 1
        return EngineAddress(name, f"http://launch{self._launches}")


class Rollout(RolloutWorker):
    def __init__(self, world: World) -> None:
        self._world = world

    def generate(self, rollout_id: int, version: int, *, save_to: Path | None = None) -> RolloutOutput:
        self._world.note("generate", rollout_id)
        assert self.meanwhile is not None
        for look in range(MOST_LOOKS):
            self._world.pool.check_hope()
            self.meanwhile()
            if self._world.pool.serving and look >= LOOKS:
                break
        assert self._world.pool.serving, "nobody came back"
        return RolloutOutput(1, StepManifest.of(TrainBatch.from_groups([group(rollout_id)], rollout_id)), {})

    def rows(self, rollout_id: int) -> RolloutRows:
        return RolloutRows(None, rollout_id)  # type: ignore[arg-type]

    def poll_engines(self) -> list[EngineReport]:
        return self._world.pool.reports()

    def engine_reports(self) -> list[EngineReport]:
        return self._world.pool.reports()

    def check_engines(self) -> list[EngineReport]:
        self._world.notice()
        return self._world.pool.reports()

    def replace_engine(self, address: EngineAddress) -> None:
        self._world.pool.replace(self._world.client(address.name, 1))

    def engine_not_restarted(self, name: str, why: str) -> None:
        self._world.pool.restart_failed(name, EngineDied(why))

    def include_engine(self, name: str) -> None:
        self._world.note("include", name)
        self._world.pool.include(name)

    def weight_versions(self) -> list[int]:
        return [int(self._world.calls_of("push_weights")[-1].split()[1])] * len(self._world.pool.in_use)

    def release_memory(self) -> None:
        self._world.notice()
        self._world.note("release", *(e.name for e in self._world.pool.in_use))

    def resume_memory(self, tag: "MemoryTag") -> None:
        self._world.note("resume", tag, *(e.name for e in self._world.pool.in_use))


class Trainers(TrainerGroup):
    def __init__(self, world: World) -> None:
        self._world = world

    def connect(self, engines: Sequence[EngineAddress]) -> None:
        self._world.note("connect", *(a.url.removeprefix("http://") for a in engines))

    def train(self, manifest: StepManifest, rows: RowReference, rollout_id: int) -> dict[str, float]:
        self._world.note("train", rollout_id)
        return {}

    def push_weights(self, version: int, engines: Sequence[str] | None = None) -> PushReport:
        assert engines, "nothing is sent to nobody"
        self._world.note("push_weights", version, *engines)
        if set(engines) & self._world.silently_dead:
            raise WeightPushFailed("engine0 is gone. Last lines of the log")
        return PushReport()

    def measure_room(self) -> None:
        assert len(self._world.pool.serving) == len(self._world.pool.in_use), "only while all engines serve"

    def free_resident(self) -> None:
        self._world.note("free_resident")

    def sleep(self) -> None:
        self._world.note("sleep")

    def wake(self) -> None:
        self._world.note("wake")


class Engines(EngineGroup):
    def __init__(self, world: World) -> None:
        self._world = world
        self.addresses = [EngineAddress(e.name, f"http://launch0-{e.name}") for e in world.pool.serving]
        self._loading: dict[str, int] = {}

    def begin_restart(self, name: str) -> None:
        self._world.note("restart", name)
        self._loading[name] = self._world.loads.get(name, 1)

    def restarted(self, *, wait: bool = False) -> dict[str, EngineAddress | str]:
        found: dict[str, EngineAddress | str] = {}
        for name, looks in list(self._loading.items()):
            self._loading[name] = looks - 1
            if looks > 0 and not wait:
                continue
            del self._loading[name]
            found[name] = address = self._world.address(name) if self._world.starts else "it ended with exit code 1"
            if isinstance(address, EngineAddress):
                self.addresses = [address if a.name == name else a for a in self.addresses]
        return found

    def end(self, names: Collection[str]) -> None:
        self._world.note("end", *names)


class Workers(WorkerGroups):
    def __init__(self, world: World, shares_gpu: bool) -> None:
        self._rollout, self._trainers, self._engines = Rollout(world), Trainers(world), Engines(world)
        self._shares_gpu = shares_gpu

    @property
    def shares_gpu(self) -> bool:
        return self._shares_gpu


def group(prompt_id: int) -> SampleGroup:
    prompt = Prompt(prompt_id=prompt_id, epoch=0, source=f"a:{prompt_id}", text="1+1=", input_ids=[5])
    found = SampleGroup.start(prompt, 1)
    found.samples[0].append([7], [-0.5], [0])
    found.samples[0].status, found.samples[0].response, found.samples[0].reward = SampleStatus.COMPLETED, "2", 1.0
    return found


def run(
    world: World, monkeypatch: pytest.MonkeyPatch, *, shares_gpu: bool = False, rollouts: int = 1, **debug: Any
) -> str:
    """The lines for the user."""
    monkeypatch.setattr(engine_recovery, "DYING_S", 0.0)
    config: Any = SimpleNamespace(
        run=RunSettings(num_rollout=rollouts),
        train=TrainSettings(model=ModelSettings(hf_checkpoint="m"), checkpoint=CheckpointSettings()),
        debug=DebugSettings(**debug),
    )
    text = io.StringIO()
    progress = Progress(Console(file=text, width=400))
    ColocateController(config, Workers(world, shares_gpu), Trackers([]), progress, StopFlag()).run()
    return text.getvalue()


PUSH_TO_BOTH = "push_weights {} engine0 engine1"


def test_an_engine_joins_at_once_where_nothing_shares_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(during={"generate 0": lambda w: w.lose("engine0")})
    told = run(world, monkeypatch)
    assert world.calls == [
        PUSH_TO_BOTH.format(0),
        *("generate 0", "restart engine0"),
        *("connect launch1 launch0-engine1", "push_weights 0 engine0", "include engine0"),
        *("train 0", PUSH_TO_BOTH.format(1)),
    ]
    assert "engine0 was lost (engine0 (http://x) is gone): restarting it, 1 of 3; its requests go on at engine1" in told
    assert "engine0 is up again after 0 s" in told
    assert "engine0 joined with the weights of version 0" in told


def test_on_shared_gpus_it_waits_for_the_next_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others generate meanwhile, so that the trainer may not wake; and it may not wake while a server loads."""
    world = World(during={"generate 0": lambda w: w.lose("engine0")}, loads={"engine0": 2 * LOOKS})
    run(world, monkeypatch, shares_gpu=True, rollouts=2)
    first = world.calls.index("generate 0")
    assert world.calls[first : world.calls.index("generate 1") + 1] == [
        *("generate 0", "free_resident", "restart engine0"),
        *("release engine0 engine1", "wake", "train 0"),
        *("resume weights engine0 engine1", "connect launch1 launch0-engine1", PUSH_TO_BOTH.format(1), "sleep"),
        *("resume kv_cache engine0 engine1", "include engine0"),
        "generate 1",
    ]


def test_without_any_engine_on_shared_gpus_the_weights_are_brought_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, during={"generate 1": lambda w: w.lose("engine0")})
    told = run(world, monkeypatch, shares_gpu=True, rollouts=2)
    first, last = world.calls.index("generate 1"), world.calls.index("train 1")
    assert world.calls[first:last] == [
        *("generate 1", "free_resident", "restart engine0"),
        *("release engine0", "wake", "resume weights engine0"),
        *("connect launch1", "push_weights 1 engine0", "sleep", "resume kv_cache engine0", "include engine0"),
        *("release engine0", "wake"),
    ]
    assert "1 of 3; its requests wait for it" in told


def test_a_second_server_that_loads_is_waited_for_before_the_trainer_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(world: World) -> None:
        world.lose("engine0")
        world.lose("engine1")

    world = World(during={"generate 0": both}, loads={"engine1": 5})
    run(world, monkeypatch, shares_gpu=True)
    first = world.calls.index("generate 0")
    assert world.calls[first : first + 8] == [
        *("generate 0", "free_resident", "restart engine0", "free_resident", "restart engine1"),
        *("release engine0 engine1", "wake", "resume weights engine0 engine1"),
    ]
    assert PUSH_TO_BOTH.format(0) in world.calls[first:]


def test_an_engine_that_died_while_nothing_generated_is_left_out_of_the_push(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(during={"train 0": lambda w: w.dies_unseen("engine0")})
    run(world, monkeypatch, rollouts=2)
    after = world.calls[world.calls.index("train 0") :]
    assert after[:3] == ["train 0", "push_weights 1 engine1", "generate 1"]
    assert after[3:7] == [
        *("restart engine0", "connect launch1 launch0-engine1", "push_weights 1 engine0", "include engine0")
    ]


def test_a_lost_engine_ends_before_the_trainer_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung one would keep its memory. It restarts when the trainer sleeps again."""
    world = World(during={"generate 0": lambda w: w.dies_unseen("engine1")})
    told = run(world, monkeypatch, shares_gpu=True, rollouts=2)
    calls = world.calls
    at = calls.index("release engine0")
    assert calls[at : at + 3] == ["release engine0", "end engine1", "wake"]
    assert calls.index("restart engine1") > calls.index("sleep", at)
    assert "restarting it, 1 of 3; its requests go on at engine0" in told


def test_a_push_in_which_an_engine_dies_is_repeated_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(during={PUSH_TO_BOTH.format(1): lambda w: w.dies_unseen("engine0")})
    told = run(world, monkeypatch, rollouts=2)
    at = world.calls.index(PUSH_TO_BOTH.format(1))
    assert world.calls[at : at + 3] == [PUSH_TO_BOTH.format(1), "push_weights 1 engine1", "generate 1"]
    assert "the push of version 1 is repeated, to engine1" in told


def test_a_push_that_fails_though_all_live_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world: World) -> None:
        raise WeightPushFailed("no room")

    with pytest.raises(WeightPushFailed, match="no room"):
        run(World(during={PUSH_TO_BOTH.format(1): refuse}), monkeypatch)


def test_a_repeated_push_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(name: str) -> Event:
        return lambda w: w.dies_unseen(name)

    world = World(during={PUSH_TO_BOTH.format(1): die("engine0"), "push_weights 1 engine1": die("engine1")})
    with pytest.raises(WeightPushFailed):
        run(world, monkeypatch)


def test_the_only_engine_dies_in_a_push_and_gets_it_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, during={"push_weights 1 engine0": lambda w: w.dies_unseen("engine0")})
    run(world, monkeypatch, shares_gpu=True, rollouts=2)
    at = world.calls.index("push_weights 1 engine0")
    assert world.calls[at:][:10] == [
        *("push_weights 1 engine0", "sleep", "resume kv_cache", "generate 1", "free_resident", "restart engine0"),
        *("release engine0", "wake", "resume weights engine0", "connect launch1"),
    ]
    assert "include engine0" in world.calls


def test_restarts_that_fail_count_and_the_last_loss_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(during={"generate 0": lambda w: w.lose("engine0")}, starts=False)
    told = run(world, monkeypatch)
    assert world.calls_of("restart") == ["restart engine0"] * 3
    assert "end engine0" in world.calls
    assert "engine0 was lost (engine0: it ended with exit code 1): after 3 restarts it is out for good; engine1" in told
    assert [r.state for r in world.pool.reports()] == [EngineState.OUT, EngineState.SERVING]


def test_without_an_engine_left_the_rollout_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, during={"generate 0": lambda w: w.lose("engine0")}, starts=False)
    with pytest.raises(EngineDied, match="no engine is left after 3 restarts each"):
        run(world, monkeypatch)


def test_a_run_that_trains_nothing_takes_an_engine_in_as_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, during={"generate 0": lambda w: w.lose("engine0")})
    run(world, monkeypatch, debug_rollout_only=True)
    assert world.calls[:3] == ["generate 0", "restart engine0", "include engine0"]
