"""The architectures that can be trained, one file each; a new one is a file here and a line in the table.

Door: :func:`model_shape`, the shape of the model that a ``config.json`` describes. Nothing here needs torch.
"""

import difflib

from relax_train.models.architectures.base import Architecture
from relax_train.models.architectures.llama import LLAMA
from relax_train.models.architectures.missing import missing_parts
from relax_train.models.architectures.qwen2 import QWEN2
from relax_train.models.architectures.qwen2_5_vl import QWEN2_5_VL
from relax_train.models.architectures.qwen3 import QWEN3
from relax_train.models.architectures.qwen3_moe import QWEN3_MOE
from relax_train.models.shape import Config, ModelShape

ARCHITECTURES: dict[str, Architecture] = {
    record.model_type: record for record in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN2_5_VL)
}
"""By ``model_type`` of the Hugging Face configuration."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that hold the number of experts in configurations of any family."""


def model_shape(config: Config) -> ModelShape:
    """The shape of the model that a ``config.json`` describes.

    Raises:
        ValueError: the architecture is not supported, or a value is missing, absurd or not supported; the message names
            it.
    """
    if problem := unsupported(config):
        raise ValueError(f"config.json: {problem}")
    return ARCHITECTURES[config["model_type"]].shape(config)


def unsupported(config: Config) -> str | None:
    """Why the architecture of a ``config.json`` cannot be trained; None when it is one of :data:`ARCHITECTURES`."""
    name = config.get("model_type")
    if isinstance(name, str) and name in ARCHITECTURES:
        return None
    near = _nearest(config)
    text = (
        f"model_type {repr(name)[:40]} is not supported; use one of {', '.join(ARCHITECTURES)}. It has no file in "
        f"relax_train/models/architectures; the nearest there is {near.model_type} ({near.class_name})"
    )
    if missing := missing_parts(config):
        text += f". What no model there has: {', '.join(missing)}"
    others = near.problems(config)
    return f"{text}. For this configuration {near.model_type} says: {'; '.join(others)}" if others else text


def _nearest(config: Config) -> Architecture:
    """Of those with experts, or those without, as the configuration has: nearest by name, or else the plainest."""
    experts = any(config.get(key) for key in _EXPERT_COUNTS)
    alike = [name for name, record in ARCHITECTURES.items() if record.has_experts is experts]
    close = difflib.get_close_matches(str(config.get("model_type")), alike, n=1)
    return ARCHITECTURES[close[0] if close else alike[0]]
