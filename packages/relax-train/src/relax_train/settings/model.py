"""Options of the trained model: its start weights and the precision it computes in."""

import dataclasses
import json
import os
from typing import Any, ClassVar

from relax_data.options import Settings, option

from relax_train.models.architectures import unsupported


def read_hf_config(folder: str) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder, without importing transformers.

    Raises:
        ValueError: the folder or its ``config.json`` is missing or unreadable; the message says what to do.
    """
    path = os.path.join(folder, "config.json")
    if not os.path.isdir(folder):
        raise ValueError(
            f"{folder!r} is not a folder; download the model first, for example: "
            f"hf download OWNER/NAME --local-dir {folder}"
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
    freeze_vision_model: bool = option(
        True,
        "Leave the vision tower of a model that reads pictures as it is; trained, it shares the decoder's optimizer.",
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
            if problem := unsupported(config):
                found.append(f"--hf-checkpoint: {problem}")
        if self.ref_load is not None:
            try:
                read_hf_config(self.ref_load)
            except ValueError as error:
                found.append(f"--ref-load: {error}")
        return found
