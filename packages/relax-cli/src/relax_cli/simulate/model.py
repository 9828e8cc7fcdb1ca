"""The model: engines that share their rate among requests, a trainer, pushes, and the real gate of staleness.

Discrete events, no torch. The modes differ in what stands still while the trainer works:

    colocate      [generate ........................][switch, train][push]    the same GPUs in turn
    fully async   [generate ........................................][push]   GPUs of their own
                  [train][waits until the next step may be closed   ][push]

What a pause interrupts keeps its tokens. After the pause all requests are dealt to the engines again, and each engine
computes keys and values of what they have before it goes on, if they are not kept. :mod:`relax_rollout.staleness`
decides which groups may be started, which of them a step takes, and when it may be closed.

Left out: rewards, filters, evaluation, checkpoints, memory for keys and values, and that responses to one prompt are
about equally long.
"""

import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections import deque
from collections.abc import Callable

from relax_rollout.staleness import OpenGroup, StalenessBound, blocked_by, choose, may_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of the parts.

    Attributes:
        engine: tokens/s of one engine that runs very many requests.
        half: requests with which it has half of that: ``rate(k) = engine * k / (k + half)``.
        prefill: tokens/s of which an engine computes keys and values when it does not generate.
        train: tokens/s of one GPU that trains, prompts and responses, all passes of a step together.
        push_s: seconds of a push, in which neither side works.
        switch_s: colocate: seconds a step in which the GPUs change sides, there and back.
        concurrency: most requests that run on one engine.
    """

    engine: float
    half: float
    prefill: float
    train: float
    push_s: float
    switch_s: float
    concurrency: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to use the GPUs.

    Attributes:
        mode: its name.
        in_turn: whether the engines stand still while the trainer works: colocate.
        drains: whether a push waits until all that runs has ended, instead of interrupting it.
        keeps_cache: whether what a push interrupts goes on without computing its keys and values again.
        bound: groups a step, groups that may be open, and staleness, which must have a limit.
    """

    mode: str
    in_turn: bool
    train_gpus: int
    engines: int
    bound: StalenessBound
    drains: bool = False
    keeps_cache: bool = False


class Lengths:
    """Response lengths in tokens; prompt 7 has the same ones under every plan.

    Args:
        draw: makes one length, at least 1.
        n: responses of a group.
        prompt: tokens of a prompt.
    """

    def __init__(self, draw: Callable[[random.Random], int], *, n: int, prompt: float, seed: int) -> None:
        self.n, self.prompt = n, prompt
        self._draw, self._random = draw, random.Random(seed)
        self._groups: list[list[int]] = []

    def group(self, prompt_id: int) -> list[int]:
        """The lengths of the responses to one prompt."""
        while len(self._groups) <= prompt_id:
            self._groups.append([self._draw(self._random) for _ in range(self.n)])
        return self._groups[prompt_id]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What the model says of a plan: means of a step, once the pipeline is full.

    Attributes:
        seconds: from the close of one step to the next.
        trainer_idle: share of the time in which the trainer waits for samples.
        engines_idle: share in which an engine has no request; mean over the engines.
        engines_paused: share in which engines stand still: pushes, and with colocate the trainer's turn.
        staleness_mean: versions between a group's start and the weights that train on it.
        staleness_max: the most of them.
        binds: what to change for shorter steps; see :func:`what_binds`.
        bounds: seconds that a step cannot be shorter than; see :func:`lower_bounds`.
        trained: tokens of prompts and responses that a step trains.
        prefilled: tokens of which the engines computed keys and values: prompts and what had been interrupted.
        ended: responses that ended in the whole simulation.
    """

    seconds: float
    trainer_idle: float
    engines_idle: float
    engines_paused: float
    staleness_mean: float
    staleness_max: int
    binds: str
    bounds: dict[str, float]
    trained: float
    prefilled: float
    ended: int


@dataclasses.dataclass(eq=False)
class Group:
    """An open group: its place at the gate, its responses that have not ended, and the time of its start."""

    gate: OpenGroup
    left: int
    started: float


Request = tuple[float, int, Group]
"""Tokens that are still to come, tokens of the whole response, its group."""


class Engine:
    """A server whose requests share its rate: each gets ``rates.engine / (running + rates.half)`` tokens a second."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._clock = self._prefill_s = 0.0
        self._each = 0.0
        """Tokens that a request has got by now which runs since the last pause."""
        self.busy_s = self.generated = self.prefilled = 0.0
        self.running: list[tuple[float, int, int, Group]] = []
        """Heap: what ``_each`` is when it ends, a number that breaks ties, tokens of the whole response, group."""
        self.changes = 0
        """Tells an event that was foreseen before the last change from those after it."""

    def advance(self, now: float) -> None:
        """Generates until that time."""
        elapsed, self._clock = now - self._clock, now
        if not self.running:
            return
        self.busy_s += elapsed
        prefill = min(elapsed, self._prefill_s)
        self._prefill_s -= prefill
        self.prefilled += prefill * self._rates.prefill
        each = (elapsed - prefill) * self._rates.engine / (len(self.running) + self._rates.half)
        self._each += each
        self.generated += each * len(self.running)

    def next_end(self) -> float:
        """Time at which the next request ends if nothing changes."""
        tokens = max(0.0, self.running[0][0] - self._each)
        return self._clock + self._prefill_s + tokens * (len(self.running) + self._rates.half) / self._rates.engine

    def add(self, request: Request, number: int, known: float) -> None:
        """Takes a request, of which ``known`` tokens are there and need keys and values."""
        left, length, group = request
        heapq.heappush(self.running, (self._each + left, number, length, group))
        self._prefill_s += known / self._rates.prefill

    def interrupt(self) -> list[Request]:
        """Gives all requests back with what is still to come of each."""
        taken = [(max(0.0, end - self._each), length, group) for end, _, length, group in self.running]
        self.running, self._prefill_s, self._each = [], 0.0, 0.0
        return taken


