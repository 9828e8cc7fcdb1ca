"""Groups that are generated in the background while steps train and weights are pushed, on a clock that is moved."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from relax_data.prompts.ledger import PromptState
from relax_data.types import Sample, SampleGroup
from relax_rollout.engines.base import GenerateRequest
from relax_rollout.engines.pool import EnginePool
from relax_rollout.engines.usage import EngineUsage
from relax_rollout.loop.producer import Producer
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.settings import RolloutSettings
from rollout.virtual_clock import RateEngine, run_virtual

Make = Callable[..., Any]


class LengthReward:
    """The length of the response."""

    per_group = False

    async def __call__(self, target: SampleGroup | Sample) -> None:
        assert isinstance(target, Sample)
        target.reward = float(len(target.tokens))

    async def close(self) -> None:
        pass


@dataclasses.dataclass
class Pipeline:
    """A run without a trainer: steps and pushes take the seconds that they are told to."""

    loop: RolloutLoop
    engines: list[RateEngine]
    pool: EnginePool
    producer: Producer
    version: int = 0

    async def push(self, version: int, seconds: float) -> None:
        await self.producer.begin_push()
        assert all(e.running == 0 for e in self.engines), "everything rests during a push"
        await asyncio.sleep(seconds)
        for engine in self.engines:
            engine.version = version
        self.producer.end_push(version)

    async def step(self, step: int, train_s: float, push_s: float) -> list[SampleGroup]:
        result = await self.producer.next_step(step)
        if result.groups:
            await asyncio.sleep(train_s)
            self.producer.settle(step)
            await self.push(step + 1, push_s)
        return result.groups


def pipeline(
    source: Any,
    tokenizer: Any,
    length: Callable[[GenerateRequest], int],
    *,
    rate: float,
    staleness: int,
    engines: int = 1,
    filter: Any = None,
    end: int | None = None,
    **options: Any,
) -> Pipeline:
    settings = RolloutSettings(**({"n_samples_per_prompt": 1, "partial_rollout": True} | options))
    all_engines: list[Any] = [RateEngine(length, rate=rate / engines, name=f"engine{i}") for i in range(engines)]
    pool = EnginePool(all_engines, clock=asyncio.get_running_loop().time)
    loop = RolloutLoop(
        settings,
        engines=pool,
        source=source,
        reward=LengthReward(),
        tokenizer=tokenizer,
        filter=filter,
        max_staleness=staleness,
        max_rejected=10**6,
    )
    return Pipeline(loop, all_engines, pool, Producer(loop, pool, end=end))


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("train_s", [1.0, 2.0, 0.5])
def test_generation_and_training_overlap(make_source: Make, tokenizer: Any, staleness: int, train_s: float) -> None:
    """A batch takes the engine 1.0 s, a push 0.05 s: a step takes the longer of the two sides and the push."""

    async def run() -> None:
        loop_time = asyncio.get_running_loop().time
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 400,
            rate=8 * 400.0,
            staleness=staleness,
            rollout_batch_size=4,
            n_samples_per_prompt=2,
            over_sampling_batch_size=4 * (staleness + 1),
            rollout_max_response_len=400,
        )
        await run.push(0, 0.05)
        for step in range(4):
            await run.step(step, train_s, 0.05)
        run.pool.usage.take()
        begin = loop_time()
        for step in range(4, 24):
            groups = await run.step(step, train_s, 0.05)
            assert len(groups) == 4
        mean = (loop_time() - begin) / 20
        longer = max(1.0, train_s)
        assert mean >= 0.98 * (longer + 0.05), "less than either side takes cannot be, but for what was begun before"
        assert mean <= 1.05 * longer + 0.05
        result = await run.producer.next_step(24)  # the shares of the step before it
        shares = {name: result.metrics[f"async/engine_{name}_share"] for name in ("busy", "idle", "paused")}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["paused"] == pytest.approx(0.05 / mean, abs=0.02)
        assert shares["busy"] == pytest.approx(1.0 / mean, abs=0.05)
        closed = result.metrics["async/admission_closed_share"]
        assert closed == pytest.approx(1 - shares["paused"], abs=0.02), "the engine would take far more requests"
        # All that the gate allows; a trainer that is behind takes its groups before others start after the push.
        assert result.metrics["rollout/open_groups"] == 4 * (staleness + (train_s < 1.0))
        await run.producer.stop()

    run_virtual(run())


def test_the_gate_is_not_what_holds_up_engines_that_are_full(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 100,
            rate=400.0,
            staleness=2,
            rollout_batch_size=4,
            over_sampling_batch_size=12,
            rollout_max_response_len=100,
        )
        run.producer = Producer(run.loop, run.pool, concurrency=1)
        await run.push(0, 0.05)
        for step in range(4):
            await run.step(step, 0.1, 0.05)
        result = await run.producer.next_step(4)
        assert result.metrics["async/admission_closed_share"] == pytest.approx(0.0, abs=0.02)
        await run.producer.stop()

    run_virtual(run())


def test_without_staleness_nothing_is_generated_while_a_step_trains(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 100,
            rate=100.0,
            staleness=0,
            rollout_batch_size=1,
            rollout_max_response_len=100,
        )
        await run.push(0, 0.0)
        for step in range(3):
            result = await run.producer.next_step(step)
            assert result.metrics["rollout/open_groups"] == 1.0, "its own"
            await asyncio.sleep(5.0)
            assert run.engines[0].running == 0
            assert set(result.groups[0].samples[0].versions) == {step}
            run.producer.settle(step)
            await run.push(step + 1, 0.0)
        await run.producer.stop()

    run_virtual(run())


def test_a_push_is_not_seen_by_generate_functions(make_source: Make, tokenizer: Any) -> None:
    """Tokens so far stay, the rest is asked of the new weights, and the columns say which token is whose."""

    async def run() -> None:
        lengths: list[tuple[int, int]] = []

        def length(request: GenerateRequest) -> int:
            lengths.append((len(request.input_ids), request.sampling.max_new_tokens))
            return 1000

        run = pipeline(
            make_source(),
            tokenizer,
            length,
            rate=10.0,
            staleness=3,
            rollout_batch_size=1,
            rollout_max_response_len=10,
        )
        await run.push(0, 0.0)
        for version in (1, 2):
            await asyncio.sleep(0.35)
            await run.push(version, 1.0)
        # The gate does not know of these steps: the group is of version 0 and step 0 takes it.
        result = await run.producer.next_step(0)
        (sample,) = result.groups[0].samples
        assert sample.versions == [0] * 3 + [1] * 3 + [2] * 4
        prompt = len(sample.prompt.input_ids)
        assert lengths[:3] == [(prompt, 10), (prompt + 3, 7), (prompt + 6, 4)]
        assert sample.aborted_count == 2
        assert result.metrics["rollout/kept_tokens"] == 3 + 6
        await run.producer.stop()

    run_virtual(run())


def test_a_push_waits_for_samples_that_were_interrupted_too_often(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 100,
            rate=10.0,
            staleness=3,
            rollout_batch_size=1,
            over_sampling_batch_size=1,
            rollout_max_response_len=100,
            partial_rollout_max_aborted_count=2,
        )
        await run.push(0, 0.0)
        waited = []
        for version in (1, 2, 3):
            await asyncio.sleep(1.0)
            begin = asyncio.get_running_loop().time()
            await run.push(version, 0.0)
            waited.append(asyncio.get_running_loop().time() - begin)
        assert waited[:2] == [0.0, 0.0]
        assert waited[2] == pytest.approx(7.0, abs=0.2)
        (group,) = run.loop.ledger.ready
        assert group.samples[0].aborted_count == 2
        await run.producer.stop()

    run_virtual(run())


def test_without_partial_rollout_a_push_waits_for_all(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 100,
            rate=100.0,
            staleness=1,
            rollout_batch_size=2,
            over_sampling_batch_size=4,
            rollout_max_response_len=100,
            partial_rollout=False,
        )
        await run.push(0, 0.0)
        for step in range(4):
            groups = await run.step(step, 0.1, 0.0)
            assert all(len(set(s.versions)) == 1 for g in groups for s in g.samples)
            assert all(s.aborted_count == 0 for g in groups for s in g.samples)
        await run.producer.stop()

    run_virtual(run())


def test_an_error_reaches_who_waits_and_leaves_nothing_running(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        def broken(group: SampleGroup) -> bool:
            raise KeyError("no such thing")

        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 10 + 90 * (len(request.input_ids) % 2),
            rate=100.0,
            staleness=1,
            filter=broken,
            rollout_batch_size=2,
            over_sampling_batch_size=4,
            rollout_max_response_len=100,
        )
        await run.push(0, 0.0)
        with pytest.raises(ValueError, match="no such thing"):
            await run.producer.next_step(0)
        with pytest.raises(ValueError, match="no such thing"):
            await run.producer.begin_push()
        assert run.engines[0].running == 0
        assert len(run.loop.ledger.waiting) == 4
        await run.producer.stop()

    run_virtual(run())


def test_nothing_is_generated_for_steps_that_never_come(make_source: Make, tokenizer: Any) -> None:
    async def run() -> None:
        run = pipeline(
            make_source(),
            tokenizer,
            lambda request: 20 + 80 * (len(request.input_ids) % 2),
            rate=100.0,
            staleness=2,
            filter=lambda group: group.prompt.prompt_id % 5 != 0,
            end=5,
            rollout_batch_size=2,
            over_sampling_batch_size=6,
            rollout_max_response_len=100,
        )
        await run.push(0, 0.0)
        for step in range(5):
            assert len(await run.step(step, 1.0, 0.1)) == 2
        await asyncio.sleep(100)
        assert run.engines[0].running == 0
        assert not run.loop.ledger.groups()
        counts = run.loop.ledger.counts()
        assert (counts["trained"], run.loop.ledger.handed_out) == (10, 10 + counts["dropped"])
        assert counts["dropped"] > 0
        await run.producer.stop()

    run_virtual(run())


def test_usage_counts_every_pause_of_a_step() -> None:
    now = 0.0
    usage = EngineUsage(["a", "b"], lambda: now)

    def at(seconds: float) -> None:
        nonlocal now
        now = seconds

    at(1.0)
    usage.began("a")
    at(3.0)
    usage.pause(True)
    at(3.5)
    usage.pause(False)
    usage.began("a")
    at(5.0)
    usage.ended("a")
    usage.pause(True)
    at(6.0)
    usage.pause(False)
    at(8.0)
    usage.ended("a")
    at(10.0)
    times = usage.take()
    assert [times["a"].share(state) for state in ("busy", "idle", "paused")] == [0.55, 0.3, 0.15]
    assert [times["b"].share(state) for state in ("busy", "idle", "paused")] == [0.0, 0.85, 0.15]
    assert (times["a"].running, times["b"].running) == (0.85, 0.0)
    assert usage.take() == {}


class Random:
    """One random life of the real producer; every step is checked."""

    def __init__(self, seed: int, make_source: Make, tokenizer: Any) -> None:
        self.draw = draw = random.Random(seed)
        self.batch, self.staleness = draw.randint(1, 4), draw.choice((0, 1, 1, 2, 3))
        self.options = {
            "rollout_batch_size": self.batch,
            "n_samples_per_prompt": draw.randint(1, 2),
            "over_sampling_batch_size": draw.randint(self.batch, self.batch * (self.staleness + 1)),
            "rollout_max_response_len": 60,
            "partial_rollout": draw.random() < 0.8,
        }
        if self.options["partial_rollout"] and draw.random() < 0.3:
            self.options["partial_rollout_max_aborted_count"] = draw.randint(1, 3)
        self.total = self.batch * draw.randint(3, 7) + draw.randint(0, self.batch - 1)
        self.unlucky, self.saving = draw.choice((0.0, 0.2)), draw.choice((0.0, 0.3))
        self.make_source, self.tokenizer = make_source, tokenizer
        self.trained: Counter[int] = Counter()
        self.rejected: set[int] = set()
        self.oldest = -1

    def length(self, request: GenerateRequest) -> int:
        return self.draw.choice((1, 1, 2, 3, 8, 60))

    def keeps(self, group: SampleGroup) -> bool:
        if self.draw.random() < self.unlucky:
            self.rejected.add(group.prompt.prompt_id)
            return False
        return True

    def begin(self, state: dict[str, Any] | None = None) -> Pipeline:
        run = pipeline(
            self.make_source(self.total, num_epoch=1),
            self.tokenizer,
            self.length,
            rate=self.draw.choice((5.0, 50.0)),
            staleness=self.staleness,
            engines=self.draw.randint(1, 2),
            filter=self.keeps,
            **self.options,
        )
        if state is not None:
            run.loop.load_state_dict(state)
        return run

    async def live(self) -> None:
        run, step = self.begin(), 0
        await run.push(0, 0.0)
        while True:
            result = await run.producer.next_step(step)
            self.check(run, result.groups, step)
            if not result.groups:
                break
            await asyncio.sleep(self.draw.choice((0.0, 0.1, 1.0, 5.0)))
            run.producer.settle(step)
            self.trained.update(g.prompt.prompt_id for g in result.groups)
            step += 1
            await run.producer.begin_push()
            if self.draw.random() < self.saving:
                state = run.loop.state_dict()
                await run.producer.stop()
                run = self.begin(state)  # another process goes on from the checkpoint
                await run.producer.begin_push()
            for engine in run.engines:
                engine.version = step
            run.producer.end_push(step)
        run.loop.ledger.check(self.total)
        await run.producer.stop()

    def check(self, run: Pipeline, groups: list[SampleGroup], step: int) -> None:
        versions = [v for g in groups for s in g.samples for v in s.versions]
        assert all(step - self.staleness <= v <= step for v in versions)
        assert all(list(s.versions) == sorted(s.versions) for g in groups for s in g.samples)
        self.oldest = max([self.oldest, *(step - v for v in versions)])
        if len(groups) < self.batch:
            assert not run.loop.ledger.groups(PromptState.OUT, PromptState.PARTIAL, PromptState.BUFFERED)
        most = self.options.get("partial_rollout_max_aborted_count")
        if most is not None:
            assert all(s.aborted_count <= most for g in groups for s in g.samples)


@pytest.mark.parametrize("lives", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_random_lives_train_every_prompt_once_and_in_time(make_source: Make, tokenizer: Any, lives: int) -> None:
    """The slow one takes about 6 s of CPU time."""
    used = Counter[str]()
    for seed in range(lives):
        life = Random(seed, make_source, tokenizer)
        try:
            run_virtual(life.live())
            assert set(life.trained.values()) <= {1}
            assert set(life.trained) | life.rejected == set(range(life.total))
        except BaseException as error:
            error.add_note(f"seed {seed}: {life.options}")
            raise
        used["at the bound"] += life.staleness > 0 and life.oldest == life.staleness
        used["dropped"] += bool(life.rejected)
    assert min(used.values()) > lives // 10, "the schedules have to meet what they test"
