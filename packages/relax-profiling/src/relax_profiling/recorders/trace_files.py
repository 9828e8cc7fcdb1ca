"""Folders and names of traces. No file is ever written twice under the same name. Needs no torch.

::

    traces/NAME/sglang_trace/rollout_2/engine0-1713780123-TP-0.trace.json.gz
    traces/NAME/train_trace/train_overall_rank0_dp0_tp0_pp0.1713780123.pt.trace.json.gz
    traces/NAME/memory_snapshot/memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.pickle

Times in names are integer epoch seconds; a second file in the same second gets a higher number.
"""

import dataclasses
import errno
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path

Clock = Callable[[], float]

SGLANG_DIR, TRAIN_DIR, MEMORY_DIR = "sglang_trace", "train_trace", "memory_snapshot"

# A directory that holds this many files of one name differs from any use we know; a loop without end would hide it.
_MAX_TRIES = 100_000
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


@dataclasses.dataclass(frozen=True)
class RankTag:
    """The place of a process among all: global rank, and its data, tensor and pipeline parallel ranks."""

    rank: int = 0
    dp: int = 0
    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"rank{self.rank}_dp{self.dp}_tp{self.tp}_pp{self.pp}"

    @classmethod
    def parse(cls, text: str) -> "RankTag | None":
        """The tag within a file name, or None."""
        found = re.search(r"rank(\d+)_dp(\d+)_tp(\d+)_pp(\d+)", text)
        return cls(*map(int, found.groups())) if found else None


@dataclasses.dataclass(frozen=True)
class TraceLayout:
    """The folders of one run, ``traces/NAME``."""

    root: Path

    def rollout(self, rollout_id: int) -> Path:
        """The folder of the traces of one rollout, by its absolute id."""
        return self.root / SGLANG_DIR / f"rollout_{rollout_id}"

    @property
    def train(self) -> Path:
        """The folder of the training traces."""
        return self.root / TRAIN_DIR

    @property
    def memory(self) -> Path:
        """The folder of the memory recordings."""
        return self.root / MEMORY_DIR


def training_trace_name(target: str, tag: RankTag, stamp: int) -> str:
    """``train_overall_rank0_dp0_tp0_pp0.1713780123.pt.trace.json.gz``."""
    return f"{target}_{tag}.{stamp}.pt.trace.json.gz"


def memory_snapshot_name(tag: RankTag, stamp: int, suffix: str) -> str:
    """``memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.pickle``."""
    return f"memory_snapshot_time{stamp}_{tag}_{suffix}"


def partial_path(directory: Path) -> Path:
    """A name in ``directory`` that no other process and no reader takes, for a file that is still being written."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f".{uuid.uuid4().hex}.partial"


def publish(partial: Path, directory: Path, name: Callable[[int], str], clock: Clock = time.time) -> Path:
    """Gives a finished file its name: the first of ``name(now)``, ``name(now + 1)``, ... that is free.

    Nothing is overwritten, also when several processes with the same rank label publish in the same second.

    Args:
        partial: the finished file, on the file system of ``directory``; it is gone afterwards.
        name: maps integer epoch seconds to a file name.

    Returns:
        The path of the file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stamp = int(clock())
    for later in range(_MAX_TRIES):
        target = directory / name(stamp + later)
        if move_exclusive(partial, target):
            return target
    raise FileExistsError(f"{directory} holds {_MAX_TRIES} files named like {name(stamp)}; use another folder")


def move_exclusive(source: Path, target: Path) -> bool:
    """Moves a file to a name that is free; False, and nothing is changed, when the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError as e:
        if e.errno not in _NO_HARD_LINKS:
            raise
        # A file system without hard links: the exclusive create takes the name, the rename fills it.
        try:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        os.replace(source, target)
        return True
    os.unlink(source)
    return True


@dataclasses.dataclass(frozen=True)
class StagingFolder:
    """A folder of its own for the files of one engine and one recording, and the second that its files are named by."""

    path: Path
    engine: int
    stamp: int

    @property
    def prefix(self) -> str:
        """``engine0-1713780123``, the beginning of the names that its files get."""
        return f"engine{self.engine}-{self.stamp}"


def claim_staging(directory: Path, engine: int, clock: Clock = time.time) -> StagingFolder:
    """Makes the hidden folder ``.engine<i>-<stamp>.partial``, which reserves the names ``engine<i>-<stamp>-*``."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = int(clock())
    for later in range(_MAX_TRIES):
        staging = StagingFolder(directory / f".engine{engine}-{stamp + later}.partial", engine, stamp + later)
        try:
            staging.path.mkdir()
        except FileExistsError:
            continue
        # Looked at only after the folder is ours: whoever had this second before has moved its files by now.
        if not any(directory.glob(f"{staging.prefix}-*")):
            return staging
        staging.path.rmdir()
    raise FileExistsError(f"{directory} holds {_MAX_TRIES} traces of engine {engine}; use another folder")
