"""Exports to Hugging Face folders, which appear whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from relax_train.checkpoint.folders import CheckpointError, publish
from relax_train.checkpoint.sharded_io import agree, dtype_name
from relax_train.models.build import Model
from relax_train.models.export import weight_buckets

_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps the named chat templates of a tokenizer."""


def save_hf(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 4 << 30,
    bucket_bytes: int = 512 << 20,
) -> Path:
    """Writes a Hugging Face folder that transformers loads: weights, configuration, tokenizer files; collective.

    Args:
        directory: the folder itself; replaced if it exists.
        max_shard_bytes: largest safetensors file, also what rank 0 holds in host memory.
        bucket_bytes: how much is gathered on the device at once.

    Raises:
        CheckpointError: on every rank, when rank 0 could not write. A folder that was there before is untouched.
    """
    target, parallel = Path(directory).absolute(), model.parallel
    unfinished = target.with_name(target.name + ".tmp")
    writer = _HFWriter(unfinished, max_shard_bytes) if parallel.rank == 0 else None
    error: Exception | None = None
    for bucket in weight_buckets(model, bucket_bytes):
        if writer is not None and error is None:
            try:
                for name, tensor in bucket.items():
                    writer.add(name, tensor)
            except Exception as caught:  # the other ranks go on gathering: so must this one
                error = caught
        del bucket
    try:
        if writer is not None and error is None:
            writer.finish(model)
            publish(unfinished, target)
    except Exception as caught:
        error = caught
    problem = agree(parallel, error)
    if problem is not None:
        if parallel.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        existing = next((p for p in target.parents if p.exists()), Path("/"))
        free = shutil.disk_usage(existing).free
        raise CheckpointError(
            f"cannot save {target}: {problem}. {free / 1e6:,.1f} MB are free there; make room or choose another "
            "--save-hf. What was there before is as it was."
        ) from error
    return target


class _HFWriter:
    """Collects tensors on the host and writes a safetensors file whenever enough are there."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self._folder, self._max = folder, max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max:
            self._flush()
        # A copy of its own: safetensors refuses tensors that share their memory.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._shards:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def finish(self, model: Model) -> None:
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
        else:
            names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
            for i, name in enumerate(names):
                self._part(i).rename(self._folder / name)
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": {t: names[i] for i, shard in enumerate(self._shards) for t in shard},
            }
            text = json.dumps(index, indent=2, sort_keys=True)
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        for source in Path(model.hf_folder).iterdir():
            if source.is_file() and source.name != "config.json" and not _is_weights(source.name):
                shutil.copy2(source, self._folder / source.name)
            elif source.is_dir() and source.name == _TEMPLATES:
                shutil.copytree(source, self._folder / source.name)
        config = self._folder / "config.json"
        config.write_text(json.dumps(_exported_config(model), indent=2), encoding="utf-8")
        # safetensors keeps its files from everybody else, and a copy has the mode of its source: the umask decides.
        for path in self._folder.rglob("*"):
            path.chmod((config if path.is_file() else self._folder).stat().st_mode)


def _exported_config(model: Model) -> dict[str, Any]:
    """The configuration as it was given, but for the precision.

    transformers 5 would write it with keys that versions before it skip in silence (``rope_parameters``,
    ``num_local_experts``), and they would compute with their defaults.
    """
    config = dict(model.config_json)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(model.dtype)
    return config


def _is_weights(name: str) -> bool:
    endings = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
    return name.endswith(endings)
