"""The output of a run for its user: one line a step, a table at the end, a plot of the reward."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from relax_cli.run.tracking import one_a_step

log = logging.getLogger(__name__)

PHASES = ("generate", "log_probs", "train", "weight_update")
"""The phases of a step that the progress line shows, in the order in which they run."""
ASYNC_PHASES = ("wait_for_rollout", "log_probs", "train", "wait_for_eval", "pause", "weight_update")
"""Those of a trainer that works beside the engines: where it waits for them, and where they wait for it."""


def shown_phases(scalars: Mapping[str, Any]) -> list[str]:
    """The phases of this step's mode that took place in it."""
    phases = ASYNC_PHASES if "time/wait_for_rollout" in scalars else PHASES
    return [phase for phase in phases if f"time/{phase}" in scalars]


def who_waits(scalars: Mapping[str, Any]) -> str:
    """In words, who of trainer and engines waited for the other in a step; empty where they take turns."""
    if "async/trainer_idle_share" not in scalars:
        return ""
    trainer, engines = scalars["async/trainer_idle_share"], scalars.get("async/engine_idle_share", 0.0)
    paused, opened = scalars.get("async/engine_paused_share", 0.0), scalars.get("rollout/open_groups", 0.0)
    return (
        f"trainer waits {trainer:.0%}, engines wait {engines:.0%} and rest {paused:.0%}, "
        f"{opened:.0f} groups open, {scalars.get('async/ready_groups', 0.0):.0f} ready"
    )


class Progress:
    """Prints to the terminal; on anything else the same text without colours. The log of the driver has it too."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._start = time.monotonic()

    def note(self, message: str, style: str | None = None) -> None:
        """One line with the seconds since the start."""
        self.console.print(f"[{time.monotonic() - self._start:6.1f} s] {message}", style=style, markup=False)
        log.info("%s", message)

    def step(self, rollout_id: int, last: int | None, scalars: dict[str, float]) -> None:
        """The line of one training step."""
        of = f"/{last}" if last is not None else ""
        parts = [f"step {rollout_id}{of}"]
        if "rollout/reward" in scalars:
            parts.append(f"reward {scalars['rollout/reward']:.3f}")
        if "train/grad_norm" in scalars:  # the loss itself is near 0 by construction: advantages sum to 0 in a group
            parts.append(f"grad norm {scalars['train/grad_norm']:.3f}")
        if speed := scalars.get("perf/tokens_per_s", scalars.get("perf/tokens_per_s_step")):
            parts.append(f"{speed:.0f} tok/s" if speed >= 10 else f"{speed:.1f} tok/s")
        if "staleness/max" in scalars:
            parts.append(f"staleness {scalars['staleness/max']:.0f}")
        parts.append(" ".join(f"{phase} {scalars[f'time/{phase}']:.2f}s" for phase in shown_phases(scalars)))
        parts.append(who_waits(scalars))
        self.note("  ".join(filter(None, parts)))

    def evaluation(self, rollout_id: int, scalars: dict[str, float]) -> None:
        """The line of one evaluation, of the weights that rollout ``rollout_id`` is, or would be, generated with."""
        shown = {k: v for k, v in scalars.items() if k.endswith("/reward") or "/pass@" in k}
        values = "  ".join(f"{k.removeprefix('eval/')} {v:.3f}" for k, v in shown.items())
        when = f"after step {rollout_id - 1}" if rollout_id else "before step 0"
        self.note(f"eval {when}  {values}", style="bold")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """The table at the end of the run."""
        table = Table(title="Summary", show_header=False, title_justify="left")
        table.add_column("what")
        table.add_column("value", overflow="fold")
        for name, value in rows:
            table.add_row(name, value)
            log.info("%s: %s", name, value)
        self.console.print(table)


def plot_reward(metrics: Sequence[dict[str, Any]], path: Path) -> bool:
    """Draws training and evaluation reward over the steps into a PNG.

    Args:
        metrics: rows of ``metrics.jsonl``.
        path: file to write.

    Returns:
        False when there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    metrics = one_a_step(metrics)  # else the line of a resumed run would go back in time
    train = [(m["step"], m["rollout/reward"]) for m in metrics if m.get("rollout/reward") is not None]
    evals: dict[str, list[tuple[int, float]]] = {}
    for m in metrics:
        for key, value in m.items():
            if key.startswith("eval/") and key.endswith("/reward") and value is not None:
                evals.setdefault(key.split("/")[1], []).append((m["step"], value))
    if not train and not evals:
        return False
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), label="training prompts", linewidth=1.2, alpha=0.7)
    for name, points in sorted(evals.items()):
        axes.plot(*zip(*points, strict=True), label=f"eval: {name}", marker="o", markersize=4)
    axes.set_xlabel("training step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
