"""Folders of checkpoints on disk: names, the ``latest`` pointer, publishing by rename, pruning. Needs no torch."""

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from relax_train.settings.checkpoint import LATEST

FILES = "files.json"
"""File of a checkpoint with the time, and size and checksum of every other one, written last."""
_NAME = re.compile(r"rollout_([0-9]{1,18})")
_LONGEST_NAME = 200
_OLD = ".old"
"""Ending of a folder that another one of its name is about to replace; a crash just then leaves it alone there."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. Raised on every rank, with the same message."""


def rollout_folder(directory: Path, rollout_id: int) -> Path:
    """Folder that the checkpoint of a rollout is written to."""
    return directory / f"rollout_{rollout_id}"


def side_folder(directory: Path, rollout_id: int) -> Path:
    """Folder in which another process than a rank prepares its files for the checkpoint of a rollout.

    It lies beside the checkpoints, on the same file system, so that its files are moved without a copy. Like an
    unfinished checkpoint it is removed by the next save when nobody took it over.
    """
    return directory / f"rollout_{rollout_id}.rollout.tmp"


def place(directory: Path, rollout_id: int) -> Path:
    """Finds the checkpoint of a rollout: usually :func:`rollout_folder`."""
    folder = rollout_folder(directory, rollout_id)
    old = folder.with_name(folder.name + _OLD)
    return old if old.is_dir() and not folder.exists() else folder


def _ids(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return sorted({int(m[1]) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name.removesuffix(_OLD)))})


def checkpoints(directory: Path) -> list[str]:
    """Names of the checkpoints in a folder, lowest rollout first."""
    return [rollout_folder(directory, i).name for i in _ids(directory)]


def latest_rollout(directory: Path) -> int | None:
    """The rollout that ``latest`` names; without such a file the only one that is there, if there is one.

    The first save may be killed after its checkpoint is there and before ``latest`` names it.

    Raises:
        ValueError: the file names something that is not there.
    """
    pointer = directory / LATEST
    try:
        with regular(pointer).open("rb") as file:
            name = file.read(_LONGEST_NAME).decode().strip()
    except FileNotFoundError:
        ids = _ids(directory)
        return ids[0] if len(ids) == 1 else None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{pointer} cannot be read: {error}; write the name of a checkpoint there into it") from error
    match = _NAME.fullmatch(name)
    if match is None or not place(directory, int(match[1])).is_dir():
        there = ", ".join(checkpoints(directory)) or "none"
        raise ValueError(
            f"{pointer} names {name[:100]!r}, not a checkpoint in {directory}; write the name of one into it (there: "
            f"{there})"
        )
    return int(match[1])


def regular(path: Path) -> Path:
    """``path``, when it is a file that can be read to its end; a pipe, for one, would be waited at for ever.

    Raises:
        OSError: it is missing or something else.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path


def begin(unfinished: Path, files: Path | None = None) -> None:
    """Makes the folder of a checkpoint to come, and removes what saves before left unfinished.

    Args:
        unfinished: the folder.
        files: a :func:`side_folder`, whose files are moved into it.
    """
    for stale in unfinished.parent.glob("rollout_*.tmp"):
        if files is None or stale.name != files.name:
            shutil.rmtree(stale)
    unfinished.mkdir(parents=True)
    if files is not None:
        for file in sorted(files.iterdir()):
            file.rename(unfinished / file.name)
        files.rmdir()


def give_up(target: Path, reason: object, leftovers: Iterable[Path], size: int | None = None) -> str:
    """Removes what is left of a save that failed. Returns what to say.

    Args:
        target: the checkpoint that was to be.
        reason: why it failed.
        leftovers: unfinished folders.
        size: bytes that it takes, about.
    """
    directory = target.parent
    existing = next((p for p in (directory, *directory.parents) if p.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        previous = latest_rollout(directory)
        before = (
            "there was no checkpoint before"
            if previous is None
            else f"the checkpoint of rollout {previous} is as it was"
        )
    except ValueError as error:
        before = str(error)
    takes = "" if size is None else f"It takes about {size / 1e6:,.1f} MB and "
    return (
        f"cannot save {target}: {reason}. {takes}{free / 1e6:,.1f} MB are free there; make room, choose another "
        f"--save, or keep fewer with --max-actor-ckpt-to-keep. {before[0].upper()}{before[1:]}."
    )


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
    old = target.with_name(target.name + _OLD)
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    # Here a crash leaves ``old`` alone; place() finds it, and the next folder of this name replaces it.
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
    """Removes all checkpoints but the ``keep`` that were written last and the one that ``latest`` names.

    A run that was resumed from an earlier checkpoint writes lower rollout ids than those that lie there.
    """
    latest = latest_rollout(directory)
    by_time = sorted(_ids(directory), key=lambda i: (_written(place(directory, i)), i))
    for rollout_id in by_time[:-keep]:
        if rollout_id != latest:
            shutil.rmtree(place(directory, rollout_id), ignore_errors=True)


def _written(folder: Path) -> float:
    """When a checkpoint was written: what it says itself, which a copy keeps, or else its folder."""
    try:
        return float(json.loads(regular(folder / FILES).read_text(encoding="utf-8"))["written"])
    except (OSError, ValueError, TypeError, KeyError):
        return folder.stat().st_mtime