class Simulation:
    """The events of one plan. ``step`` is the next one to be closed, ``version`` what the engines serve."""

    def __init__(self, plan: Plan, rates: Rates, lengths: Lengths) -> None:
        self.plan, self.rates, self.lengths, self.bound = plan, rates, lengths, plan.bound
        self.engines = [Engine(rates) for _ in range(plan.engines)]
        self.now = 0.0
        self.version = self.step = self.ended = 0
        self.paused_s = self.drained_s = 0.0
        self.opened: dict[int, Group] = {}
        self.whole: dict[int, OpenGroup] = {}
        self.closed: list[tuple[list[Group], int]] = []
        """Of each step: its groups, and their response tokens."""
        self.latencies: dict[int, list[float]] = {}
        """By version at the start: seconds from start to end of each group that has ended."""
        # A prompt is computed once on each engine that gets responses of its group.
        self._prompt = lengths.prompt * min(plan.engines, lengths.n) / lengths.n
        self._prompt_ids, self._numbers = itertools.count(), itertools.count()
        self._queue: deque[Request] = deque()
        self._ends: list[tuple[float, int, int]] = []
        """Heap of the next end of each engine: time, engine, its number of changes."""
        self._loads: list[tuple[int, int]] = []
        """Heap of requests and engine; entries with another number of requests than the engine has do not count."""
        self._trainer: tuple[float, Callable[[], None]] | None = (0.0, self._resume)
        self._paused_since = 0.0
        self._draining = False
        self._awaited: frozenset[int] = frozenset()
        self._missing = 0

    def run_to(self, steps: int) -> None:
        """Goes on until so many steps are closed."""
        while len(self.closed) < steps:
            while self._ends and self._ends[0][2] != self.engines[self._ends[0][1]].changes:
                heapq.heappop(self._ends)
            if self._trainer is not None and (not self._ends or self._trainer[0] <= self._ends[0][0]):
                (self.now, then), self._trainer = self._trainer, None
                then()
                continue
            assert self._ends, "nothing runs, and the gate lets nothing start and no step be closed"
            self.now, engine, _ = heapq.heappop(self._ends)
            self._end_one(engine)

    def train_s(self, tokens: float) -> float:
        """Seconds from the close of a step to the end of its push, in which the trainer is not idle."""
        return tokens / (self.rates.train * self.plan.train_gpus) + self.rates.push_s + self._switch_s

    def tokens_of(self, step: int) -> float:
        """Tokens of prompts and responses that a step trains."""
        groups, tokens = self.closed[step]
        return tokens + self.lengths.prompt * self.lengths.n * len(groups)

    @property
    def _switch_s(self) -> float:
        return self.rates.switch_s if self.plan.in_turn else 0.0

    def _start_groups(self) -> None:
        touched = set()
        while may_start(len(self.opened), self.bound, version=self.version, step=self.step):
            prompt_id = next(self._prompt_ids)
            responses = self.lengths.group(prompt_id)
            group = self.opened[prompt_id] = Group(OpenGroup(self.version, prompt_id), len(responses), self.now)
            touched |= {self._place((float(length), length, group)) for length in responses}
        self._foresee(touched)

    def _place(self, request: Request) -> int | None:
        """Gives a request to the engine with the fewest, or to the queue when all are full; returns the engine."""
        while self._loads[0][0] != len(self.engines[self._loads[0][1]].running):
            heapq.heappop(self._loads)
        load, index = self._loads[0]
        if load >= self.rates.concurrency:
            self._queue.append(request)
            return None
        self.engines[index].advance(self.now)
        had = request[1] - request[0]
        known = 0.0 if had and self.plan.keeps_cache else self._prompt + had
        self.engines[index].add(request, next(self._numbers), known)
        heapq.heapreplace(self._loads, (load + 1, index))
        return index

    def _foresee(self, engines: set[int | None]) -> None:
        for index in engines:
            if index is not None:
                engine = self.engines[index]
                engine.changes += 1
                if engine.running:
                    heapq.heappush(self._ends, (engine.next_end(), index, engine.changes))

    def _end_one(self, index: int) -> None:
        engine = self.engines[index]
        engine.advance(self.now)
        *_, group = heapq.heappop(engine.running)
        self.ended += 1
        heapq.heappush(self._loads, (len(engine.running), index))
        self._foresee({index, self._place(self._queue.popleft()) if self._queue and not self._draining else None})
        group.left -= 1
        if not group.left:
            self.whole[group.gate.prompt_id] = group.gate
            self.latencies.setdefault(group.gate.start, []).append(self.now - group.started)
            # What the gate said stays so until as many of those that it waits for have ended as there are too many.
            self._missing -= group.gate.prompt_id in self._awaited
            if self._missing <= 0:
                self._close()
        if self._draining:
            self._push()

    def _close(self) -> None:
        if self._trainer is not None or self._draining or len(self.whole) < self.bound.batch:
            return
        chosen = choose(self.whole.values(), self.bound)
        blocked = blocked_by((g.gate for g in self.opened.values()), chosen, self.bound, step=self.step)
        self._awaited, self._missing = frozenset(g.prompt_id for g in blocked), 0
        if blocked:
            latest = max(self.bound.deadline(g.start) for g in blocked)
            self._missing = int(len(blocked) - self.bound.batch * (latest - self.step))
            return
        for gate in chosen:
            del self.whole[gate.prompt_id]
        tokens = sum(sum(self.lengths.group(gate.prompt_id)) for gate in chosen)
        self.closed.append(([self.opened.pop(gate.prompt_id) for gate in chosen], tokens))
        self.step += 1
        if self.plan.in_turn:
            self._pause()
        else:
            self._start_groups()
        self._trainer = (self.now + self.train_s(self.tokens_of(-1)) - self.rates.push_s, self._push)

    def _push(self) -> None:
        if not self._draining:
            self._drains_since = self.now
        self._draining = self.plan.drains and any(engine.running for engine in self.engines)
        if self._draining:
            return
        self.drained_s += self.now - self._drains_since
        if not self.plan.in_turn:
            self._pause()
        self._trainer = (self.now + self.rates.push_s, self._install)

    def _install(self) -> None:
        self.version += 1
        self._resume()

    def _pause(self) -> None:
        self._paused_since = self.now
        held: list[Request] = []
        for engine in self.engines:
            engine.advance(self.now)
            held += engine.interrupt()
        self._queue.extendleft(reversed(held))
        self._foresee(set(range(len(self.engines))))

    def _resume(self) -> None:
        self.paused_s += self.now - self._paused_since
        for engine in self.engines:
            engine.advance(self.now)
        self._loads = [(0, index) for index in range(len(self.engines))]
        waiting, self._queue = self._queue, deque()
        self._foresee({self._place(request) for request in waiting})
        self._start_groups()
        self._close()


