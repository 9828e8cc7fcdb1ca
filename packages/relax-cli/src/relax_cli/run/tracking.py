"""Where the numbers of a run go: a JSON-lines file, TensorBoard, Weights & Biases, the terminal."""

import json
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self


class Tracker(Protocol):
    """Takes the scalars of one step."""

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Writes the scalars of one step."""
        ...

    def close(self) -> None:
        """Writes what is left; nothing is logged afterwards."""
        ...


class JsonLinesTracker:
    """Appends one JSON object a step: ``{"step", "time", name: value, ...}``; ``time`` in seconds since the epoch."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if not _ends_a_line(path):  # an earlier start was killed while it wrote
            self._file.write("\n")

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Appends one line; a number that is not finite becomes ``null``."""
        finite = {k: v if math.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardTracker:
    """Scalars for TensorBoard, written with TensorBoard's own writer (no torch in the driver)."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.summary import Writer

        directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = Writer(str(directory))

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Writes one event a scalar, at once."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbTracker:
    """Scalars for Weights & Biases (``pip install relax-cli[wandb]``)."""

    def __init__(self, *, directory: Path, name: str, config: dict[str, Any], **init: Any) -> None:
        import wandb

        self._run: Any = wandb.init(dir=str(directory), name=name, config=config, **init)

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Sends the scalars in one call."""
        self._run.log(scalars, step=step)

    def close(self) -> None:
        """Ends the run at W&B."""
        self._run.finish()


class Trackers:
    """All trackers of a run behind one call."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Writes the scalars of one step to every tracker."""
        for tracker in self._trackers:
            tracker.log(scalars, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for tracker in self._trackers:
            tracker.close()


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows that :class:`JsonLinesTracker` wrote; a line cut short by a kill is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows
