"""Finds the files of profiled runs and says what each is, by its name."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from relax_profiling.recorders.trace_files import MEMORY_DIR, SGLANG_DIR, TRAIN_DIR, RankTag
from relax_profiling.timeline.read import FILE as TIMELINE
from relax_profiling.timeline.read import run_folders

Role = Literal["train", "engine", "trace", "snapshot", "memray"]

_TRACE_SUFFIXES = (".json", ".json.gz")
_TRAIN = re.compile(r"^(train_overall|train_actor|train_log_probs)_")
_ENGINE = re.compile(r"^(?:engine(\d+)-)?(?:(\d{9,})(?:\.\d+)?-)?.*TP-(\d+)")
_STAMP = re.compile(r"(?:\.|time|-)(\d{9,11})(?:\.|_|-)")


@dataclasses.dataclass(frozen=True)
class FoundFile:
    """One file of a run.

    Attributes:
        role: ``train``, ``engine``, ``trace`` (a trace whose name says neither), ``snapshot`` or ``memray``.
        run: the folder of its run, ``traces/NAME``, or the folder it lies in.
        label: how the report calls it: the rank tag, ``engine0 TP-0``, or the file name.
        target: of a training trace.
        rollout: of an engine's trace.
        stamp: epoch seconds in its name, 0 when there are none.
    """

    path: Path
    role: Role
    run: Path
    label: str
    target: str = ""
    rollout: int | None = None
    stamp: int = 0


def find_files(roots: Sequence[Path]) -> tuple[list[FoundFile], list[str]]:
    """All traces and memory recordings under folders, or named one by one, and what is wrong, in words."""
    found: list[FoundFile] = []
    problems: list[str] = []
    for root in roots:
        try:
            _find_under(root, found, problems)
        except OSError as e:  # a name that is too long, a folder that may not be looked into
            problems.append(f"{root}: {e.strerror or e}")
    return found, problems


def _find_under(root: Path, found: list[FoundFile], problems: list[str]) -> None:
    if root.is_file():
        file = describe(root)
        if file is None and root.name == TIMELINE:
            return
        if file is None:
            problems.append(
                f"{root}: neither a trace (.json, .json.gz) nor a memory recording (.pickle, .pickle.gz, .bin)"
            )
        else:
            found.append(file)
    elif root.is_dir():
        runs = set(run_folders(root))
        for path in sorted(root.rglob("*")):
            if path.name.startswith(".") and path.name.endswith(".partial"):
                problems.append(f"{path}: left behind by a recording that did not end; not read")
            hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
            file = describe(path) if not hidden and path.is_file() else None
            # A run writes JSON of its own (its summary), which is no trace.
            if file is not None and not (file.role == "trace" and runs.intersection(path.parents)):
                found.append(file)
    elif root.exists():
        problems.append(f"{root}: no regular file (a pipe, socket or device)")
    else:
        problems.append(f"{root}: there is no such file or folder")


def describe(path: Path) -> FoundFile | None:
    """The role of a file, by its name; None for a file that is none of ours."""
    name = path.name
    stamp_found = _STAMP.search(name)
    stamp = int(stamp_found.group(1)) if stamp_found else 0
    tag = RankTag.parse(name)
    run = _run_folder(path)
    if name.endswith((".pickle", ".pickle.gz")):
        return FoundFile(path, "snapshot", run, str(tag or name), stamp=stamp)
    if name.endswith(".bin"):
        return FoundFile(path, "memray", run, str(tag or name), stamp=stamp)
    if not name.endswith(_TRACE_SUFFIXES) or name.startswith("merged"):
        return None
    target = _TRAIN.match(name)
    if target:
        return FoundFile(path, "train", run, str(tag or name), target=target.group(1), stamp=stamp)
    engine = _ENGINE.match(name)
    if engine:
        rollout = re.match(r"rollout_(\d+)$", path.parent.name)
        return FoundFile(
            path,
            "engine",
            run,
            _engine_label(name),
            rollout=int(rollout.group(1)) if rollout else None,
            stamp=stamp,
        )
    return FoundFile(path, "train" if tag else "trace", run, str(tag or name), stamp=stamp)


def _engine_label(name: str) -> str:
    """``engine0 TP-1 DECODE``."""
    stem = re.sub(r"(\.trace)?\.json(\.gz)?$", "", name)
    return (
        " ".join(re.sub(r"(?<=-)\d{9,}(\.\d+)?-|^\d{9,}(\.\d+)?-", "", stem).replace("-TP-", " TP-").split())
        .replace("-DECODE", " DECODE")
        .replace("-EXTEND", " EXTEND")
    )


def _run_folder(path: Path) -> Path:
    for parent in path.parents:
        if parent.name in (SGLANG_DIR, TRAIN_DIR, MEMORY_DIR):
            return parent.parent
    return path.parent