def simulate(plan: Plan, rates: Rates, lengths: Lengths, *, steps: int) -> Step:
    """Runs the model until the pipeline is full, and then for so many steps, of which it returns the means."""
    run, first = Simulation(plan, rates, lengths), 2 * (plan.bound.max_staleness or 0) + 2

    def totals(until: int) -> tuple[float, ...]:
        run.run_to(until)
        for engine in run.engines:
            engine.advance(run.now)
        busy_s, prefilled = (
            sum(values) for values in zip(*((e.busy_s, e.prefilled) for e in run.engines), strict=True)
        )
        return run.now, run.paused_s, run.drained_s, busy_s / plan.engines, prefilled

    before, after = totals(first), totals(first + steps)
    seconds, paused, drained, busy, prefilled = ((a - b) / steps for a, b in zip(after, before, strict=True))
    seconds = max(seconds, 1e-9)  # for rates at which nothing takes any time
    trained = statistics.fmean(run.tokens_of(step) for step in range(first, first + steps))
    # From one close to the last one, the trainer works on the step before the first one too, and not on the last one.
    works = statistics.fmean(run.train_s(run.tokens_of(step)) for step in range(first - 1, first + steps - 1))
    ages = [step - group.gate.start for step, (groups, _) in enumerate(run.closed[first:], first) for group in groups]
    idle = max(0.0, 1 - works / seconds)
    generated = statistics.fmean(tokens for _, tokens in run.closed[first:])
    least = (generated / rates.engine + prefilled / rates.prefill) / plan.engines
    return Step(
        seconds=seconds,
        trainer_idle=idle,
        engines_idle=max(0.0, 1 - (busy + paused) / seconds),
        engines_paused=paused / seconds,
        staleness_mean=statistics.fmean(ages),
        staleness_max=max(ages),
        binds=what_binds(run, seconds=seconds, works=works, engines_s=least, paused=paused, drained=drained),
        bounds=lower_bounds(run, works=works, prefilled=prefilled, first=first),
        trained=trained,
        prefilled=prefilled,
        ended=run.ended,
    )


