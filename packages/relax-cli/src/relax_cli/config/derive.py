"""Values that follow from other options, filled in after all layers are merged and before anything is checked."""

import datetime
import os
import secrets
from collections.abc import Mapping
from typing import Any

from relax_data.options import LARGEST_COUNT
from relax_train.models.architectures import model_shape
from relax_train.settings.model import read_hf_config

from relax_cli.cluster.placement import local_gpus
from relax_cli.config.settings import MODES

PATHS = (
    "hf_checkpoint",
    "ref_load",
    "load",
    "save",
    "save_hf",
    "save_debug_rollout_data",
    "load_debug_rollout_data",
    "sglang_profile_output_dir",
    "memory_snapshot_dir",
    "wandb_dir",
)
"""Made absolute, because the processes of a run need not share the driver's current directory."""

LARGEST_CPU_MODEL = 1_000_000_000
"""Parameters above which a plan made on a machine without GPUs is one for GPUs: nobody trains such a model on CPU."""


def derive(
    values: dict[str, Any], given: frozenset[str], *, planning: bool, environ: Mapping[str, str] = os.environ
) -> None:
    """Fills in ``values`` (all options by name) what was left to be derived.

    Args:
        given: names of the options that the user set; they are never changed, only made absolute.
        planning: nothing will be started: GPUs may be planned that this machine does not have.
    """
    for name in PATHS:
        if values[name]:
            path = os.path.expanduser(values[name])
            # Still with its ~ it is the home of nobody, which the validation says.
            values[name] = path if path.startswith("~") else os.path.abspath(path)
    if "colocate" not in given:
        values["colocate"] = not any(values[mode] for mode in MODES if mode != "colocate")
    _derive_gpus(values, given, planning=planning, environ=environ)
    if values["expert_tensor_parallel_size"] is None and _experts(values["hf_checkpoint"]):
        values["expert_tensor_parallel_size"] = values["tensor_model_parallel_size"]
    if values["log_probs_max_tokens_per_gpu"] is None:
        values["log_probs_max_tokens_per_gpu"] = values["max_tokens_per_gpu"]
    if values["fully_async"] and "partial_rollout" not in given:
        values["partial_rollout"] = True  # without it every push of weights waits for the longest response
    if values["over_sampling_batch_size"] is None:
        values["over_sampling_batch_size"] = _open_groups(values)
    _derive_batches(values)


def _derive_gpus(values: dict[str, Any], given: frozenset[str], *, planning: bool, environ: Mapping[str, str]) -> None:
    if values["actor_num_gpus_per_node"] is None:
        joins = values["ray_address"] is not None
        here = 0 if joins else local_gpus(environ)
        if here:
            values["actor_num_gpus_per_node"] = here
            if "num_gpus_per_node" not in given:
                values["num_gpus_per_node"] = max(here, values["num_gpus_per_node"])
        elif planning and (joins or _plans_gpus(values, given)):
            values["actor_num_gpus_per_node"] = values["num_gpus_per_node"]
        elif not joins:
            values["actor_num_gpus_per_node"] = 0
    if values["fully_async"] and values["rollout_num_gpus"] is None:
        values["rollout_num_gpus"] = values["num_gpus_per_node"]


def _plans_gpus(values: dict[str, Any], given: frozenset[str]) -> bool:
    """Whether a plan made on a machine without GPUs is one for a cluster that has them."""
    if given & {"num_gpus_per_node", "rollout_num_gpus", "actor_num_nodes"}:
        return True
    try:
        return model_shape(read_hf_config(values["hf_checkpoint"])).parameters > LARGEST_CPU_MODEL
    except ValueError:
        return False


def _experts(folder: str) -> bool:
    try:
        return model_shape(read_hf_config(folder)).experts > 0
    except ValueError:
        return False


def _open_groups(values: dict[str, Any]) -> int:
    """How many groups are open at once: what a step takes, or as many as the staleness allows beside the training."""
    batch: int = values["rollout_batch_size"]
    steps = values["max_staleness"] + 1 if values["fully_async"] else 1
    return max(batch, min(batch * steps, LARGEST_COUNT))


def _derive_batches(values: dict[str, Any]) -> None:
    """The optimizer step, where the sizes divide; where they do not, the check names the numbers."""
    samples = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    size, steps = values["global_batch_size"], values["num_steps_per_rollout"]
    if samples < 1 or (size or 1) < 1 or (steps or 1) < 1:
        return
    if size is None and samples % (steps or 1) == 0:
        values["global_batch_size"] = samples // (steps or 1)
    if steps is None and samples % (size or samples) == 0:
        values["num_steps_per_rollout"] = samples // (size or samples)


def run_name() -> str:
    """A name for a run that has none: the time it was made, and four random characters."""
    return f"relax-{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
