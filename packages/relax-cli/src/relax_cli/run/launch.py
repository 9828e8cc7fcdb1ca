"""Runs a resolved configuration: Ray up, actors up, the loop, everything down again, an exit code."""

import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from relax_train.settings.checkpoint import ROLLOUT_ID

from relax_cli.cluster.ray_cluster import cluster_gpus, connected
from relax_cli.cluster.ray_watch import RayLost
from relax_cli.cluster.slots import plane_cpus, slots_needed
from relax_cli.cluster.waits import StopFlag, StopRequested
from relax_cli.config.export import to_toml
from relax_cli.config.resolution import fit
from relax_cli.config.run_config import RunConfig
from relax_cli.controllers.base import Outcome
from relax_cli.controllers.modes import CONTROLLERS
from relax_cli.run import folder as run_folder
from relax_cli.run.progress import Progress, plot_reward, shown_phases
from relax_cli.run.timeline import TimelineFile, setup_of
from relax_cli.run.tracking import JsonLinesTracker, TensorBoardTracker, Tracker, Trackers, WandbTracker, read_metrics
from relax_cli.workers.group import WorkerGroups

log = logging.getLogger(__name__)


def run(config: RunConfig) -> int:
    """Runs ``relax train``.

    Args:
        config: a resolved and validated ``RunConfig``.

    Returns:
        the process's exit code: 0, 1 for a failure that was explained on stderr, 128 + signal after SIGINT/SIGTERM.
    """
    progress = Progress()
    try:
        run_folder.prepare(config.run_dir, to_toml(config))
        _log_to_file(config)
    except OSError as error:
        progress.note(f"FAILED cannot write the run directory {config.run_dir}: {error}", style="bold red")
        return 1
    progress.note(f"run directory {config.run_dir}")
    stop, outcome = StopFlag(), Outcome()
    started, clock = time.time(), time.monotonic()
    with _signals(stop, progress):
        try:
            try:
                _run_on_ray(config, progress, stop, outcome)
            except StopRequested as request:
                progress.note(f"stopped by request while waiting for {request}")
            if stop.requested:
                outcome.stopped_by = stop.signal_number
            _finish(config, outcome, started, time.monotonic() - clock, progress)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code in (signal.SIGINT, signal.SIGTERM):
                stop.set(error.code)
                progress.note("stopped by request while Ray was starting")
                return 128 + error.code
            log.exception("the run failed")
            if stop.requested:  # whoever signals us may have signalled our processes too
                progress.note(f"stopped by request; what was running ended with {explanation(error)}")
                return 128 + (stop.signal_number or 0)
            if stop.broken is None:  # else it was said at once
                _explain(error, config, outcome, progress)
            return 1
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _run_on_ray(config: RunConfig, progress: Progress, stop: StopFlag, outcome: Outcome) -> None:
    def tell(lost: RayLost) -> None:
        _explain(lost, config, outcome, progress)

    ray_logs, key = config.run_dir / "logs" / "ray", config.run_dir / run_folder.ENGINE_KEY
    # Each slot of the run is one of Ray's CPUs; a few more let Ray's own tasks run beside them.
    slots = 0 if config.placement is None else slots_needed(config.placement) + 2
    address, cpus = config.cluster.ray_address, max(8, slots + plane_cpus(config.cluster, config.data))
    with connected(
        address, min_cpus=cpus, note=progress.note, stop=stop, tell=tell, logs=ray_logs, remove=key
    ) as nodes:
        config = fit(config, cluster_gpus())
        shape = config.placement
        assert shape is not None, "fit() knows the cluster"
        progress.note(f"Ray is up; the run is on {shape.device}")
        # Before the engines load: a tracker that cannot be opened (no key, no disk) says so at once.
        with Trackers(_trackers(config)) as trackers:
            workers = WorkerGroups(config, stop=stop, note=progress.note, nodes=nodes)
            try:
                workers.start()
                stop.stepping = True
                controller = CONTROLLERS[config.cluster.mode]
                timeline = TimelineFile(config.run_dir / run_folder.TIMELINE, setup_of(config), progress.note)
                controller(config, workers, trackers, progress, stop, outcome, timeline).run()
            finally:
                workers.close()


