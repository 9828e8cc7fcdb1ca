"""Trackers, which take the numbers of a run: a JSON-lines file, TensorBoard, Weights & Biases, the terminal.

A run that is resumed goes on in its folder, from its last checkpoint: the steps that an earlier start took after that
checkpoint come again. The first step that a start logs tells where it goes on; what earlier starts logged from there on
is thrown away, so that each step has one value of each metric, that of the run that goes on.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from relax_cli.run.folder import ends_a_line

Histograms = Mapping[str, Mapping[int, int]]
"""By name: how often each value occurred among the samples of a step."""


class Tracker(Protocol):
    """Takes the numbers of one step."""

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        """Writes the numbers of one step."""
        ...

    def close(self) -> None:
        """Writes what is left; nothing is logged afterwards."""
        ...


class JsonLinesTracker:
    """Appends one JSON object a step: ``{"step", "time", name: value, ...}``; ``time`` in seconds since the epoch.

    ``histograms`` in it has a list of ``[value, count]`` by name, values rising.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a", encoding="utf-8")
        self._continues = path.stat().st_size > 0
        if not ends_a_line(path):  # an earlier start was killed while it wrote
            self._file.write("\n")
            self._file.flush()

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        """Appends one line; a number that is not finite becomes ``null``."""
        if self._continues:
            self._continues = False
            self._throw_away(scalars, step)
        row: dict[str, Any] = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        if histograms:
            row["histograms"] = {name: sorted(counts.items()) for name, counts in histograms.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **row}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _throw_away(self, scalars: dict[str, float], step: int) -> None:
        """Takes the lines out that this start replaces; at every moment the file is the old or the new one."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not _holds_replaced(line, scalars, step)]
        if len(kept) == len(lines):
            return
        shorter = self._path.with_name(self._path.name + ".tmp")
        shorter.write_bytes(b"".join(kept))
        self._file.close()
        shorter.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")


def _holds_replaced(line: bytes, scalars: Mapping[str, float], step: int) -> bool:
    row = _row(line) or {}
    names = row.keys() - {"step", "time"}
    return any(_is_replaced(name, row["step"], scalars, step) for name in names)


def _is_replaced(name: str, of_step: int, scalars: Mapping[str, float], step: int) -> bool:
    """Whether a metric of an earlier start is thrown away when this one begins with ``scalars`` of ``step``.

    An evaluation of that step stays until it is repeated: it is of the weights that this start begins with.
    """
    if of_step == step:
        return name in scalars or not name.startswith(("eval/", "time/eval"))
    return of_step > step


class TensorBoardTracker:
    """Scalars and histograms for TensorBoard, written with its own writer (no torch in the driver)."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._earlier = sorted(directory.glob("*tfevents*"))
        self._writer: Any = EventFileWriter(str(directory))

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        """Writes one event a scalar and a histogram, at once."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.histogram.summary import histogram_pb
        from tensorboard.plugins.scalar.summary import scalar_pb

        while self._earlier:
            _shorten(self._earlier.pop(), scalars, step)
        summaries = [scalar_pb(name, value) for name, value in scalars.items()]
        for name, counts in (histograms or {}).items():
            summaries.append(histogram_pb(name, [value for value, n in counts.items() for _ in range(n)]))
        for summary in summaries:
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


def _shorten(file: Path, scalars: Mapping[str, float], step: int) -> None:
    """Takes the events out of one of TensorBoard's files that this start replaces.

    A mark of a restart would not do: TensorBoard's own reader (``EventAccumulator``) forgets images and histograms at
    such a mark, but not the tensors that its writer makes of scalars.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    shorter, dropped = file.with_name("shorter.tmp"), False
    with shorter.open("wb") as out:
        writer = RecordWriter(out)
        for event in LegacyEventFileLoader(str(file)).Load():
            if any(_is_replaced(value.tag, event.step, scalars, step) for value in event.summary.value):
                dropped = True
            else:
                writer.write(event.SerializeToString())
        writer.flush()
    if dropped:
        shorter.replace(file)
    else:
        shorter.unlink()


class WandbTracker:
    """Scalars and histograms for Weights & Biases (``pip install relax-cli[wandb]``).

    The step is a metric of its own, ``step``, which all charts have as their axis. W&B's own step only rises: of a run
    that is resumed under its id, it would drop the steps that come again.
    """

    def __init__(self, *, directory: Path, name: str, config: dict[str, Any], **init: Any) -> None:
        import wandb

        self._histogram: Any = wandb.Histogram
        self._run: Any = wandb.init(dir=str(directory), name=name, config=config, **init)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step", step_sync=True)

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        """Sends the numbers in one call."""
        drawn = {
            name: self._histogram([value for value, n in counts.items() for _ in range(n)])
            for name, counts in (histograms or {}).items()
        }
        self._run.log({**scalars, **drawn, "step": step})

    def close(self) -> None:
        """Ends the run at W&B."""
        self._run.finish()


class Trackers:
    """All trackers of a run behind one call."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, scalars: dict[str, float], step: int, histograms: Histograms | None = None) -> None:
        """Writes the numbers of one step to every tracker."""
        for tracker in self._trackers:
            tracker.log(scalars, step, histograms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for tracker in self._trackers:
            tracker.close()


def _row(line: str | bytes) -> dict[str, Any] | None:
    """One line of ``metrics.jsonl``; None when a kill cut it short."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads what :class:`JsonLinesTracker` wrote: a dict for each step, rising, with all metrics of it.

    Of several values of a metric the last one counts. A line cut short by a kill is left out.
    """
    with path.open("rb") as lines:
        return one_a_step(row for line in lines if (row := _row(line)) is not None)


def one_a_step(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All metrics of each step in one dict, steps rising; of several values of a metric the last one counts."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]
