"""Checks by their headers that the safetensors files of a model folder are whole and fit its ``config.json``."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from relax_train.models.shape import ModelShape

_FIX = "they are of different models: download the whole folder again"
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors itself refuses more."""
Shapes = dict[str, tuple[int, ...]]


def weight_problems(folder: Path, model: ModelShape | None) -> list[str]:
    """Lists what is wrong with the weights of a folder; nothing when it has none at all.

    Args:
        model: what ``config.json`` says of the model; None skips the comparison.
    """
    shapes: Shapes = {}
    try:
        named = _named(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return [f"{folder / _INDEX} cannot be read ({type(error).__name__}: {error}); download it again"]
    found = []
    # Where there is an index, nothing else is read: an adapter or an older file may lie beside its files.
    for path in sorted(folder.glob("*.safetensors")):
        if named is not None and path.name not in named:
            continue
        try:
            shapes |= read_header(path)
        except (OSError, ValueError, RecursionError) as error:
            found.append(f"{path} {error}; download it again")
    missing = sorted(name for name in named or () if not os.path.isfile(folder / name))
    found += [f"{folder / name} is missing: {_INDEX} names it; download it" for name in missing]
    if not found and shapes and model is not None:
        found += _differences(folder, shapes, model)
    return found


def read_header(path: Path) -> Shapes:
    """Shapes of the tensors of a safetensors file, whose data must be there to the last byte.

    Raises:
        ValueError: it is no such file or was cut off; the message says so of "it".
    """
    if not path.is_file():
        raise ValueError("is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError("is a pointer of Git LFS, not the weights themselves (git lfs pull)")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ValueError(f"is no safetensors file or was cut off: it has {size:,} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
            shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise ValueError("is no safetensors file: its header cannot be read") from None
    whole = 8 + length + max(ends, default=0)
    if size != whole:
        raise ValueError(f"was cut off or changed: it has {size:,} of {whole:,} bytes")
    return shapes


def _named(folder: Path) -> set[str] | None:
    """Files that the index names; None without one."""
    path = folder / _INDEX
    if not path.exists():
        return None
    if not path.is_file():  # reading a pipe or a device might never end
        raise ValueError("it is not a regular file")
    return set(map(str, json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))


def _differences(folder: Path, shapes: Shapes, model: ModelShape) -> list[str]:
    """Tensors of other shapes than ``config.json`` says, and layers too few or too many; the first of them."""
    for name, shape in _telling(model).items():
        if shapes.get(name) != shape:
            has = f"{name} {list(shapes[name])}" if name in shapes else f"no {name}"
            return [f"{folder}: config.json asks for {name} {list(shape)}, but the weights have {has}; {_FIX}"]
    # A further layer has norms and attention; the names of its experts may be many.
    shared = {weight for weights in model.weights.values() for weight in weights if not weight.of_expert}
    one_more = {name for weight in shared for name, _ in model.named(weight, layer=model.layers)}
    beyond = [name for name in shapes if name in one_more]
    if beyond:
        return [f"{folder}: config.json says {model.layers} layers, but the weights have {beyond[0]} too; {_FIX}"]
    return []


def _telling(model: ModelShape) -> Shapes:
    """The tensors that tell one model from another.

    They are the embedding, and in the first and the last layer one of each size among those that the trainer keeps
    together (queries, keys, dense MLP). Experts are left out: a file may hold them stacked.
    """
    found = dict(model.named(model.embedding_weight))
    for layer in (0, model.layers - 1):
        for weight in model.weights[model.kinds[layer]]:
            if len(weight.tensors) > 1 and not weight.of_expert:
                first_of = {tensor.dims: tensor for tensor in reversed(weight.tensors)}
                one_each = tuple(tensor for tensor in weight.tensors if first_of[tensor.dims] is tensor)
                found |= model.named(dataclasses.replace(weight, tensors=one_each), layer=layer)
    return found
