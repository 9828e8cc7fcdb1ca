"""The manifest of a checkpoint, and whether a run can go on with it. Needs no torch: a plan asks too.

``relax.json`` is written first; ``files.json`` last, with the time and with size and checksum of every file: by the
size a copy of half a checkpoint is known as such without reading it, by the checksum (CRC-32) a flipped bit.
"""

import concurrent.futures
import dataclasses
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from relax_train.checkpoint.file_list import FORMAT, MANIFEST, OLD_FORMAT, needed_files, read_list
from relax_train.checkpoint.folders import (
    FILES,
    CheckpointError,
    checkpoints,
    latest_rollout,
    place,
    publish,
    regular,
    set_latest,
)
from relax_train.models.architectures.base import SHAPE_KEYS, experts_key
from relax_train.settings.checkpoint import LATEST

OPTIMIZER = "adam"


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


_SHORT = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
"""The parallel sizes that a save records, and how they are called in short."""


def _is_layout(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() >= _SHORT.keys()
        and all(_is_count(size) and size > 0 for size in value.values())
    )


_KINDS: dict[str, Callable[[Any], bool]] = {
    "rollout_id": _is_count,
    "world_size": lambda value: _is_count(value) and value > 0,
    "layout": _is_layout,
    "dtype": lambda value: value in ("float32", "bfloat16"),
    "model": lambda value: isinstance(value, dict),
    "optimizer": lambda value: isinstance(value, dict) and _is_count(value.get("steps")),
    "scheduler": lambda value: isinstance(value, dict) and _is_count(value.get("num_steps")),
    "extra": lambda value: isinstance(value, dict),
}
"""What the entries of ``relax.json`` must be."""
_LATER = ("model", "optimizer")
"""Entries that checkpoints of format 1 may lack."""
_SMALL = 16 << 20
"""Files up to this size, bytes, are read also by a plan."""
_THREADS = 8
_AT_A_TIME = 4 << 20


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint beside weights and optimizer.

    Attributes:
        rollout_id: the rollout after which it was written; the run goes on with the next.
        extra: what was given to :func:`relax_train.checkpoint.save_load.save_checkpoint`.
        optimizer: whether the optimizer state was loaded too.
        folder: of the checkpoint, absolute, with the files that were given to it.
        layout_change: how the parallel sizes differ from those of the save (:func:`layout_change`), or None.
    """

    rollout_id: int
    extra: dict[str, Any]
    optimizer: bool
    folder: Path
    layout_change: str | None = None


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a ``config.json`` that decide which tensors a model has, those that are not there as None."""
    # Models that read pictures may have the keys of their decoder one level down.
    hf_config = {**hf_config, **(hf_config.get("text_config") or {}), "model_type": hf_config.get("model_type")}
    found = {key: hf_config.get(key) for key in SHAPE_KEYS}
    found["num_experts"] = hf_config.get(experts_key(hf_config))
    hidden, heads = found["hidden_size"], found["num_attention_heads"]
    found["num_key_value_heads"] = found["num_key_value_heads"] or heads
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found["head_dim"] = found["head_dim"] or hidden // heads
    return found


