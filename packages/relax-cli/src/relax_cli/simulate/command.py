"""The command: options in, a table or JSON out."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence

from relax_rollout.staleness import StalenessBound

from relax_cli.config.command_line import Command, Namespace, help_text, read_command_line
from relax_cli.config.run_config import ConfigError
from relax_cli.config.schema import UNSET, Option, options_of
from relax_cli.simulate.figures import Figures
from relax_cli.simulate.model import Lengths, Plan, Step, simulate
from relax_cli.simulate.settings import SimulateSettings

MOST_EVENTS = 10**7
"""Of one command: some minutes."""
MOST_ROOM = 3
"""Batches that are open at once with colocate, if nobody says how many: each pause interrupts all but one of them."""
NOTE = "A model, not a measurement: rewards, filters, evaluation, checkpoints and memory are left out."
COMMAND = Command(
    "relax simulate [--from RUN_DIR] [options]",
    "Says what a training step of colocate, colocate with partial rollout, and fully async would take, for splits of "
    f"the GPUs and values of --max-staleness. {NOTE}",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan, what the model says of it, and how much faster than colocate alone that is."""

    plan: Plan
    rollout_gpus: int
    step: Step
    speed_up: float

    @property
    def gpus(self) -> str:
        """GPUs that train and GPUs that generate, or all of them when both are the same."""
        train = self.plan.train_gpus
        return str(train) if self.plan.in_turn else f"{train} + {self.rollout_gpus}"


def main(argv: Sequence[str]) -> int:
    """`relax simulate ARGV`.

    Raises:
        ConfigError: options or figures are wrong or missing; holds all problems.
    """
    if "-h" in argv or "--help" in argv:
        print(help_text([SimulateSettings], options(), {}, COMMAND), end="")
        return 0
    settings = read_settings(argv)
    figures, rows = simulated(settings)
    print(as_json(figures, rows) if settings.json else as_table(figures, rows), end="")
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


def simulated(settings: SimulateSettings) -> tuple[Figures, list[Row]]:
    """Runs the model for every plan; colocate alone comes first.

    Raises:
        ConfigError: figures are missing, the plans do not fit the GPUs, or would take too long; holds all problems.
    """
    figures = Figures(settings)
    plans = _plans(settings, figures)
    n, events = int(figures.number("n_samples_per_prompt")), 0
    for plan, _ in plans:
        steps = settings.num_rollout + 2 * (plan.bound.max_staleness or 0) + 2
        events += steps * (plan.bound.depth * n + plan.engines)
    if events > MOST_EVENTS:
        raise ConfigError(
            [
                f"these are {events:,} events, more than {MOST_EVENTS:,}: lower --num-rollout {settings.num_rollout}, "
                "--rollout-batch-size, --n-samples-per-prompt, or the values of --max-staleness"
            ]
        )
    lengths = Lengths(figures.draw, n=n, prompt=figures.number("prompt_length"), seed=settings.seed)
    steps_of = [simulate(plan, figures.rates(), lengths, steps=settings.num_rollout) for plan, _ in plans]
    rows = [Row(*plan, step, steps_of[0].seconds / step.seconds) for plan, step in zip(plans, steps_of, strict=True)]
    return figures, rows


def _plans(settings: SimulateSettings, figures: Figures) -> list[tuple[Plan, int]]:
    """All plans, each with its number of GPUs that generate."""
    sizes = ("num_gpus", "rollout_num_gpus_per_engine", "rollout_batch_size")
    gpus, each, batch = (int(figures.number(name)) for name in sizes)
    quarters = dict.fromkeys(max(1, gpus * i // 4 // each) * each for i in (1, 2, 3))
    splits = settings.rollout_num_gpus or tuple(g for g in quarters if g < gpus)
    depth = settings.over_sampling_batch_size
    problems = [f"--rollout-num-gpus {g} leaves none of --num-gpus {gpus} to train" for g in splits if g >= gpus]
    for name, number in (("--num-gpus", gpus), *(("--rollout-num-gpus", g) for g in splits)):
        if number % each:
            problems.append(f"{name} {number} is no multiple of --rollout-num-gpus-per-engine {each}")
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
        plans += [shared("colocate + partial", limit) for limit in limits if limit.depth > batch]
    for split, age in itertools.product(splits, ages):
        plan = Plan(
            mode="fully async",
            in_turn=False,
            train_gpus=gpus - split,
            engines=split // each,
            bound=bound(age, batch * (age + 1)),
            drains=not settings.partial_rollout,
        )
        plans.append((plan, split))
    return plans


def best(rows: Sequence[Row]) -> Row:
    """The row with the shortest step; of those within 2 % the one with the freshest samples."""
    shortest = min(row.step.seconds for row in rows)
    near = (row for row in rows if row.step.seconds <= 1.02 * shortest)
    return min(near, key=lambda row: (row.step.staleness_max, row.step.staleness_mean, row.step.seconds))


def as_json(figures: Figures, rows: Sequence[Row]) -> str:
    """Figures and rows: seconds, shares, versions, and tokens a step."""
    marked = best(rows)
    found = [{"best": row is marked, **dataclasses.asdict(row)} for row in rows]
    table = {name: dataclasses.asdict(figure) for name, figure in figures.table.items()}
    return json.dumps({"note": NOTE, "figures": table, "rows": found}, indent=2) + "\n"


def _short(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


_COLUMNS: dict[tuple[str, str], Callable[[Row], str]] = {
    ("", "mode"): lambda row: row.plan.mode,
    ("", "GPUs"): lambda row: row.gpus,
    ("max", "stale"): lambda row: str(row.plan.bound.max_staleness),
    ("", "open"): lambda row: str(row.plan.bound.depth),
    ("step", "s"): lambda row: _short(row.step.seconds),
    ("", "gain"): lambda row: f"{row.speed_up:.2f}",
    ("trainer", "idle"): lambda row: f"{row.step.trainer_idle:.0%}",
    ("engines", "idle"): lambda row: f"{row.step.engines_idle:.0%}",
    ("engines", "paused"): lambda row: f"{row.step.engines_paused:.0%}",
    ("stale", "mean"): lambda row: f"{row.step.staleness_mean:.1f}",
    ("", "max"): lambda row: str(row.step.staleness_max),
    ("", "binds"): lambda row: row.step.binds,
    ("least", "train"): lambda row: _short(row.step.bounds["train"]),
    ("least", "rollout"): lambda row: _short(row.step.bounds["rollout"]),
    ("least", "depth"): lambda row: _short(row.step.bounds["depth"]),
    ("least", "deadline"): lambda row: _short(row.step.bounds["deadline"]),
}

_LEGEND = """\
* shortest step, with the freshest samples of those within 2 %.
GPUs: that train + that generate, or that do both. max stale: --max-staleness. open: groups at once.
step: from one to the next. gain: how many times faster than colocate alone. idle: share of the time without work.
paused: share in which engines stand still, for a push or for the trainer. stale: versions between a group's start and
the weights that train on it. binds: what to change for a shorter step: train (more GPUs that train), rollout (more that
generate), depth (more open groups), deadline (a higher --max-staleness). least: seconds that each of these alone takes.
"""


def as_table(figures: Figures, rows: Sequence[Row]) -> str:
    """The figures with their sources, one line a plan, and what the columns say."""
    marked = best(rows)
    cells = [["", *(name[i] for name in _COLUMNS)] for i in (0, 1)]
    cells += [["*" * (row is marked), *(cell(row) for cell in _COLUMNS.values())] for row in rows]
    known = []
    for name, figure in figures.table.items():
        value = figure.value if isinstance(figure.value, str) else f"{figure.value:.6g}"
        known.append([name.replace("_", "-"), value, figure.source])
    lines = [NOTE, "", *_aligned(known, left=(0, 1, 2)), "", *_aligned(cells, left=(1, 12)), "", _LEGEND]
    return "\n".join(lines)


def _aligned(lines: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Columns of one width each, those of ``left`` flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    ]
