"""Advice from the timeline of a run: each finding shows the arithmetic behind it. Without enough steps all are silent.

The rules compare what a step takes with what it would take under a simple model, in which work moves freely between
GPUs. They say in which direction to go; a run, or ``relax simulate --from``, says how far.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from relax_profiling.report.model import Finding
from relax_profiling.timeline.read import Setup
from relax_profiling.timeline.shares import PUSH, WAITS, EngineShares, Timeline

Rule = Callable[[Timeline, EngineShares], Iterable[Finding]]

_ENOUGH_STEPS = 3
_LOW, _HIGH = 0.10, 0.15
_FEW_REQUESTS = 8
_COMPUTED_AGAIN = 0.5
"""Tokens for each that is generated. 1.0 was a sixth of the time of an engine with a model of 4 B on an H200."""
_GAIN = 0.95
"""Time of a step over that of now, above which another split is not worth a restart."""


def step_advice(timelines: Sequence[Timeline]) -> list[Finding]:
    """The findings of all rules on runs with at least three steps."""
    return [
        finding
        for timeline in timelines
        if len(timeline.judged) >= _ENOUGH_STEPS and (engines := timeline.engine_mean) is not None
        for rule in RULES
        for finding in rule(timeline, engines)
    ]


def split_of_gpus(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """With another number of GPUs that train, of the same sum, a step would take a twentieth less or better."""
    setup = timeline.setup
    if setup.mode != "fully_async" or setup.device != "cuda" or setup.engine_gpus < 1:
        return
    push = timeline.mean("pause", *PUSH)
    step = timeline.seconds / len(timeline.judged)
    train = step - timeline.mean(*WAITS, *PUSH)
    generate = engines.busy * step
    if (train < generate and timeline.trainer_waits < _HIGH) or (train >= generate and engines.idle < _HIGH):
        return  # whoever is slower keeps the other one waiting for a little only
    now = max(train, generate) + push
    trainer_gpu_s, engine_gpu_s = train * setup.train_gpus, generate * setup.engine_gpus

    def takes(gpus: int) -> float:
        return max(trainer_gpu_s / gpus, engine_gpu_s / (total - gpus)) + push

    total = setup.train_gpus + setup.engine_gpus
    choices = [g for g in range(setup.train_unit, total, setup.train_unit) if (total - g) % setup.gpus_per_engine == 0]
    best = min(choices, key=takes, default=setup.train_gpus)
    if best == setup.train_gpus or takes(best) > _GAIN * now:
        return
    slower, faster = ("engines", "trainer") if best < setup.train_gpus else ("trainer", "engines")
    yield Finding(
        "split of GPUs",
        _where(timeline),
        f"trainer {train:.2f} s x {setup.train_gpus} GPUs = {trainer_gpu_s:.1f} GPU-s of work a step, engines "
        f"{generate:.2f} s x {setup.engine_gpus} GPUs = {engine_gpu_s:.1f} GPU-s: with {best} + {total - best} GPUs "
        f"max({trainer_gpu_s:.1f} / {best}, {engine_gpu_s:.1f} / {total - best}) + push {push:.2f} = "
        f"{takes(best):.2f} s instead of {now:.2f} s",
        f"give GPUs of the {faster} to the {slower}, {best} to train and {total - best} to generate; relax train "
        "--dry-run checks the layout",
        ("--actor-num-gpus-per-node", "--rollout-num-gpus"),
    )


def gate(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """Trainer and engines both wait, each for the other: too few groups may be open."""
    if timeline.setup.mode != "fully_async" or timeline.trainer_waits < _LOW or engines.idle < _LOW:
        return
    opened, words = _open_groups(timeline.setup)
    # The same engines would do in all their time what they do in the busy part of it.
    wanted = math.ceil(opened / max(0.1, 1.0 - engines.idle))
    advice, flags = _more_groups(timeline.setup, wanted)
    yield Finding(
        "too few open groups",
        _where(timeline),
        f"the trainer waits {timeline.trainer_waits:.0%} and the engines have nothing to do {engines.idle:.0%} of the "
        f"time: at most {words} groups are open, {opened} / (1 - {engines.idle:.2f}) = {wanted} would fill that",
        advice,
        flags,
    )


def few_requests(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """The trainer waits for engines that work on a handful of requests."""
    if timeline.setup.mode != "fully_async" or timeline.trainer_waits < _HIGH or engines.idle >= _LOW:
        return
    if not 0 < engines.running < _FEW_REQUESTS:
        return
    opened, words = _open_groups(timeline.setup)
    wanted = math.ceil(opened * _FEW_REQUESTS / engines.running)
    advice, flags = _more_groups(timeline.setup, wanted)
    yield Finding(
        "few requests at a time",
        _where(timeline),
        f"the trainer waits {timeline.trainer_waits:.0%} of the time, while an engine works on {engines.running:.1f} "
        f"requests in the mean; at most {words} groups are open, {opened} x {_FEW_REQUESTS} / {engines.running:.1f} = "
        f"{wanted} would make it {_FEW_REQUESTS}",
        advice,
        flags,
    )


def pauses(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """Engines rest for pushes of weights for a tenth of the time or more."""
    if engines.paused < _LOW:
        return
    setup = timeline.setup
    wait, send = timeline.mean("pause"), timeline.mean("weight_update")
    figure = (
        f"engines rest {engines.paused:.0%} of the time for pushes: {wait:.2f} s a step until requests end, "
        f"{send:.2f} s sending"
    )
    batch = setup.rollout_batch_size
    half = f"a push with every {2 * batch} instead of {batch} groups rests about {engines.paused / 2:.0%}"
    if wait > send and not setup.partial_rollout:
        advice = f"interrupt requests instead of waiting for them; or {half}"
        flags: tuple[str, ...] = ("--partial-rollout", "--rollout-batch-size")
    elif setup.weight_sync == "disk":
        advice, flags = f"process groups are faster than files; or {half}", ("--weight-sync", "--rollout-batch-size")
    else:
        advice, flags = half, ("--rollout-batch-size",)
    yield Finding("engines are paused", _where(timeline), figure, advice, flags)


def computed_again(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """The trainer waits for engines that compute keys and values of interrupted responses again after each push."""
    setup = timeline.setup
    if setup.mode != "fully_async" or setup.keeps_cache or timeline.trainer_waits < _LOW or engines.idle >= _LOW:
        return
    again = statistics.fmean(step.reprefilled for step in timeline.judged)
    if again >= _COMPUTED_AGAIN:
        yield Finding(
            "keys and values are computed again",
            _where(timeline),
            f"the trainer waits {timeline.trainer_waits:.0%} of the time, while the engines compute keys and values of "
            f"{again:.2f} tokens again for each that they generate: those of all that runs, after every push",
            "keep them over a push; the log-probs are then those of a mixture, which --use-tis corrects for",
            ("--no-recompute-kv-cache-after-weight-updates",),
        )


def tail(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """With colocate, engines have no request for a seventh of their turn: they wait for the longest, or for rewards."""
    if timeline.setup.mode != "colocate":
        return
    turn = timeline.mean("generate")
    share = engines.idle / max(1e-9, engines.idle + engines.busy)
    if turn <= 0 or share < _HIGH:
        return
    step = timeline.seconds / len(timeline.judged)
    rest = step - turn
    best = turn * (1 - share) + rest
    yield Finding(
        "engines wait in their turn",
        _where(timeline),
        f"engines have no request for {share:.0%} of the {turn:.2f} s of their turn: a step takes {step:.2f} s, "
        f"{turn:.2f} x (1 - {share:.2f}) + {rest:.2f} = {best:.2f} s without that",
        "start the next groups before the longest responses end, or train meanwhile on GPUs of its own",
        ("--partial-rollout", "--over-sampling-batch-size", "--max-staleness", "--fully-async"),
    )


def saving(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """Checkpoints take a tenth of the steps or more."""
    share = timeline.trainer.get("save", 0.0)
    if share >= _LOW:
        saved = sum(step.spent("save") > 0 for step in timeline.judged)
        yield Finding(
            "checkpoints",
            _where(timeline),
            f"{saved} checkpoints in {len(timeline.judged)} steps take {share:.0%} of the time; half as many take "
            f"{share / 2 / (1 - share / 2):.0%}",
            "save less often",
            ("--save-interval",),
        )


def evaluations(timeline: Timeline, engines: EngineShares) -> Iterable[Finding]:
    """The trainer waits a tenth of the time or more for evaluations."""
    share = timeline.trainer.get("wait_for_eval", 0.0)
    if share >= _LOW:
        yield Finding(
            "evaluations",
            _where(timeline),
            f"the trainer waits {share:.0%} of the time for evaluations that hold up a push; half as many: "
            f"{share / 2 / (1 - share / 2):.0%}",
            "evaluate less often, or on fewer prompts",
            ("--eval-interval", "--eval-prompt-data"),
        )


RULES: tuple[Rule, ...] = (split_of_gpus, gate, few_requests, pauses, computed_again, tail, saving, evaluations)


def _where(timeline: Timeline) -> str:
    first, last = timeline.judged[0].step, timeline.judged[-1].step
    return f"{timeline.file}, steps {first} to {last}"


def _allowed(setup: Setup, staleness: int) -> int:
    return setup.rollout_batch_size * (staleness + 1)


def _open_groups(setup: Setup) -> tuple[int, str]:
    """Most groups that may be open, and how that comes about."""
    depth, allowed = setup.over_sampling_batch_size, _allowed(setup, setup.max_staleness)
    opened = min(depth, allowed)
    return opened, (
        f"min(--over-sampling-batch-size {depth}, --rollout-batch-size {setup.rollout_batch_size} x "
        f"(--max-staleness {setup.max_staleness} + 1) = {allowed}) = {opened}"
    )


def _more_groups(setup: Setup, wanted: int) -> tuple[str, tuple[str, ...]]:
    """How to let more groups be open: as deep as the staleness allows, else one more version."""
    allowed = _allowed(setup, setup.max_staleness)
    if setup.over_sampling_batch_size < allowed:
        depth = min(wanted, allowed)
        return f"raise --over-sampling-batch-size to {depth}", ("--over-sampling-batch-size",)
    staleness = setup.max_staleness + 1
    depth = _allowed(setup, staleness)
    return (
        f"the staleness binds: --max-staleness {staleness} allows {depth}; samples are then up to {staleness} versions "
        "old",
        ("--max-staleness", "--over-sampling-batch-size"),
    )
