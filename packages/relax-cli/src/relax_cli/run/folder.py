"""The folder of a run: one run, one folder, however often it is started; no start loses what an earlier one wrote.

Logs, ``metrics.jsonl``, ``timeline.jsonl`` and TensorBoard's files are appended to. ``config.toml`` and
``summary.json`` belong to one start: those of earlier starts are kept as ``config.1.toml``, ``summary.1.json``,
``config.2.toml``, ...
"""

import contextlib
import os
import secrets
from pathlib import Path

METRICS = "metrics.jsonl"
TIMELINE = "timeline.jsonl"
ENGINE_KEY = "engine_key"
"""File with the key of the engines, while they run. Only the user who started the run can read it."""
_OF_ONE_START = ("config.toml", "summary.json")


def holds_a_run(folder: Path) -> bool:
    """Whether some start has got as far as to measure something there."""
    try:
        return (folder / METRICS).stat().st_size > 0
    except OSError:
        return False


def ends_a_line(path: Path) -> bool:
    """Whether a file of lines is empty or ends with a whole one; a kill may have cut the last one short."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def prepare(folder: Path, config_text: str) -> None:
    """Makes the folder, sets aside what an earlier start wrote, and writes ``config.toml``.

    Raises:
        OSError: the folder cannot be written.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    earlier = [folder / name for name in _OF_ONE_START if (folder / name).exists()]
    if earlier:
        number = 1
        while any(_numbered(folder / name, number).exists() for name in _OF_ONE_START):
            number += 1
        for path in earlier:
            path.rename(_numbered(path, number))
    (folder / "config.toml").write_text(config_text, encoding="utf-8")


def make_engine_key(folder: Path) -> str:
    """Makes up a key for the engines of one start, and writes it where their user finds it."""
    key = secrets.token_urlsafe(32)
    folder.mkdir(parents=True, exist_ok=True)
    remove_engine_key(folder)  # a file that exists would keep its mode
    with os.fdopen(os.open(folder / ENGINE_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key


def remove_engine_key(folder: Path) -> None:
    """Removes the file of :func:`make_engine_key`, if there is one."""
    with contextlib.suppress(OSError):
        (folder / ENGINE_KEY).unlink()


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
