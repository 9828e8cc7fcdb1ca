"""What the command prints: rows as a table or as JSON, and what they rest on."""

import dataclasses
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence

from relax_data.options import flag

from relax_cli.simulate.figures import Figures
from relax_cli.simulate.model import Plan, Step

NOTE = "A model, not a measurement: rewards, filters, evaluation, checkpoints and memory are left out."


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

    @property
    def name(self) -> str:
        """What tells the row from the others."""
        return f"{self.plan.mode} ({self.gpus} GPUs, --max-staleness {self.plan.bound.max_staleness})"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What the command has worked out.

    Attributes:
        figures: all figures.
        rows: one for each plan; colocate alone is the first.
        without: for a figure that is assumed, by name: another value, and the rows at that value.
        notes: in words, what of the run or of the rows is left out.
    """

    figures: Figures
    rows: Sequence[Row]
    without: Mapping[str, tuple[float, Sequence[Row]]]
    notes: tuple[str, ...]

    def remarks(self) -> list[str]:
        """What a reader of the rows has to know: what is left out, and what they rest on that nobody has measured."""
        found, marked = list(self.notes), best(self.rows)
        if self.figures.assumed:
            values = (f"{_dashed(name)} {self.figures.number(name):.6g}" for name in self.figures.assumed)
            found.append(f"Rests on figures that are assumed, neither given nor measured: {', '.join(values)}.")
        for name, (value, rows) in self.without.items():
            same, other = rows[list(self.rows).index(marked)], best(rows)
            if marked is self.rows[0] and other is same:  # its gain is over itself
                found.append(f"With {flag(name)} {value:g} {marked.name} is best too.")
                continue
            told = (
                f"With {flag(name)} {value:g} the gain of {marked.name} is {same.speed_up:.2f} instead of "
                f"{marked.speed_up:.2f}"
            )
            changes = f", and {other.name} is best with {other.speed_up:.2f}" if other is not same else ""
            found.append(f"{told}{changes}.")
        return found


def best(rows: Sequence[Row]) -> Row:
    """The row with the shortest step; of those within 2 % the one with the freshest samples."""
    shortest = min(row.step.seconds for row in rows)
    near = (row for row in rows if row.step.seconds <= 1.02 * shortest)
    return min(near, key=lambda row: (row.step.staleness_max, row.step.staleness_mean, row.step.seconds))


def as_json(found: Comparison) -> str:
    """Figures and rows: seconds, shares, versions, and tokens a step."""
    marked = best(found.rows)
    rows = [{"best": row is marked, **dataclasses.asdict(row)} for row in found.rows]
    table = {name: dataclasses.asdict(figure) for name, figure in found.figures.table.items()}
    answer = {"note": NOTE, "remarks": found.remarks(), "figures": table, "rows": rows}
    return json.dumps(answer, indent=2) + "\n"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


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
generate), push or switch (fewer seconds of it), depth (more open groups), deadline (a higher --max-staleness), drain (a
push waits until all that runs has ended: no --no-partial-rollout). least: seconds that each of these alone takes.
"""


def as_table(found: Comparison) -> str:
    """The figures with their sources, one line a plan, what one has to know of them, and what the columns say."""
    marked = best(found.rows)
    cells = [["", *(name[i] for name in _COLUMNS)] for i in (0, 1)]
    cells += [["*" * (row is marked), *(cell(row) for cell in _COLUMNS.values())] for row in found.rows]
    known = []
    for name, figure in found.figures.table.items():
        value = figure.value if isinstance(figure.value, str) else f"{figure.value:.6g}"
        known.append([_dashed(name), value, figure.source])
    told = [line for remark in found.remarks() for line in textwrap.wrap(remark, 120, break_on_hyphens=False)]
    lines = [NOTE, "", *_aligned(known, left=(0, 1, 2)), "", *_aligned(cells, left=(1, 12)), ""]
    return "\n".join([*lines, *told, *([""] if told else []), _LEGEND])


def _aligned(lines: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Columns of one width each, those of ``left`` flush left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(line)).rstrip()
        for line in lines
    ]
