"""Checkpoints of a run, which appear whole or not at all.

A folder of checkpoints holds one folder ``rollout_<id>`` for each and a file ``latest`` with the name of the newest. A
checkpoint has torch's distributed files (weights as megatron-core names them, optimizer state by whole tensor:
:mod:`relax_train.checkpoint.optimizer_state`), ``rng_<rank>.pt``, ``relax.json`` with everything
else (the parallel layout, the learning-rate schedule, and ``extra``, what the driver wants back), files of other
processes that are given to it, and ``files.json`` with sizes and checksums of all these
(:mod:`relax_train.checkpoint.manifest`). It is written as ``rollout_<id>.tmp`` and renamed when every rank is done;
only then ``latest`` names it.

Rollout ids are absolute: the checkpoint of rollout ``k`` is the state after training on rollout ``k``.
"""

import functools
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from relax_train.backend.device import has_cuda
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import VERSION, tensor_parallel
from relax_train.backend.optimizer import Optimizer
from relax_train.backend.parallel import ParallelState
from relax_train.checkpoint.file_list import FORMAT, MANIFEST, OLD_FORMAT
from relax_train.checkpoint.folders import (
    CheckpointError,
    begin,
    give_up,
    prune,
    regular,
    rollout_folder,
)
from relax_train.checkpoint.manifest import (
    OPTIMIZER,
    Loaded,
    architecture,
    architecture_problem,
    checksums,
    complete,
    files_problem,
    find,
    layout_change,
    layout_problem,
    optimizer_problem,
    precision_problem,
    way_out,
    written_files,
)
from relax_train.checkpoint.no_code import data_only
from relax_train.checkpoint.optimizer_state import pieces
from relax_train.checkpoint.sharded_io import (
    check_files,
    dtype_name,
    local_bytes,
    on_every_rank,
    read_state,
    sharded_weights,
    write_state,
)
from relax_train.models.build import Model

T = TypeVar("T")

_SHARED_STREAM = "data-parallel-rng"
"""megatron-core's stream of random numbers for what is equal on all ranks; the others differ between ranks."""


def _on_first_rank(parallel: ParallelState, action: Callable[[], T]) -> T:
    """Result of ``action``, which only rank 0 runs; collective.

    Raises:
        CheckpointError: on every rank, when it raised.
    """
    box: list[T | None] = [None]

    def act() -> None:
        if parallel.rank == 0:
            box[0] = action()

    on_every_rank(parallel, act)
    dist.broadcast_object_list(box, src=0, group=parallel.gloo_group)
    return box[0]  # type: ignore[return-value]


# ---------------------------------------------------------------------- save


def save_checkpoint(
    directory: str | os.PathLike[str],
    rollout_id: int,
    model: Model,
    optimizer: Optimizer,
    *,
    extra: dict[str, Any] | None = None,
    files: Path | None = None,
    keep: int | None = None,
) -> Path:
    """Writes the checkpoint of a rollout; collective.

    Args:
        directory: folder of checkpoints, seen by all ranks.
        extra: JSON-able state of the caller; rank 0's is written.
        files: folder with files that become part of the checkpoint, see
            :func:`relax_train.checkpoint.folders.side_folder`; it is gone afterwards, also when this fails.
        keep: remove all but the newest so many checkpoints afterwards.

    Returns:
        the folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, when any of them could not write. What was there before is untouched and
            ``latest`` still names it; the message has the path and the free space.
    """
    directory, parallel = Path(directory).absolute(), model.parallel
    target = rollout_folder(directory, rollout_id)
    unfinished = target.with_name(target.name + ".tmp")
    state, held = sharded_weights(model), pieces(model, optimizer)
    size = torch.tensor(local_bytes(state) + sum(p.data.numel() * p.data.element_size() for p in held if p.written))
    dist.all_reduce(size, group=parallel.gloo_group)
    manifest = _manifest(rollout_id, model, optimizer, extra or {})
    try:
        _on_first_rank(parallel, lambda: _prepare(unfinished, manifest, files))
        on_every_rank(parallel, lambda: _write_rng(unfinished, parallel))
        write_state(state, held, unfinished, parallel)
        sums = _checksums(unfinished, parallel)
        _on_first_rank(parallel, lambda: complete(unfinished, target, sums))
    except CheckpointError as error:
        leftovers = [unfinished, *([] if files is None else [files])]
        text = _on_first_rank(parallel, functools.partial(give_up, target, error, leftovers, int(size)))
        raise CheckpointError(text) from error
    if keep is not None:
        _on_first_rank(parallel, lambda: prune(directory, keep))
    return target


