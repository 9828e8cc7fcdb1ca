"""Which model is trained, where its start weights come from, and the precision it computes in."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from relax_data.options import Settings, option

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")
"""``model_type`` of the Hugging Face configurations that :mod:`relax_train.models.build` can build."""
SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "moe_intermediate_size",
)
"""Keys of ``config.json`` that decide the shapes of the weights."""


def read_hf_config(folder: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder, without importing transformers.

    Raises:
        ValueError: the folder or its ``config.json`` is missing or unreadable; the message says what to do.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        raise ValueError(
            f"{folder!r} is not a folder; download the model first, for example: "
            f"hf download Qwen/Qwen3-0.6B --local-dir {folder}"
        )
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe or a device might never end
        raise ValueError(f"{path} is not a regular file; it must be the config.json of a Hugging Face model folder")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; it must be a Hugging Face model folder") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return config


def experts_key(hf_config: Mapping[str, Any]) -> str:
    """The key of a ``config.json`` that holds the number of experts: transformers 5 writes another one than before."""
    return "num_experts" if "num_experts" in hf_config else "num_local_experts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The model and its precision."""

    TITLE: ClassVar[str] = "Model"

    hf_checkpoint: str = option(
        help="Hugging Face folder with configuration, tokenizer and start weights.", metavar="FOLDER"
    )
    ref_load: str | None = option(
        None, "Hugging Face folder of the reference model; default: the start weights.", metavar="FOLDER"
    )
    seed: int = option(
        1234,
        "Seed of the trainer's random numbers. The models that it builds have no dropout and start from given weights, "
        "so they draw none; order of the prompts and sampling are --rollout-seed.",
        ge=0,
    )
    bf16: bool | None = option(
        None, "Train in bfloat16 with float32 master weights; default: on with CUDA, off (float32) on CPU."
    )
    update_weight_buffer_size: int = option(
        536870912,
        "Bytes of a bucket of full tensors in a weight update; a push needs at most two buckets beside the model. A "
        "larger tensor goes alone.",
        metavar="BYTES",
        ge=1,
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        try:
            config = read_hf_config(self.hf_checkpoint)
        except ValueError as error:
            found.append(f"--hf-checkpoint: {error}")
        else:
            if config.get("model_type") not in MODEL_TYPES:
                found.append(
                    f"--hf-checkpoint: model_type {config.get('model_type')!r} is not supported; "
                    f"use one of {', '.join(MODEL_TYPES)}"
                )
        if self.ref_load is not None:
            try:
                read_hf_config(self.ref_load)
            except ValueError as error:
                found.append(f"--ref-load: {error}")
        return found
