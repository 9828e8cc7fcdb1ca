"""The command: options in, a table or JSON out."""

import dataclasses
import itertools
import os
import sys
from collections.abc import Sequence

from relax_data.options import flag
from relax_rollout.staleness import StalenessBound

from relax_cli.config.command_line import Command, Namespace, help_text, read_command_line
from relax_cli.config.run_config import ConfigError
from relax_cli.config.schema import UNSET, Option, options_of
from relax_cli.simulate.figures import Figures
from relax_cli.simulate.model import Lengths, Plan, simulate
from relax_cli.simulate.settings import FASTEST, SimulateSettings
from relax_cli.simulate.table import NOTE, Comparison, Row, as_json, as_table

MOST_EVENTS = 10**7
"""Of one command: some minutes."""
MOST_ROOM = 3
"""Batches that are open at once with colocate, if nobody says how many: each pause interrupts all but one of them."""
_OTHERS = {"push_seconds": 0.0, "switch_seconds": 0.0, "prefill_rate": FASTEST, "engine_half": 0.0}
"""Of the figures that may be assumed those that are no sizes, and another value to see what rests on them: a time and a
speed cost nothing there, and an engine generates as fast with any number of requests."""
PARTIAL, ASYNC = "colocate + partial", "fully async"
COMMAND = Command(
    "relax simulate [--from RUN_DIR] [options]",
    "Says what a training step of colocate, colocate with partial rollout, and fully async would take, for splits of "
    f"the GPUs and values of --max-staleness. {NOTE}",
)


def main(argv: Sequence[str]) -> int:
    """`relax simulate ARGV`.

    Returns:
        the exit code: 0, or 1 when the output cannot be written.

    Raises:
        ConfigError: options or figures are wrong or missing; holds all problems.
    """
    if "-h" in argv or "--help" in argv:
        return _write(help_text([SimulateSettings], options(), {}, COMMAND))
    settings = read_settings(argv)
    found = simulated(settings)
    return _write(as_json(found) if settings.json else as_table(found))


