"""The parameters of this rank with their Hugging Face tensors, and loading one from the other.

The map is one list of :class:`Entry`: a parameter of this rank, the Hugging Face tensors it holds a part of, and how
these are cut over ranks. Loading and export both walk it, so they cannot disagree.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from relax_train.backend.device_context import DeviceContext
from relax_train.models.build import Model
from relax_train.models.shape import Weight
from relax_train.models.vision.shape import PREFIX

Tensors = list[torch.Tensor]


def _only(tensors: Tensors) -> torch.Tensor:
    return tensors[0]


def _alone(param: torch.Tensor) -> Tensors:
    return [param]


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive elements of a parameter that are a rectangle of a whole tensor, row by row.

    Attributes:
        name: of the whole tensor, the same under every parallel layout.
        size: shape of the whole tensor.
        offset: where the rectangle begins in it.
        shape: of the rectangle, with as many dimensions.
    """

    name: str
    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of this rank and the Hugging Face tensors that it holds a part of.

    Attributes:
        param: the parameter, local shape.
        names: Hugging Face tensors, in the order of ``join`` and ``split``.
        dim: dimension along which each of them is cut into equal parts over ``group``; None when this rank has all.
        group: ranks that hold the other parts.
        join: this rank's parts of the Hugging Face tensors -> the parameter.
        split: the inverse; views where possible.
        expert: number of the expert in the whole model, or None.
        rows: for a padded vocabulary, the rows that the Hugging Face tensor has.
        interleaved: whether the parameter holds the tensors in turns (query, key, value), not one after the other.
        is_copy: the last stage's copy of a tied embedding, which is no tensor of its own.
    """

    param: torch.Tensor
    names: tuple[str, ...]
    dim: int | None = None
    group: dist.ProcessGroup | None = None
    join: Callable[[Tensors], torch.Tensor] = _only
    split: Callable[[torch.Tensor], Tensors] = _alone
    expert: int | None = None
    rows: int | None = None
    interleaved: bool = False
    is_copy: bool = False

    @property
    def parts(self) -> int:
        """Number of ranks the tensors are cut over."""
        return self.group.size() if self.group is not None else 1

    @property
    def part(self) -> int:
        """Number of the part that this rank holds."""
        return self.group.rank() if self.group is not None else 0

    def full_shapes(self) -> list[torch.Size]:
        """Shapes of the full Hugging Face tensors."""
        shapes = []
        for piece in self.split(self.param.detach()):
            shape = list(piece.shape)
            if self.dim is not None:
                shape[self.dim] *= self.parts
            if self.rows is not None:
                shape[0] = self.rows
            shapes.append(torch.Size(shape))
        return shapes

    def blocks(self) -> list[Block]:
        """The parameter in the order of its elements, as rectangles of whole tensors; rows of padding are left out.

        Tensors that are interleaved count as one, the parameter of an uncut model, named by all of them.
        """
        if self.interleaved:
            pieces = [("+".join(self.names), tuple(self.param.shape))]
        else:
            shapes = [tuple(piece.shape) for piece in self.split(self.param.detach())]
            pieces = list(zip(self.names, shapes, strict=True))
        return [self._block(name, shape) for name, shape in pieces]

    def _block(self, name: str, shape: tuple[int, ...]) -> Block:
        size, offset = list(shape), [0] * len(shape)
        if self.dim is not None:
            size[self.dim] *= self.parts
            offset[self.dim] = self.part * shape[self.dim]
        if self.rows is not None:
            size[0] = self.rows
            offset[0] = min(offset[0], self.rows)
            shape = (min(shape[0], self.rows - offset[0]), *shape[1:])
        return Block(name, tuple(size), tuple(offset), shape)


@dataclasses.dataclass(frozen=True)
class _QKV:
    """megatron keeps query, key and value of each group of heads together: q q .. k v, q q .. k v, ..."""

    heads_per_group: int
    head_dim: int

    def join(self, tensors: Tensors) -> torch.Tensor:
        groups = tensors[1].size(0) // self.head_dim
        return torch.cat([t.view(groups, -1, *t.shape[1:]) for t in tensors], 1).flatten(0, 1)

    def split(self, param: torch.Tensor) -> Tensors:
        sizes = [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        grouped = param.view(-1, sum(sizes), *param.shape[1:])
        return [t.flatten(0, 1) for t in grouped.split(sizes, 1)]


def _entry(module: torch.nn.Module, weight: Weight, model: Model, numbers: Mapping[str, int], local: int = 0) -> Entry:
    """The entry of a weight of ``module``, which is a layer or the whole model.

    Args:
        numbers: what the names of its tensors are filled in with.
        local: number of the expert on this rank.
    """
    parallel, config = model.parallel, model.config
    param = module.get_parameter(weight.module.format(expert=local))
    names = tuple(tensor.name.format(**numbers) for tensor in weight.tensors)
    cut_over = parallel.etp_group if weight.of_expert else parallel.tp_group
    how: dict[str, Any] = {"dim": weight.cut, "group": None if weight.cut is None else cut_over}
    if weight.join == "qkv":
        qkv = _QKV(config.num_attention_heads // config.num_query_groups, config.kv_channels)
        how |= {"join": qkv.join, "split": qkv.split, "interleaved": True}
    elif len(names) > 1:
        how |= {"join": torch.cat, "split": lambda held: list(held.chunk(len(names)))}
    if "vocab" in weight.tensors[0].dims:
        how["rows"] = model.vocab_size
    return Entry(param, names, expert=numbers["expert"] if weight.of_expert else None, **how)


def _layer_entries(layer: Any, model: Model) -> Iterator[Entry]:
    number, shape = layer.layer_number - 1, model.shape
    weights = shape.weights[shape.kinds[number]]
    for weight in weights:
        if not weight.of_expert:
            yield _entry(layer, weight, model, {"layer": number})
    of_expert = [weight for weight in weights if weight.of_expert]
    here = shape.experts // model.parallel.ep_size if of_expert else 0
    for local in range(here):
        expert = model.parallel.ep_rank * here + local
        for weight in of_expert:
            yield _entry(layer, weight, model, {"layer": number, "expert": expert}, local)


def entries(model: Model) -> Iterator[Entry]:
    """The parameters of this rank, in the order of the forward pass.

    Where the last pipeline stage keeps a copy of a tied embedding, that is the last entry.
    """
    shape = model.shape
    for gpt in model.gpt:
        if gpt.pre_process:
            if shape.vision is not None:
                for name, param in gpt.vision_tower.named_parameters():
                    yield Entry(param, (PREFIX + name,))
            yield _entry(gpt, shape.embedding_weight, model, {})
        for layer in gpt.decoder.layers:
            yield from _layer_entries(layer, model)
        if gpt.post_process:
            yield _entry(gpt, shape.final_norm_weight, model, {})
            if not shape.tied:
                yield _entry(gpt, shape.head_weight, model, {})
            elif not gpt.pre_process:
                copied = dataclasses.replace(shape.head_weight, tensors=shape.embedding_weight.tensors)
                yield dataclasses.replace(_entry(gpt, copied, model, {}), is_copy=True)


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by name, read from disk when asked for, whole or in part.

    Experts may be stored one by one (``experts.3.gate_proj.weight``) or stacked as transformers 5 holds them in memory
    (``experts.gate_up_proj``); both answer to the first kind of name.

    Raises:
        ValueError: there are no safetensors, or a file that the index names is missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        index = os.path.join(folder, "model.safetensors.index.json")
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                self._files: dict[str, str] = json.load(file)["weight_map"]
        elif os.path.exists(os.path.join(folder, "model.safetensors")):
            self._files = dict.fromkeys(self._file("model.safetensors").keys(), "model.safetensors")
        else:
            raise ValueError(
                f"{folder} holds no model.safetensors and no model.safetensors.index.json; save the model with "
                "save_pretrained() or download its safetensors files"
            )

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            path = os.path.join(self.folder, name)
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"cannot read {path}: {error}; download the file again") from error
        return self._open[name]

    def names(self) -> list[str]:
        """All tensor names as stored."""
        return list(self._files)

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A tensor or its part ``start:stop`` along ``dim``, on the CPU, in the dtype of the file.

        Raises:
            ValueError: the checkpoint does not have it.
        """
        if name in self._files:
            stored = self._file(self._files[name]).get_slice(name)
            piece = stored[:] if dim is None else stored[start:stop] if dim == 0 else stored[:, start:stop]
            tensor: torch.Tensor = piece
            return tensor
        tensor = self._read_stacked(name)
        return tensor if dim is None else tensor[start:stop] if dim == 0 else tensor[:, start:stop]

    def _read_stacked(self, name: str) -> torch.Tensor:
        before, found, after = name.partition(".experts.")
        if found:
            number, projection = after.split(".")[:2]
            fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
            stacked = f"{before}.experts.{fused}"
            if stacked in self._files:
                expert: torch.Tensor = self._file(self._files[stacked]).get_slice(stacked)[int(number)]
                return expert if fused == projection else expert.chunk(2)[projection == "up_proj"]
        raise ValueError(f"{self.folder} has no tensor {name!r}; its weights and its config.json do not match")

    def shard(self, entry: Entry, name: str) -> torch.Tensor:
        """Cuts this rank's part out of one of the tensors of ``entry``; rows of a padded vocabulary are zero."""
        if entry.dim is None:
            return self.read(name)
        index = entry.names.index(name)
        local = entry.split(entry.param.detach())[index].shape
        size = local[entry.dim]
        full = self._size(name, entry.dim)
        expected = entry.rows if entry.rows is not None else size * entry.parts
        if full is not None and full != expected:
            raise ValueError(
                f"{self.folder}: {name} has size {full} in dimension {entry.dim}, but config.json asks for {expected}"
            )
        start = min(entry.part * size, expected)
        piece = self.read(name, entry.dim, start, min(start + size, expected))
        if piece.size(entry.dim) < size:
            assert entry.dim == 0
            piece = torch.cat([piece, piece.new_zeros(size - piece.size(0), *piece.shape[1:])])
        return piece

    def _size(self, name: str, dim: int) -> int | None:
        if name not in self._files:
            return None
        shape = self._file(self._files[name]).get_slice(name).get_shape()
        return int(shape[dim]) if dim < len(shape) else None


def load_hf_weights(model: Model, folder: str | None = None) -> None:
    """Copies the weights of a Hugging Face folder into this rank's part of the model.

    Each rank reads its own parts of the tensors of its own layers, one parameter at a time, so that beside the model
    there is never more on the host than one parameter. To be
    called before the optimizer is built, which keeps master weights of its own.

    Args:
        folder: default the folder the model was built from.

    Raises:
        ValueError: a tensor is missing or has another shape; the message names it.
    """
    source = SafetensorsFolder(folder or model.hf_folder)
    filled = set()
    with DeviceContext(), torch.no_grad():
        for entry in entries(model):
            shard = entry.join([source.shard(entry, name) for name in entry.names])
            if shard.shape != entry.param.shape:
                raise ValueError(
                    f"{source.folder}: {' + '.join(entry.names)} gives a parameter of shape {tuple(shard.shape)}, but "
                    f"config.json asks for {tuple(entry.param.shape)}; weights and config.json do not belong together"
                )
            entry.param.data.copy_(shard)
            filled.add(id(entry.param))
    for gpt in model.gpt:
        missing = [name for name, param in gpt.named_parameters() if id(param) not in filled]
        assert not missing, f"parameters without a Hugging Face name: {missing}"
