"""Reading and writing megatron-core's sharded state, with every failure known to every rank.

The files are those of ``megatron.core.dist_checkpointing`` and it reads them; writing them is done here from its parts.
Its own ``save`` starts a manager process that outlives a killed trainer, forks writers out of a process full of
threads, and leaves the other ranks waiting when the first one cannot write its small files.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException

from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import (
    CheckpointingConfig,
    dist_checkpointing,
    is_main_replica,
    save_config,
    save_preprocess,
    to_torch_checkpoint,
)
from relax_train.backend.optimizer import Optimizer
from relax_train.backend.parallel import ParallelState
from relax_train.checkpoint.folders import CheckpointError, regular
from relax_train.checkpoint.no_code import data_only, read_index
from relax_train.checkpoint.optimizer_state import Piece, SavePlanner, read_optimizer
from relax_train.models.build import Model

ShardedState = dict[str, Any]
_COMMON = "common.pt"
_KIND = "torch_dist"


def _reason(error: BaseException) -> str:
    """An error as text; torch's own says only that there were some, and holds those of the ranks."""
    if isinstance(error, CheckpointException):
        # Their first lines: torch writes whole guides into these messages.
        reasons = {r: (_reason(e[0]).splitlines() or [""])[0] for r, e in sorted(error.failures.items())}
        return "; ".join(f"rank {r}: {text[:300]}" for r, text in reasons.items())
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``, as it stands in a checkpoint and in ``config.json``."""
    return str(dtype).removeprefix("torch.")


def agree(parallel: ParallelState, error: BaseException | None) -> str | None:
    """Collective: the first error of any rank as text, or None when there was none."""
    mine = None if error is None else _reason(error)
    every: list[str | None] = [None] * parallel.world_size
    dist.all_gather_object(every, mine, group=parallel.gloo_group)
    return next((text for text in every if text is not None), None)


def on_every_rank(parallel: ParallelState, action: Callable[[], object]) -> None:
    """Runs ``action``; collective.

    Raises:
        CheckpointError: on every rank, when it raised on any: no rank goes on to wait for one that failed.
    """
    error: BaseException | None = None
    try:
        action()
    except (Exception, CheckpointException) as caught:  # torch's derives from BaseException
        error = caught
    problem = agree(parallel, error)
    if problem is not None:
        raise CheckpointError(problem) from error


def _metadata(parallel: ParallelState) -> dict[str, Any]:
    return {
        # Of the optimizer state of format 1; the only way of megatron's that loads with torch's AdamW.
        "distrib_optim_sharding_type": "dp_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel.dp_cp_group,
    }


def sharded_weights(model: Model) -> ShardedState:
    """megatron-core's description of this rank's weights."""
    with DeviceContext(), torch.no_grad():
        return {"model": model.gpt[0].sharded_state_dict(metadata=_metadata(model.parallel))}


def old_sharded_optimizer(
    model: Model, optimizer: Optimizer, weights: ShardedState, *, loading: bool = False
) -> dict[str, Any]:
    """megatron-core's description of the optimizer state, cut as the ranks hold it: how format 1 has it."""
    with DeviceContext(), torch.no_grad():
        described: dict[str, Any] = optimizer.megatron.sharded_state_dict(
            dict(weights), is_loading=loading, metadata=_metadata(model.parallel)
        )
    return described


def local_bytes(state: Any) -> int:
    """Bytes of weights that this rank writes, about: its tensors, those that other ranks write as well left out."""
    if isinstance(state, dict):
        return sum(local_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(local_bytes(value) for value in state)
    data = getattr(state, "data", None)
    if isinstance(data, torch.Tensor) and is_main_replica(state.replica_id):
        return data.numel() * data.element_size()
    return 0


def write_state(state: ShardedState, held: list[Piece], folder: Path, parallel: ParallelState) -> None:
    """Writes the sharded state and the pieces of optimizer state into an empty folder; collective.

    Raises:
        CheckpointError: on every rank, when any rank failed.
    """
    with DeviceContext():
        sharded, common = save_preprocess(state, True)

    def write_small_files() -> None:
        if parallel.rank == 0:
            torch.save(common, folder / _COMMON)
            save_config(CheckpointingConfig(_KIND, 1), str(folder))

    on_every_rank(parallel, write_small_files)
    try:
        with DeviceContext():
            torch_checkpoint.save(
                to_torch_checkpoint(sharded),
                # One thread: with more, torch loses the errors of all but the first.
                storage_writer=torch_checkpoint.FileSystemWriter(folder, thread_count=1, sync_files=True),
                planner=SavePlanner(held),
                process_group=parallel.gloo_group,
            )
    except CheckpointException as caught:
        raise CheckpointError(_reason(caught)) from caught


def check_files(folder: Path) -> None:
    """Looks whether this rank sees all files of the sharded state, in their length; reads the small ones only.

    Raises:
        CheckpointError: one is missing, cut off or unreadable; the message names it.
    """
    content: Any = None
    for name, read in (
        ("metadata.json", _read_kind),
        (_COMMON, lambda file: torch.load(file, weights_only=True)),
        (".metadata", read_index),
    ):
        try:
            content = read(regular(folder / name))
        except Exception as error:  # unpickling raises what it likes
            raise CheckpointError(f"{folder / name} cannot be read: {_reason(error)}") from error
    sizes: dict[str, int] = {}
    for part in content.storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sorted(sizes.items()):
        file = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{folder / '.metadata'} names {name[:100]!r}, which is no file of the checkpoint")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size < size:
            raise CheckpointError(f"{file} was cut off: it has {file.stat().st_size} of {size} bytes")


def _read_kind(file: Path) -> None:
    kind = json.loads(file.read_bytes())
    if not isinstance(kind, dict) or kind.get("sharded_backend") != _KIND:
        raise ValueError(f"it is no sharded checkpoint of the kind {_KIND!r}")


def read_state(model: Model, optimizer: Optimizer | None, folder: Path, *, old_optimizer: bool = False) -> None:
    """Reads weights, and optimizer state if an optimizer is given, in place; collective.

    Both may have been written under another layout. Each rank reads what it needs of the others' files, one stored
    tensor part at a time.

    Args:
        old_optimizer: the optimizer state is that of format 1, which loads under its own layout only.
    """
    state = sharded_weights(model)
    if optimizer is not None and old_optimizer:
        state["optimizer"] = old_sharded_optimizer(model, optimizer, state, loading=True)
    with DeviceContext(), torch.no_grad():
        with data_only():
            loaded = dist_checkpointing.load(state, os.fspath(folder))
        model.gpt[0].load_state_dict(loaded["model"])
        if optimizer is None:
            return
        if old_optimizer:
            optimizer.megatron.load_state_dict(loaded["optimizer"])
            optimizer.after_load()
        else:
            read_optimizer(model, optimizer, folder)