def _prepare(unfinished: Path, manifest: dict[str, Any], files: Path | None) -> None:
    begin(unfinished, files)
    (unfinished / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _checksums(folder: Path, parallel: ParallelState) -> dict[str, int]:
    """Checksums of the files that the ranks wrote, each by its writer, which has them in memory still; collective."""
    mine: dict[str, int] = {}

    def read_own() -> None:
        own = re.compile(rf"__{parallel.rank}_\d+\.distcp|rng_{parallel.rank}\.pt")
        mine.update(checksums(folder, [name for name in written_files(folder) if own.fullmatch(name)]))

    on_every_rank(parallel, read_own)
    every: list[dict[str, int]] = [{} for _ in range(parallel.world_size)]
    dist.all_gather_object(every, mine, group=parallel.gloo_group)
    return {name: value for part in every for name, value in part.items()}


def _manifest(rollout_id: int, model: Model, optimizer: Optimizer, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "rollout_id": rollout_id,
        "world_size": model.parallel.world_size,
        "layout": model.parallel.signature,
        "dtype": dtype_name(model.dtype),
        "model": architecture(model.config_json),
        "megatron_core": VERSION,
        "optimizer": {"name": OPTIMIZER, "steps": optimizer.steps},
        "scheduler": optimizer.state_dict(),
        "extra": extra,
    }


def _write_rng(folder: Path, parallel: ParallelState) -> None:
    with DeviceContext():
        tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(parallel.device) if has_cuda() else None,
        "megatron": tracker,
    }
    torch.save(state, folder / f"rng_{parallel.rank}.pt")


# ---------------------------------------------------------------------- load


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: Model,
    optimizer: Optimizer | None,
    *,
    rollout_id: int | None = None,
) -> Loaded | None:
    """Loads a checkpoint into model and optimizer, in place; collective.

    Weights and optimizer state load under every parallel layout; those of format 1, which earlier versions wrote, only
    with the tensor-, pipeline- and expert-parallel sizes of the save. Beside model and optimizer a rank holds one
    stored part of a tensor at a time in host memory, at most what one rank that saved had of it.

    Random numbers go on where they were with the sizes of the save. With others the streams that all ranks share go
    on (torch's, and megatron-core's for what is equal on all ranks), from rank 0; those that belong to a rank of the
    old layout begin again from ``--seed``, and Python's and numpy's stay as they are. Training itself draws none.

    Args:
        directory: folder of checkpoints.
        optimizer: None loads the weights only.
        rollout_id: which one; default what ``latest`` names.

    Returns:
        None when the folder holds no checkpoint.

    Raises:
        CheckpointError: the checkpoint is unreadable.
        ValueError: the optimizer state is of another optimizer or precision, or of format 1 and another layout; the
            message names the flag.
    """
    directory, parallel = Path(directory).absolute(), model.parallel
    try:
        found = _on_first_rank(parallel, lambda: find(directory, rollout_id))
    except CheckpointError as error:
        raise CheckpointError(f"--load: {error}") from error
    if found is None:
        return None
    folder, manifest = found
    other_model = architecture_problem(manifest, model.config_json, folder)
    if other_model is not None:
        raise ValueError(f"--load: {other_model}")
    if optimizer is not None:
        _check_fit(manifest, model, folder)
    try:
        on_every_rank(parallel, lambda: check_files(folder))
        on_every_rank(parallel, lambda: _check_bits(folder, manifest, parallel))
        old = manifest["format"] == OLD_FORMAT
        on_every_rank(parallel, lambda: read_state(model, optimizer, folder, old_optimizer=old))
        if optimizer is not None:
            if not old:
                optimizer.set_steps(manifest["optimizer"]["steps"])
            with DeviceContext():
                optimizer.scheduler.num_steps = 0  # megatron adds what it loads
                optimizer.scheduler.load_state_dict(_schedule(manifest["scheduler"], optimizer))
            on_every_rank(parallel, lambda: _read_rng(folder, manifest, parallel))
    except CheckpointError as error:
        raise CheckpointError(f"--load: cannot read {folder}: {error}. {way_out(folder)}") from error
    change = layout_change(manifest, parallel.signature)
    return Loaded(manifest["rollout_id"], manifest["extra"], optimizer is not None, folder, change)


def _check_bits(folder: Path, manifest: dict[str, Any], parallel: ParallelState) -> None:
    problem = files_problem(folder, manifest, part=parallel.rank, parts=parallel.world_size)
    if problem is not None:
        raise CheckpointError(problem)


def _check_fit(manifest: dict[str, Any], model: Model, folder: Path) -> None:
    """Refuses a checkpoint whose optimizer state this run cannot take.

    Raises:
        ValueError: the message names the flag.
    """
    for problem in (
        layout_problem(manifest, model.parallel.signature, folder),
        optimizer_problem(manifest, folder),
        precision_problem(manifest, dtype_name(model.dtype), folder),
    ):
        if problem is not None:
            raise ValueError(f"--load: {problem}")


def _schedule(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    # Where the run is in its schedule comes from the checkpoint; the schedule itself from the flags of this start.
    return {**optimizer.state_dict(), "num_steps": saved["num_steps"]}


def _read_rng(folder: Path, manifest: dict[str, Any], parallel: ParallelState) -> None:
    same = manifest["world_size"] == parallel.world_size and manifest["layout"] == parallel.signature
    file = folder / f"rng_{parallel.rank if same else 0}.pt"
    try:
        with data_only():
            state = torch.load(regular(file), weights_only=True)
    except Exception as error:  # unpickling raises what it likes
        raise CheckpointError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    if same:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if has_cuda() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], parallel.device)
    with DeviceContext():
        tracker = tensor_parallel.get_cuda_rng_tracker()
        shared = {name: stream for name, stream in state["megatron"].items() if same or name == _SHARED_STREAM}
        tracker.set_states(tracker.get_states() | shared)
