"""The timeline of a run as HTML: a row for the trainer and each engine over the wall clock, and shares."""

import time
from collections.abc import Iterable, Sequence

from relax_profiling.report.style import table, text
from relax_profiling.timeline.read import Step
from relax_profiling.timeline.shares import PUSH, WAITS, Timeline, idle_in_turn

_WIDTH, _ROW, _GAP = 1000, 18, 4
_STEPS, _ENGINE_STEPS = 12, 128
"""Steps that are drawn in detail, the last ones; fewer with many engines, so that a page stays below 2 MB."""
_COLUMNS = 200
"""Columns of the picture of all steps; of more steps, several share one."""
_THIN = 'vector-effect="non-scaling-stroke"'

_KINDS = {
    "work": ("works", "--compute"),
    "push": ("weights travel, sides change", "--copy"),
    "save": ("saves", "--overlap"),
    "wait": ("waits", "--warn"),
    "generate": ("the engines' turn", "--line"),
    "busy": ("has requests", "--compute"),
    "idle": ("has none", "--warn"),
    "rest": ("the trainer's turn", "--line"),
    "paused": ("paused for a push", "--comm"),
}


def draw(timeline: Timeline) -> str:
    """The card of one run."""
    setup = timeline.setup
    last = timeline.steps[-max(1, min(_STEPS, _ENGINE_STEPS // max(1, len(timeline.engines)))) :]
    facts = (
        f"{len(timeline.steps)} steps, {setup.flag}, {setup.train_gpus} GPUs train and {setup.engine_gpus} generate"
        if setup.device == "cuda"
        else f"{len(timeline.steps)} steps, {setup.flag}, on CPU"
    )
    parts = [
        f'<div class="card"><h3>Trainer and engines</h3><div class="file">{text(timeline.file)}</div>',
        f"<p>{text(facts)}</p>",
        f'<p class="soft">shares of {text(timeline.window_in_words)}</p>{_shares(timeline)}',
    ]
    if len(timeline.steps) > 2:
        parts.append(f'<p class="soft">all steps: what the trainer did with each</p>{_overview(timeline.steps)}')
    parts.append(f'<p class="soft">steps {last[0].step} to {last[-1].step} on the wall clock</p>')
    parts.append(_lanes(last))
    parts.append(_legend())
    return "".join(parts) + "</div>"


def kind_of(phase: str) -> str:
    """What the trainer does in a phase of the driver."""
    if phase in WAITS:
        return "wait"
    if phase in PUSH:
        return "push"
    if phase in ("generate", "eval"):
        return "generate"
    return "save" if phase == "save" else "work"


def _shares(timeline: Timeline) -> str:
    rows = [["trainer", *(f"{name} {share:.1%}" for name, share in list(timeline.trainer.items())[:6])]]
    width = max(len(row) for row in rows)
    trainer = table([("", False)] * width, [row + [""] * (width - len(row)) for row in rows])
    engines = table(
        [("engine", False), *((t, True) for t in ("busy", "idle", "paused", "trainer's turn", "requests while busy"))],
        (
            [
                name,
                *(f"{value:.1%}" for value in (e.busy, e.idle, e.paused)),
                f"{e.resting:.1%}" if timeline.setup.mode == "colocate" else "",
                f"{e.running:.1f}",
            ]
            for name, e in timeline.engines.items()
        ),
    )
    return trainer + engines


def _lanes(steps: Sequence[Step]) -> str:
    """Trainer and engines over each other, as wide as the page."""
    names = ["trainer", *dict.fromkeys(name for step in steps for name in step.engines)]
    begin, end = steps[0].start, max(step.start + step.end for step in steps)
    scale = _WIDTH / max(1e-3, end - begin)
    height = len(names) * (_ROW + _GAP)

    def box(row: int, at: tuple[float, float], kind: str, label: str) -> str:
        words, colour = _KINDS[kind]
        left, right = max(0.0, (at[0] - begin) * scale), min(float(_WIDTH), (at[1] - begin) * scale)
        if right <= left:
            return ""
        title = text(f"{names[row]} {label}: {words}, {at[1] - at[0]:.3f} s, {at[0] - begin:.3f} s after the start")
        return (
            f'<rect x="{left:.2f}" y="{row * (_ROW + _GAP)}" width="{max(right - left, 0.2):.2f}" height="{_ROW}" '
            f'fill="var({colour})"><title>{title}</title></rect>'
        )

    shapes = []
    for step in steps:
        for name, a, b in step.phases:
            shapes.append(box(0, (step.start + a, step.start + b), kind_of(name), f"step {step.step} {name}"))
        for name, engine in step.engines.items():
            row, label, in_turns = names.index(name), f"step {step.step}", step.run.mode == "colocate"
            for state, a, b in engine.intervals:
                kind = "rest" if in_turns and state == "idle" else state
                shapes.append(box(row, (step.start + a, step.start + b), kind, label))
            for a, b in idle_in_turn(step, name) if in_turns else ():
                shapes.append(box(row, (step.start + a, step.start + b), "idle", label))
        x = (step.start + step.end - begin) * scale
        shapes.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{height}" stroke="var(--soft)" {_THIN}/>')
    clock = (time.strftime("%H:%M:%S", time.gmtime(begin + (end - begin) * part)) for part in (0.0, 0.5, 1.0))
    times = "".join(f"<span>{at} UTC</span>" for at in clock)
    return _picture(names, "".join(shapes), height, times, "trainer and engines over time")


def _overview(steps: Sequence[Step]) -> str:
    """One column for a step, or for several: the share that the trainer worked, pushed, saved and waited."""
    each = -(-len(steps) // _COLUMNS)
    columns = [steps[i : i + each] for i in range(0, len(steps), each)]
    width, height, shapes = _WIDTH / len(columns), 80.0, []
    for i, column in enumerate(columns):
        whole, y = sum(step.seconds for step in column), height
        label = f"steps {column[0].step} to {column[-1].step}" if each > 1 else f"step {column[0].step}"
        for kind in ("work", "push", "save", "generate", "wait"):
            names = {name for step in column for name, _, _ in step.phases if name != "eval" and kind_of(name) == kind}
            share = min(1.0, sum(step.spent(*names) for step in column) / whole)
            y -= share * height
            title = text(f"{label}: {_KINDS[kind][0]} {share:.0%} of {whole:.2f} s")
            shapes.append(
                f'<rect x="{i * width:.2f}" y="{max(0.0, y):.2f}" width="{width:.2f}" height="{share * height:.2f}" '
                f'fill="var({_KINDS[kind][1]})"><title>{title}</title></rect>'
            )
    ends = f"<span>step {steps[0].step}</span><span>step {steps[-1].step}</span>"
    return _picture(["100%", "50%", "0%"], "".join(shapes), int(height), ends, "shares of the trainer over all steps")


def _picture(levels: Iterable[str], shapes: str, height: int, below: str, label: str) -> str:
    side = "".join(f"<span>{text(level)}</span>" for level in levels)
    return (
        f'<div class="timeline"><div class="levels">{side}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="none" style="height:{height}px" role="img" '
        f'aria-label="{text(label)}">{shapes}</svg><div class="times">{below}</div></div>'
    )


def _legend() -> str:
    trainer = ("work", "push", "save", "wait", "generate")
    groups = (("trainer", trainer), ("engine", ("busy", "idle", "paused", "rest")))
    return "".join(
        f'<div class="legend"><b>{who}</b>'
        + "".join(
            f'<span><i class="dot" style="background:var({_KINDS[kind][1]})"></i>{text(_KINDS[kind][0])}</span>'
            for kind in kinds
        )
        + "</div>"
        for who, kinds in groups
    )