def _write(text: str) -> int:
    """Prints it all; returns the exit code."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # What is still in the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # that is `| head`
            print(f"relax simulate: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def read_settings(argv: Sequence[str]) -> SimulateSettings:
    """The options of a command line.

    Raises:
        ConfigError: one of them is wrong; holds all problems.
    """
    layer = read_command_line(argv, Namespace(options()))
    given = {name: item.value for name, item in layer.values.items() if item.value is not UNSET}
    values = {("from_run" if name == "from" else name): value for name, value in given.items()}
    settings = SimulateSettings(**values)
    problems = layer.errors + settings.problems(frozenset(values) | layer.failed)
    if problems:
        raise ConfigError(problems)
    return settings


def options() -> dict[str, Option]:
    """The options by name; `--from` is the field ``from_run``, because no field can have that name."""
    found = {option.name: option for option in options_of(SimulateSettings)}
    return {"from": dataclasses.replace(found.pop("from_run"), name="from"), **found}


def simulated(settings: SimulateSettings) -> Comparison:
    """Runs the model for every plan; colocate alone comes first.

    Where one of :data:`_OTHERS` is assumed, the model runs again with the other value.

    Raises:
        ConfigError: figures are missing, the plans do not fit the GPUs, or would take too long; holds all problems.
    """
    figures = Figures(settings)
    plans = _plans(settings, figures)
    n, events = int(figures.number("n_samples_per_prompt")), 0
    assumed = [name for name in _OTHERS if name in figures.assumed]
    for plan, _ in plans:
        steps = settings.num_rollout + 2 * (plan.bound.max_staleness or 0) + 2
        events += steps * (plan.bound.depth * n + plan.engines) * (1 + len(assumed))
    if events > MOST_EVENTS:
        raise ConfigError(
            [
                f"these are {events:,} events, more than {MOST_EVENTS:,}: lower --num-rollout {settings.num_rollout}, "
                "--rollout-batch-size, --n-samples-per-prompt, or the values of --max-staleness"
                + (f", or give {' and '.join(map(flag, assumed))}" if assumed else "")
            ]
        )
    lengths = Lengths(figures.draw, n=n, prompt=figures.number("prompt_length"), seed=settings.seed)

    def rows(**instead: float) -> list[Row]:
        found = [simulate(plan, figures.rates(**instead), lengths, steps=settings.num_rollout) for plan, _ in plans]
        return [Row(*plan, step, found[0].seconds / step.seconds) for plan, step in zip(plans, found, strict=True)]

    def other(name: str) -> tuple[float, list[Row]]:
        instead = {name: _OTHERS[name]}
        if name == "engine_half":
            assert figures.constant_rate is not None
            instead["engine_rate"] = figures.constant_rate
        return _OTHERS[name], rows(**instead)

    return Comparison(
        figures, rows(), {name: other(name) for name in assumed}, (*figures.notes, *_left_out(settings, figures, plans))
    )


def _left_out(settings: SimulateSettings, figures: Figures, plans: Sequence[tuple[Plan, int]]) -> list[str]:
    """In words, the modes of which there is no row, and why."""
    modes = {plan.mode for plan, _ in plans}
    gpus, each = (f"{flag(n)} {figures.number(n):.0f}" for n in ("num_gpus", "rollout_num_gpus_per_engine"))
    found = []
    if ASYNC not in modes:
        found.append(f"No row of {ASYNC}: {gpus} leaves no GPU that trains beside one engine of {each}.")
    if settings.partial_rollout and PARTIAL not in modes:
        found.append(
            f"No row of {PARTIAL}: it needs a --max-staleness of 1 or more, and an --over-sampling-batch-size above "
            f"--rollout-batch-size {figures.number('rollout_batch_size'):.0f}."
        )
    return found


def _plans(settings: SimulateSettings, figures: Figures) -> list[tuple[Plan, int]]:
    """All plans, each with its number of GPUs that generate."""
    sizes = ("num_gpus", "rollout_num_gpus_per_engine", "rollout_batch_size")
    gpus, each, batch = (int(figures.number(name)) for name in sizes)
    quarters = dict.fromkeys(max(1, gpus * i // 4 // each) * each for i in (1, 2, 3))
    splits = tuple(dict.fromkeys(settings.rollout_num_gpus)) or tuple(g for g in quarters if g < gpus)
    depth = settings.over_sampling_batch_size
    problems = [
        f"--rollout-num-gpus {g} leaves none of --num-gpus {gpus} to train: lower the one or raise the other"
        for g in splits
        if g >= gpus
    ]
    for name, number in (("--num-gpus", gpus), *(("--rollout-num-gpus", g) for g in splits)):
        if number % each:
            problems.append(
                f"{name} {number} is no multiple of --rollout-num-gpus-per-engine {each}: change one of them"
            )
    if depth is not None and depth < batch:
        problems.append(f"--over-sampling-batch-size {depth} is less than --rollout-batch-size {batch}: raise it")
    if problems:
        raise ConfigError(problems)

    def bound(age: int, most: int) -> StalenessBound:
        return StalenessBound(batch=batch, depth=min(depth or most, batch * (age + 1)), max_staleness=age)

    def shared(mode: str, limit: StalenessBound) -> tuple[Plan, int]:
        return Plan(mode=mode, in_turn=True, train_gpus=gpus, engines=gpus // each, bound=limit), gpus

    ages = sorted(set(settings.max_staleness))
    plans = [shared("colocate", bound(0, batch))]
    if settings.partial_rollout:
        limits = (bound(age, batch * min(age + 1, MOST_ROOM)) for age in ages)
        plans += [shared(PARTIAL, limit) for limit in limits if limit.depth > batch]
    for split, age in itertools.product(splits, ages):
        plan = Plan(
            mode=ASYNC,
            in_turn=False,
            train_gpus=gpus - split,
            engines=split // each,
            bound=bound(age, batch * (age + 1)),
            drains=not settings.partial_rollout,
            keeps_cache=not settings.recompute_kv_cache_after_weight_updates,
        )
        plans.append((plan, split))
    return plans
