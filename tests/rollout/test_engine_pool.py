"""Engines that are lost while requests run: these go on elsewhere, or wait. No clock decides."""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from relax_rollout.engines import pool as pool_module
from relax_rollout.engines.base import EngineDied, EngineSilent, GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.pool import EnginePool, EngineState
from relax_rollout.engines.router import EngineRouter
from relax_rollout.loop.context import RolloutProgress
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.settings import RolloutSettings

Make = Callable[..., Any]


class HeldEngine:
    """Answers when it is told to; ``dies`` fails what runs as the client of a dead server does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[str] = []
        self.waiting: dict[str, asyncio.Future[GenerateResult]] = {}
        self.dead: EngineDied | None = None
        self.let_go: list[str] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self.dead is not None:
            raise self.dead
        self.got.append(request.rid)
        future = self.waiting[request.rid] = asyncio.get_running_loop().create_future()
        try:
            return await future
        except asyncio.CancelledError:
            self.let_go.append(request.rid)
            raise
        finally:
            del self.waiting[request.rid]

    def answer(self, rid: str) -> None:
        self.waiting[rid].set_result(GenerateResult(tokens=[7], log_probs=[-1.0], versions=[0], finish_reason="stop"))

    def dies(self, error: EngineDied, *, answers: list[str] | None = None) -> None:
        """All its requests fail, or only some, and the others never answer."""
        self.dead = error
        for rid, future in list(self.waiting.items()):
            if answers is None or rid in answers:
                future.set_exception(error)

    async def abort(self, rid: str | None = None) -> None:
        if self.dead is not None:
            raise self.dead
        if (future := self.waiting.get(rid or "")) is not None and not future.done():
            future.set_result(GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="abort"))


def request(rid: str) -> GenerateRequest:
    return GenerateRequest(rid=rid, input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=4))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def start(router: EngineRouter, *rids: str) -> list[asyncio.Task[GenerateResult]]:
    return [asyncio.create_task(router.generate(request(rid))) for rid in rids]


def two(**options: Any) -> tuple[HeldEngine, HeldEngine, EnginePool]:
    engines: Any = HeldEngine("engine0"), HeldEngine("engine1")
    return (*engines, EnginePool(engines, **options))


async def test_the_requests_of_an_engine_that_dies_go_on_at_another() -> None:
    one, other, pool = two()
    router = EngineRouter(pool, 4)
    tasks = start(router, "a", "b", "c", "d")
    await settle()
    assert (one.got, other.got) == (["a", "c"], ["b", "d"])
    one.dies(EngineDied("engine0 is gone"), answers=["a"])
    await settle()
    assert other.got == ["b", "d", "a", "c"], "the same requests, also the one that never failed by itself"
    assert one.let_go == ["c"]
    assert router.running == {"engine1": 4}
    for rid in ("a", "b", "c", "d"):
        other.answer(rid)
    assert [r.finish_reason for r in await asyncio.gather(*tasks)] == ["stop"] * 4
    assert (router.resent, router.tokens) == (2, 4)
    (report, well) = pool.reports()
    assert (report.state, report.losses, report.error) == (EngineState.LOST, 1, "engine0 is gone")
    assert (well.state, well.losses) == (EngineState.SERVING, 0)


async def test_a_request_goes_to_the_engine_that_it_names_if_that_has_room() -> None:
    one, other, pool = two()
    router = EngineRouter(pool, 2)

    def ask(rid: str, engine: str | None) -> asyncio.Task[GenerateResult]:
        return asyncio.create_task(router.generate(dataclasses.replace(request(rid), engine=engine)))

    tasks = [ask("a", "engine1"), ask("b", "engine1"), ask("c", "engine1"), ask("d", None), ask("e", "engine1")]
    await settle()
    assert (one.got, other.got) == (["c", "d"], ["a", "b"]), "the third finds it full, and none waits for it"
    pool.exclude(other, EngineDied("gone"))  # type: ignore[arg-type]
    one.answer("c")
    one.answer("d")
    await settle()
    assert sorted(one.got[2:]) == ["a", "b"], "the engine that they name is gone"
    for rid in ("a", "b", "e"):
        one.answer(rid)
        await settle()
    assert [r.finish_reason for r in await asyncio.gather(*tasks)] == ["stop"] * 5


async def test_the_limit_follows_the_engines_that_serve() -> None:
    one, other, pool = two()
    router = EngineRouter(pool, 2)
    tasks = start(router, *"abcdef")
    await settle()
    assert (one.got, other.got) == (["a", "c"], ["b", "d"])
    pool.exclude(one, EngineDied("gone"))  # type: ignore[arg-type]
    await settle()
    assert router.running == {"engine1": 2}, "no more than one engine takes"
    other.answer("b")
    await settle()
    assert other.got[2] in ("a", "c"), "before those that were not sent yet"
    again: Any = HeldEngine("engine0")
    assert pool.replace(again) is one
    await settle()
    assert again.got == [], "it has no weights yet"
    pool.include("engine0")
    await settle()
    assert router.running == {"engine0": 2, "engine1": 2}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert router.running == {"engine0": 0, "engine1": 0}


async def test_requests_wait_for_the_only_engine_to_come_back() -> None:
    engine: Any = HeldEngine("engine0")
    pool = EnginePool([engine])
    router = EngineRouter(pool, 2)
    tasks = start(router, "a", "b", "c")
    await settle()
    engine.dies(EngineSilent("engine0 has answered nothing"))
    await settle()
    assert router.waiting_for == "engine0 to restart (1 of 3)"
    again: Any = HeldEngine("engine0")
    pool.replace(again)
    assert router.waiting_for == "engine0 to get the current weights"
    pool.exclude(engine, EngineDied("a late answer of the old server"))
    assert pool.reports()[0].losses == 1, "that is not the engine of now"
    pool.include("engine0")
    await settle()
    assert (len(again.got), router.waiting_for) == (2, "")
    while not all(task.done() for task in tasks):
        for rid in list(again.waiting):
            again.answer(rid)
        await settle()
    assert sorted(again.got) == ["a", "b", "c"]


async def test_three_restarts_then_out_with_the_last_words() -> None:
    engine: Any = HeldEngine("engine0")
    pool = EnginePool([engine])
    router = EngineRouter(pool, 2)
    tasks = start(router, "a", "b")
    for restart in (1, 2):
        await settle()
        engine.dies(EngineDied(f"death {restart}"))
        await settle()
        assert pool.waiting_for == f"engine0 to restart ({restart} of 3)"
        if restart == 2:
            pool.restart_failed("engine0", EngineDied("no memory"))
            assert pool.waiting_for == "engine0 to restart (3 of 3)"
        engine = HeldEngine("engine0")
        pool.replace(engine)
        pool.include("engine0")
    await settle()
    assert len(engine.got) == 2
    engine.dies(EngineDied("gone. Last lines of the log: out of memory"))
    for task in tasks:
        with pytest.raises(EngineDied, match=r"no engine is left after 3 restarts each. engine0: gone.*out of memory"):
            await task
    assert pool.reports()[0].state is EngineState.OUT
    with pytest.raises(EngineDied, match="no engine is left"):
        await router.generate(request("later"))
    pool.restart_failed("engine0", EngineDied("late"))
    assert pool.reports()[0].losses == 4


async def test_one_engine_out_for_good_leaves_the_other() -> None:
    one, other, pool = two(restarts=0)
    router = EngineRouter(pool, 2)
    tasks = start(router, "a", "b")
    await settle()
    one.dies(EngineDied("gone"))
    await settle()
    assert other.got == ["b", "a"]
    assert pool.waiting_for == ""
    for rid in ("a", "b"):
        other.answer(rid)
    await asyncio.gather(*tasks)


async def test_an_abort_ends_a_wait_for_an_engine() -> None:
    engine: Any = HeldEngine("engine0")
    pool = EnginePool([engine])
    router = EngineRouter(pool, 1)
    tasks = start(router, "a", "b")
    await settle()
    engine.dies(EngineDied("gone"))
    await settle()
    await router.abort_all()
    results = await asyncio.gather(*tasks)
    assert [(r.finish_reason, r.tokens) for r in results] == [("abort", [])] * 2


async def test_an_engine_that_is_dead_when_it_is_told_to_abort_is_excluded() -> None:
    one, other, pool = two()
    router = EngineRouter(pool, 1)
    tasks = start(router, "a", "b")
    await settle()
    one.dies(EngineDied("gone"), answers=[])
    await router.abort_all()
    assert [r.finish_reason for r in await asyncio.gather(*tasks)] == ["abort", "abort"]
    assert (one.let_go, [e.name for e in pool.serving]) == (["a"], ["engine1"])
    assert other.got == ["b"]


async def test_a_cancelled_wait_takes_no_place() -> None:
    engine: Any = HeldEngine("engine0")
    router = EngineRouter(EnginePool([engine]), 1)
    first, second, third = start(router, "a", "b", "c")
    await settle()
    engine.answer("a")  # gives its place to the second, which is cancelled before it runs
    await asyncio.sleep(0)
    second.cancel()
    await settle()
    assert first.done()
    assert engine.got[-1] == "c"
    engine.answer("c")
    assert (await third).finish_reason == "stop"
    assert router.running == {"engine0": 0}


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now[0])
    engine: Any = HeldEngine("engine0")
    pool = EnginePool([engine], patience_s=100)
    pool.exclude(engine, EngineDied("gone. Last lines of the log: x"))
    now[0] = 100.0
    pool.check_hope()
    now[0] = 101.0
    with pytest.raises(
        EngineDied, match=r"no engine served for 101 s, waiting for engine0 to restart \(1 of 3\).*log: x"
    ):
        pool.check_hope()


async def test_what_is_done_with_every_engine_leaves_out_the_dead() -> None:
    one, other, pool = two()

    async def version(engine: Any) -> int:
        if engine is one:
            raise EngineDied("gone")
        return 5

    assert await pool.on_each(version) == {"engine1": 5}
    assert pool.reports()[0].error == "engine0: gone"

    async def fails(engine: Any) -> int:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        await pool.on_each(fails)
    pool.replace(HeldEngine("engine0"))  # type: ignore[arg-type]
    assert [e.name for e in pool.serving] == ["engine1"]
    assert [e.name for e in pool.in_use] == ["engine0", "engine1"]
    assert other.got == []


async def test_engines_that_nobody_restarts_end_what_asks_them() -> None:
    engines: Any = [HeldEngine("engine0"), HeldEngine("engine1")]
    router = EngineRouter(engines, 1)
    task, _other = start(router, "a", "b")
    await settle()
    engines[0].dies(EngineDied("the process ended"))
    with pytest.raises(EngineDied, match="engine0: the process ended"):
        await task
    engines[1].answer("b")
    await settle()


async def test_a_rollout_goes_on_when_its_engine_comes_back(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    """A real model generates; no prompt is lost, none is generated twice, and the loop says what it waits for."""
    engine = make_engine()
    engine.dies_after = 3
    pool = EnginePool([engine])
    reports: list[RolloutProgress] = []
    loop = RolloutLoop(
        RolloutSettings(rollout_batch_size=4, n_samples_per_prompt=2, rollout_max_response_len=4),
        engines=pool,
        source=make_source(),
        reward=length_reward,
        tokenizer=tokenizer,
        progress=reports.append,
        progress_interval_s=0.01,
    )
    task = asyncio.create_task(loop.generate(0, 0))
    while not reports:
        await asyncio.sleep(0.01)
    assert reports[-1].waiting_for == "engine0 to restart (1 of 3); first prompt data.jsonl:1"
    again = make_engine()
    pool.replace(again)
    pool.include("engine0")
    result = await task
    assert [g.prompt.prompt_id for g in result.groups] == [0, 1, 2, 3]
    assert loop.ledger.counts()["out"] == 0
    assert all(len(s.tokens) == len(s.versions) > 0 for g in result.groups for s in g.samples)
    assert not again.running


async def test_engines_that_do_not_answer_are_named_and_nothing_is_booked() -> None:
    one, other, pool = two()
    asked = asyncio.Event()

    async def never() -> int:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    async def broken() -> int:
        raise RuntimeError("it says so, so it answers")

    one.weight_version, other.weight_version = never, broken  # type: ignore[attr-defined]
    assert await pool.silent(0.05) == ["engine0"]
    assert asked.is_set()
    assert [report.state for report in pool.reports()] == [EngineState.SERVING] * 2