def what_binds(
    run: Simulation, *, seconds: float, works: float, engines_s: float, paused: float, drained: float
) -> str:
    """Names what makes the steps long.

    When the trainer hardly waits (colocate: works for half of the step or more), it is the longest part of its work:
    ``train``, ``push`` or, with colocate, ``switch``; a push or a switch that is half of the step binds in any case.
    Else ``rollout`` when the engines do half of what they could with very many requests, or more. Else too few
    requests run: because a push waits until all that runs has ended (``drain``), because few groups may be open
    (``depth``), or because of the staleness that is allowed (``deadline``).

    Args:
        run: a simulation that is over.
        seconds: of a step.
        works: of these, those in which the trainer is not idle.
        engines_s: seconds that the engines need for the tokens of a step with very many requests.
        paused: seconds of a step in which the engines stand still.
        drained: seconds of a step in which the trainer has trained and waits until all that runs has ended.
    """
    plan, rates = run.plan, run.rates
    parts = {"push": rates.push_s, "switch": rates.switch_s if plan.in_turn else 0.0}
    parts["train"] = works - sum(parts.values())
    longest = max(reversed(parts), key=lambda name: parts[name])
    waits = seconds - works
    if waits <= (0.5 if plan.in_turn else 0.05) * seconds:
        return longest
    if longest != "train" and parts[longest] >= seconds / 2:
        return longest
    if engines_s >= (seconds - paused) / 2:
        return "rollout"
    if drained > waits / 2:
        return "drain"
    return "depth" if plan.bound.depth < plan.bound.batch * ((plan.bound.max_staleness or 0) + 1) else "deadline"


def lower_bounds(run: Simulation, *, works: float, prefilled: float, first: int) -> dict[str, float]:
    """Seconds that a step cannot be shorter than, whatever the schedule.

    ``train``: the trainer's work. ``rollout``: the engines' work, at the rate of as many requests as can be open, and
    their pauses. ``depth``, Little's law: a step takes ``B`` of ``open`` groups, each open for its latency.
    ``deadline``: the slowest group of a version, and the trainer's work, fit into ``max_staleness + 1`` steps.
    Latencies are those of this simulation.

    Args:
        run: a simulation that is over.
        works: seconds of the trainer in a step.
        prefilled: tokens a step of which the engines computed keys and values.
        first: first step that counts.
    """
    plan, rates, steps = run.plan, run.rates, len(run.closed) - first
    staleness, most = plan.bound.max_staleness or 0, plan.bound.most_open(version=0, step=0)
    requests = min(rates.concurrency, math.ceil(most * run.lengths.n / plan.engines))
    rate = rates.engine * requests / (requests + rates.half)
    generated = statistics.fmean(tokens for _, tokens in run.closed[first:])
    latencies = [run.latencies.get(v, [0.0]) for v in range(first - staleness, first - staleness + steps)]
    return {
        "train": works,
        "rollout": (generated / rate + prefilled / rates.prefill) / plan.engines
        + (works if plan.in_turn else rates.push_s),
        "depth": plan.bound.batch * statistics.fmean(map(statistics.fmean, latencies)) / most,
        "deadline": (statistics.fmean(map(max, latencies)) + works) / (staleness + 1),
    }
