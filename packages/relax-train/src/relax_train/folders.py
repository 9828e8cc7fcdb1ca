"""Folders of checkpoints on disk: names, the ``latest`` pointer, publishing by rename, pruning. Needs no torch."""

import os
import re
import shutil
from pathlib import Path

from relax_train.settings.checkpoint import LATEST

_NAME = re.compile(r"rollout_(\d+)")


def rollout_folder(directory: Path, rollout_id: int) -> Path:
    """Where the checkpoint of a rollout is."""
    return directory / f"rollout_{rollout_id}"


def checkpoints(directory: Path) -> list[str]:
    """Names of the checkpoints in a folder, oldest first."""
    if not directory.is_dir():
        return []
    ids = sorted(int(m[1]) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name)))
    return [rollout_folder(directory, i).name for i in ids]


def latest_rollout(directory: Path) -> int | None:
    """The rollout that ``latest`` names; None when there is no such file.

    Raises:
        ValueError: the file names something that is not there.
    """
    pointer = directory / LATEST
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{pointer} cannot be read: {error}; write the name of a checkpoint there into it") from error
    match = _NAME.fullmatch(name)
    if match is None or not (directory / name).is_dir():
        there = ", ".join(checkpoints(directory)) or "none"
        raise ValueError(
            f"{pointer} names {name[:100]!r}, not a checkpoint in {directory}; write the name of one into it (there: "
            f"{there})"
        )
    return int(match[1])


def sync(path: Path) -> None:
    """Makes what was written to a file or a folder survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(unfinished: Path, target: Path) -> None:
    """Gives a finished folder its name; a folder that had the name before is gone only when the new one is there."""
    for path in unfinished.iterdir():
        sync(path)
    sync(unfinished)
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        unfinished.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def set_latest(directory: Path, name: str) -> None:
    """Lets ``latest`` name a checkpoint; at every moment it names the old or the new one."""
    unfinished = directory / f"{LATEST}.tmp"
    unfinished.write_text(name + "\n", encoding="utf-8")
    sync(unfinished)
    unfinished.replace(directory / LATEST)
    sync(directory)


def prune(directory: Path, keep: int) -> None:
    """Removes all checkpoints but the ``keep`` with the highest rollout ids and the one that ``latest`` names."""
    latest = latest_rollout(directory)
    for name in checkpoints(directory)[:-keep]:
        if name != f"rollout_{latest}":
            shutil.rmtree(directory / name, ignore_errors=True)
