"""Which megatron-core parameter is which Hugging Face tensor, and loading one from the other.

The map is one list of :class:`Entry`: a parameter of this rank, the Hugging Face tensors it holds a part of, and how
these are cut over ranks. Loading and export both walk it, so they cannot disagree.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from relax_train.backend.device_context import DeviceContext
from relax_train.backend.parallel import ParallelState
from relax_train.models.build import Model

Tensors = list[torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"


def _only(tensors: Tensors) -> torch.Tensor:
    return tensors[0]


def _alone(param: torch.Tensor) -> Tensors:
    return [param]


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
    """

    param: torch.Tensor
    names: tuple[str, ...]
    dim: int | None = None
    group: dist.ProcessGroup | None = None
    join: Callable[[Tensors], torch.Tensor] = _only
    split: Callable[[torch.Tensor], Tensors] = _alone
    expert: int | None = None
    rows: int | None = None

    @property
    def parts(self) -> int:
        """Number of ranks the tensors are cut over."""
        return self.group.size() if self.group is not None else 1

    @property
    def part(self) -> int:
        """Which of the parts this rank holds."""
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


def _chunk2(param: torch.Tensor) -> Tensors:
    return list(param.chunk(2))


def _mlp_entries(mlp: Any, prefix: str, group: dist.ProcessGroup, expert: int | None = None) -> Iterator[Entry]:
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    yield Entry(mlp.linear_fc1.weight, names, 0, group, torch.cat, _chunk2, expert=expert)
    yield Entry(mlp.linear_fc2.weight, (f"{prefix}down_proj.weight",), 1, group, expert=expert)


def _layer_entries(layer: Any, model: Model) -> Iterator[Entry]:
    parallel, config = model.parallel, model.config
    prefix = f"model.layers.{layer.layer_number - 1}."
    attention, tp = layer.self_attention, parallel.tp_group
    yield Entry(layer.input_layernorm.weight, (f"{prefix}input_layernorm.weight",))
    qkv = _QKV(config.num_attention_heads // config.num_query_groups, config.kv_channels)
    for kind in ("weight", "bias") if config.add_qkv_bias else ("weight",):
        names = tuple(f"{prefix}self_attn.{x}_proj.{kind}" for x in "qkv")
        yield Entry(getattr(attention.linear_qkv, kind), names, 0, tp, qkv.join, qkv.split)
    if config.qk_layernorm:
        yield Entry(attention.q_layernorm.weight, (f"{prefix}self_attn.q_norm.weight",))
        yield Entry(attention.k_layernorm.weight, (f"{prefix}self_attn.k_norm.weight",))
    yield Entry(attention.linear_proj.weight, (f"{prefix}self_attn.o_proj.weight",), 1, tp)
    yield Entry(layer.pre_mlp_layernorm.weight, (f"{prefix}post_attention_layernorm.weight",))
    experts = getattr(layer.mlp, "experts", None)
    if experts is None:
        yield from _mlp_entries(layer.mlp, f"{prefix}mlp.", tp)
        return
    yield Entry(layer.mlp.router.weight, (f"{prefix}mlp.gate.weight",))
    first = parallel.ep_rank * len(experts.local_experts)
    for i, expert in enumerate(experts.local_experts, start=first):
        yield from _mlp_entries(expert, f"{prefix}mlp.experts.{i}.", parallel.etp_group, expert=i)


def entries(model: Model) -> Iterator[Entry]:
    """The parameters of this rank, in the order of the forward pass.

    Where the last pipeline stage keeps a copy of a tied embedding, that is the last entry (:func:`is_copy`).
    """
    tp, rows = model.parallel.tp_group, model.vocab_size
    for gpt in model.gpt:
        if gpt.pre_process:
            yield Entry(gpt.embedding.word_embeddings.weight, (EMBEDDING,), 0, tp, rows=rows)
        for layer in gpt.decoder.layers:
            yield from _layer_entries(layer, model)
        if gpt.post_process:
            yield Entry(gpt.decoder.final_layernorm.weight, ("model.norm.weight",))
            if not model.tied:
                yield Entry(gpt.output_layer.weight, ("lm_head.weight",), 0, tp, rows=rows)
            elif not gpt.pre_process:
                yield Entry(gpt.output_layer.weight, (EMBEDDING,), 0, tp, rows=rows)


def is_copy(entry: Entry, parallel: ParallelState) -> bool:
    """True for the last stage's copy of a tied embedding, which is no tensor of its own."""
    return entry.names == (EMBEDDING,) and not parallel.is_first_stage


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
        """This rank's part of one of the tensors of ``entry``; rows of a padded vocabulary are zero."""
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
    there is never more on the host than one parameter. After the optimizer was built call its ``reload_weights``.

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