def _log_to_file(config: RunConfig) -> None:
    handler = logging.FileHandler(config.run_dir / "logs" / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.addFilter(lambda record: record.exc_info is None)  # tracebacks go to the file, explanations to the user
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    root.addHandler(console)


def _trackers(config: RunConfig) -> list[Tracker]:
    trackers: list[Tracker] = [JsonLinesTracker(config.run_dir / run_folder.METRICS)]
    if config.logging.use_tensorboard:
        trackers.append(TensorBoardTracker(config.run_dir / "tensorboard"))
    if config.logging.use_wandb:
        trackers.append(wandb_tracker(config))
    return trackers


def wandb_tracker(config: RunConfig) -> WandbTracker:
    """Weights & Biases as the options ask for it; the key comes from WANDB_API_KEY."""
    options = config.logging
    if options.wandb_host is not None:
        os.environ["WANDB_BASE_URL"] = options.wandb_host
    return WandbTracker(
        directory=Path(options.wandb_dir or config.run_dir),
        name=config.name,
        config=tomllib.loads(to_toml(config)),
        project=options.wandb_project or "relax",
        entity=options.wandb_team,
        group=options.wandb_group or config.name,
        mode=options.wandb_mode,
        id=options.wandb_run_id,
        resume="allow" if options.wandb_run_id is not None else None,
    )


@contextlib.contextmanager
def _signals(stop: StopFlag, progress: Progress) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop; a second one ends the process at once (the children follow it)."""

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            os._exit(128 + number)
        stop.set(number)
        name = signal.Signals(number).name
        what = f"finishing the step if it ends within {stop.grace_s:.0f} s, then stopping"
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            now = what if stop.stepping else "stopping"
            progress.note(f"{name}: {now}; a second signal ends the run at once, without summary")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _explain(error: BaseException, config: RunConfig, outcome: Outcome, progress: Progress) -> None:
    """Says on the terminal what went wrong (the cause, not Ray's wrapping of it), what is whole, and how to go on."""
    progress.note(f"FAILED {explanation(error)}", style="bold red")
    if outcome.next_rollout > outcome.first_rollout or outcome.last_checkpoint:
        progress.note(_how_to_go_on(config, outcome, explanation(error)))
    progress.note(f"logs: {config.run_dir / 'logs'} (the traceback is in driver.log)")


def _how_to_go_on(config: RunConfig, outcome: Outcome, failure: str) -> str:
    """Names the last checkpoint, what came after it, and the way to resume after a ``failure``."""
    if outcome.last_checkpoint is None:
        return "no checkpoint was written yet: --save FOLDER --save-interval N writes one every N rollouts"
    folder, saved = outcome.last_checkpoint, outcome.saved_rollout
    what = f"the checkpoint of rollout {saved} in {folder}" if saved is not None else f"the checkpoint in {folder}"
    # The same row would end the run again, and a file in which it was mended is none that the checkpoint knows.
    skip = "--skip-bad-rows " if "--skip-bad-rows" in failure else ""
    return f"{what} is whole; to go on from there, start the same command with {skip}--load {folder}"


_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def explanation(error: BaseException) -> str:
    """The message of an error without tracebacks; the type stands before it unless it is a user's ValueError."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):  # a RayTaskError holds what the actor raised
        error = cause
    text = _ANSI.sub("", str(error)).strip() or repr(error)
    if "ray::" in text:  # what the actor raised could not be sent, only its traceback
        return [line for line in text.splitlines() if line and not line.startswith((" ", "ray::"))][-1]
    message = text.split("\nTraceback (most recent call last)")[0].rstrip()
    message = "\n".join([message, *getattr(error, "__notes__", ())])
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"


def _not_saved(config: RunConfig, outcome: Outcome) -> str | None:
    """Names the trained rollouts that no checkpoint and no export has; None when there are none."""
    first = outcome.first_rollout if outcome.saved_rollout is None else outcome.saved_rollout + 1
    last = outcome.next_rollout - 1
    if config.debug.debug_rollout_only or first > last:
        return None
    rollouts = f"rollout {last}" if first == last else f"rollouts {first} to {last}"
    checkpoint = config.train.checkpoint
    if checkpoint.save is None and checkpoint.save_hf is None:
        hint = f"add --save FOLDER, or --save-hf 'FOLDER/{ROLLOUT_ID}' for Hugging Face's format"
        return f"{rollouts}; to keep the model, {hint}"
    return f"{rollouts}: the run was ended before it could save them"


def _finish(config: RunConfig, outcome: Outcome, started: float, seconds: float, progress: Progress) -> None:
    """The summary table, ``summary.json`` and the plot.

    Args:
        started: when this launch began, seconds since the epoch: the run directory may hold earlier ones too.
    """
    path = config.run_dir / run_folder.METRICS
    metrics = read_metrics(path) if path.exists() else []
    steps = [m for m in metrics if "time/step" in m and m["time"] >= started]
    rows = [
        ("steps", f"{len(steps)} (rollouts {outcome.first_rollout} to {outcome.next_rollout - 1})" if steps else "0"),
        ("wall time", f"{seconds:.0f} s"),
    ]
    rewards = [m["rollout/reward"] for m in steps if m.get("rollout/reward") is not None]
    if rewards:
        rows.append(("training reward", f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"))
    for key in sorted({k for _, e in outcome.evals for k in e if k.endswith("/reward")}):
        values = [e[key] for _, e in outcome.evals if key in e]
        rows.append((key.removesuffix("/reward"), f"{values[0]:.3f} -> {values[-1]:.3f}"))
    if steps:
        total = sum(m["time/step"] for m in steps)
        phases = dict.fromkeys(phase for m in steps for phase in shown_phases(m))
        spent = {p: sum(m.get(f"time/{p}") or 0.0 for m in steps) / total for p in phases}
        spent["other"] = max(0.0, 1.0 - sum(spent.values()))  # sleep and wake, saving, ...
        shares = [f"{phase} {share:.0%}" for phase, share in spent.items()]
        rows.append(("time of the steps", ", ".join(shares)))
    plot = config.run_dir / "reward.png"
    if plot_reward(metrics, plot):
        rows.append(("plot", str(plot)))
    if outcome.last_checkpoint:
        rows.append(("checkpoint", outcome.last_checkpoint))
    if steps and (lost := _not_saved(config, outcome)) is not None:
        rows.append(("not saved", lost))
    if outcome.stopped_by is not None:
        rows.append(("ended by", signal.Signals(outcome.stopped_by).name))
    rows.append(("run directory", str(config.run_dir)))
    summary = {"rows": dict(rows), "evals": [{"rollout_id": i, **e} for i, e in outcome.evals], "seconds": seconds}
    (config.run_dir / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    progress.summary(rows)