def find(directory: Path, rollout_id: int | None = None) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to load and its manifest; None when the folder holds none.

    Args:
        directory: folder of checkpoints.
        rollout_id: which one; default what ``latest`` names.

    Raises:
        CheckpointError: it cannot be read or is not of this version; the message has the way out.
    """
    if rollout_id is None:
        try:
            rollout_id = latest_rollout(directory)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if rollout_id is None:
            if there := checkpoints(directory):
                raise CheckpointError(f"{directory} has no file {LATEST!r}: write one of {', '.join(there)} into it")
            if (directory / MANIFEST).exists():
                raise CheckpointError(f"{directory} is one checkpoint itself: give its parent {directory.parent}")
            return None
    folder = place(directory, rollout_id)
    file = folder / MANIFEST
    try:
        manifest = json.loads(regular(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. {way_out(folder)}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if type(version) is not int or version not in (OLD_FORMAT, FORMAT):
        raise CheckpointError(
            f"{file} has format {version}, this version reads format {OLD_FORMAT} and {FORMAT}. {way_out(folder)}"
        )
    optional = _LATER if version == OLD_FORMAT else ()
    kinds = {name: fits for name, fits in _KINDS.items() if name in manifest or name not in optional}
    missing = sorted(kinds.keys() - manifest.keys())
    if missing or manifest["rollout_id"] != rollout_id:
        what = f"lacks {', '.join(missing)}" if missing else f"is of rollout {manifest['rollout_id']}"
        raise CheckpointError(f"{file} {what}. {way_out(folder)}")
    odd = [name for name, fits in kinds.items() if not fits(manifest[name])]
    if odd:
        raise CheckpointError(
            f"{file} is damaged: its {', '.join(odd)} {'is' if len(odd) == 1 else 'are'} not what a run writes. "
            f"{way_out(folder)}"
        )
    sizes = [manifest["layout"][name] for name in _SHORT if not name.startswith("expert")]
    if math.prod(sizes) != manifest["world_size"]:
        raise CheckpointError(
            f"{file} is damaged: its world_size is {manifest['world_size']}, the sizes in its layout make "
            f"{math.prod(sizes)} ranks. {way_out(folder)}"
        )
    return folder, manifest


def way_out(folder: Path) -> str:
    """Says what to do about a checkpoint that cannot be loaded."""
    others = [name for name in checkpoints(folder.parent) if name != folder.name]
    earlier = f", or resume from {' or '.join(others[-3:])}: write its name into {folder.parent / LATEST}"
    return "Copy the checkpoint again from where it is whole" + (earlier if others else "")


def written_files(folder: Path) -> list[str]:
    """Names of the files of a checkpoint but ``files.json``, sorted."""
    # NFS keeps files that are removed while open under names of its own for a while.
    return sorted(p.name for p in folder.iterdir() if p.name != FILES and not p.name.startswith(".nfs"))


def checksums(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """CRC-32 of files of a checkpoint, several at a time: zlib lets other threads run while it reads a block.

    Raises:
        OSError: one cannot be read.
    """

    def checksum(name: str) -> int:
        value = 0
        with regular(folder / name).open("rb", buffering=0) as file:
            while block := file.read(_AT_A_TIME):
                value = zlib.crc32(block, value)
        return value

    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(checksum, names), strict=True))


def record_files(folder: Path, sums: Mapping[str, int] | None = None) -> None:
    """Writes ``files.json``: the time, and size and checksum of every other file of a checkpoint.

    Args:
        sums: checksums that are known already; those of the other files are computed here.
    """
    names, sums = written_files(folder), dict(sums or {})
    sums |= checksums(folder, [name for name in names if name not in sums])
    entries = {
        "written": time.time(),
        "files": {name: (folder / name).stat().st_size for name in names},
        "crc32": {name: sums[name] for name in names},
    }
    (folder / FILES).write_text(json.dumps(entries), encoding="utf-8")


def complete(unfinished: Path, target: Path, sums: Mapping[str, int] | None = None) -> None:
    """Makes a checkpoint of a folder whose files are all written: from now on ``latest`` names it.

    Args:
        sums: as of :func:`record_files`.
    """
    record_files(unfinished, sums)
    publish(unfinished, target)
    set_latest(target.parent, target.name)


def files_problem(folder: Path, manifest: Mapping[str, Any], part: int | None = None, parts: int = 1) -> str | None:
    """Names a file that is missing or not as it was written, or says what is wrong with the list of files.

    Sizes are compared of all files. Checksums are compared of small files; with ``part`` of every ``parts``-th file
    instead, whatever its size, from number ``part`` on, so that ranks can share the reading.

    Args:
        folder: of the checkpoint.
        manifest: content of its ``relax.json``, as :func:`find` returns it.
    """
    try:
        files = read_list(folder, manifest["format"])
        for name in needed_files(folder, manifest):
            if not (folder / name).is_file():
                return f"{folder / name} is missing"
            if files is not None and name not in files.sizes:
                return f"{folder / FILES} is damaged: it lacks {name!r}, which the checkpoint needs"
        if files is None:
            return None
        for name, size in files.sizes.items():
            file = folder / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != size:
                return f"{file} was cut off or changed: it has {file.stat().st_size} of {size} bytes"
        sums = files.sums or {}
        mine = [n for n in sorted(sums) if files.sizes[n] <= _SMALL] if part is None else sorted(sums)[part::parts]
        for name, value in checksums(folder, mine).items():
            if value != sums[name]:
                return f"{folder / name} has changed since it was written: its checksum is another one"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"a file of {folder} cannot be read: {error}"
    return None


def layout_problem(manifest: Mapping[str, Any], now: Mapping[str, int], folder: Path) -> str | None:
    """Parallel sizes under which the optimizer state does not load; only a checkpoint of format 1 has any.

    Args:
        now: sizes of this run by the name of their option.
    """
    if manifest["format"] != OLD_FORMAT:
        return None
    saved = manifest["layout"]
    fixed = [name for name in now if name not in ("data_parallel_size", "context_parallel_size")]
    differing = [f"--{name.replace('_', '-')} {saved.get(name)}" for name in fixed if saved.get(name) != now[name]]
    if not differing:
        return None
    return (
        f"{folder} was saved by an earlier version with {', '.join(differing)}; its optimizer state loads only like "
        "that. Resume with these sizes: what is saved then resumes with any. Or start anew from its weights: export "
        "them with --save-hf and give that folder as --hf-checkpoint"
    )


def layout_change(manifest: Mapping[str, Any], now: Mapping[str, int]) -> str | None:
    """Says how the parallel sizes change, as ``TP 2, DP 1 -> TP 1, DP 2``; None when they do not.

    Args:
        now: sizes of this run by the name of their option, as far as they are known.
    """
    saved = manifest["layout"]
    names = [name for name in _SHORT if name in now and name in saved and saved[name] != now[name]]
    tensor, expert = "tensor_model_parallel_size", "expert_tensor_parallel_size"
    if all(sizes.get(tensor) == sizes.get(expert) for sizes in (saved, now)):
        names = [name for name in names if name != expert]  # it follows TP, also in a model without experts
    if not names:
        return None
    before, after = (", ".join(f"{_SHORT[name]} {sizes[name]}" for name in names) for sizes in (saved, now))
    return f"{before} -> {after}"


def optimizer_problem(manifest: Mapping[str, Any], folder: Path) -> str | None:
    """An optimizer whose state does not load into the one of this version."""
    name = OPTIMIZER if manifest["format"] == OLD_FORMAT else manifest["optimizer"].get("name")
    if name == OPTIMIZER:
        return None
    return (
        f"{folder} was saved with the optimizer {name!r}, whose state {OPTIMIZER!r} cannot take; resume with the "
        "version that wrote it, or start anew from its weights: export them with --save-hf and give that folder as "
        "--hf-checkpoint"
    )


def precision_problem(manifest: Mapping[str, Any], now: str, folder: Path) -> str | None:
    """A precision (``float32``, ``bfloat16``) in which the optimizer state does not load."""
    saved = manifest["dtype"]
    if saved == now:
        return None
    flag = "--bf16" if saved == "bfloat16" else "--no-bf16"
    return (
        f"{folder} was saved by a run in {saved}, this one is in {now}; its optimizer state loads only in its own "
        f"precision: resume with {flag}"
    )


def architecture_problem(manifest: Mapping[str, Any], hf_config: Mapping[str, Any], folder: Path) -> str | None:
    """A model of other shapes than ``--hf-checkpoint`` has; None also where none were recorded."""
    saved, now = manifest.get("model"), architecture(hf_config)
    if not isinstance(saved, dict):
        return None
    pairs = {key: (saved.get(key), now[key]) for key in now}
    differing = [f"{key} {a!r} instead of {b!r}" for key, (a, b) in pairs.items() if (a or None) != (b or None)]
    if not differing:
        return None
    return (
        f"{folder} is of another model than --hf-checkpoint: it has {', '.join(differing)}; give the --hf-checkpoint "
        "that the run was started with, or leave --load out"
    )
