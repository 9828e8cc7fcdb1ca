"""Which megatron-core parameter is which Hugging Face tensor, and loading one from the other.

The map is one list of :class:`Entry` a model part: a parameter of this rank, the full Hugging Face tensors it is made
of, and how it is cut over ranks. Loading and export both walk it, so they cannot disagree.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from relax_train.device import DeviceContext
from relax_train.layout import Layout
from relax_train.model import Model

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter of this rank and the Hugging Face tensors that it holds a part of.

    Attributes:
        param: local tensor (a shard).
        names: full tensors, in the order of ``split`` and ``join``.
        dim: dimension that is cut over ``group``, or None when every rank holds all of it.
        group: ranks that hold the other shards.
        join: full Hugging Face tensors -> full megatron tensor, laid out so that cutting it along ``dim`` into
            ``group.size()`` equal parts gives each rank its shard.
        split: the inverse.
        expert: number of the expert in the whole model, or None.
        rows: rows of the full Hugging Face tensor where the megatron one is padded, or None.
    """

    param: torch.Tensor
    names: tuple[str, ...]
    dim: int | None = None
    group: dist.ProcessGroup | None = None
    join: Callable[[Tensors], torch.Tensor] = lambda tensors: tensors[0]
    split: Callable[[torch.Tensor], Tensors] = lambda full: [full]
    expert: int | None = None
    rows: int | None = None

    @property
    def parts(self) -> int:
        """Number of shards."""
        return self.group.size() if self.dim is not None and self.group is not None else 1

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the full megatron tensor."""
        shape = list(self.param.shape)
        if self.dim is not None:
            shape[self.dim] *= self.parts
        return torch.Size(shape)

    def shard(self, tensors: Tensors) -> torch.Tensor:
        """This rank's part of the full Hugging Face tensors."""
        full = self.join(tensors)
        if self.rows is not None and full.size(0) < self.full_shape[0]:
            full = torch.cat([full, full.new_zeros(self.full_shape[0] - full.size(0), *full.shape[1:])])
        if self.parts == 1:
            return full
        assert self.dim is not None and self.group is not None
        return full.chunk(self.parts, self.dim)[self.group.rank()]

    def unshard(self, full: torch.Tensor) -> Tensors:
        """The full Hugging Face tensors of a full megatron tensor."""
        return self.split(full if self.rows is None else full[: self.rows])


@dataclasses.dataclass(frozen=True)
class _QKV:
    """megatron stores query, key and value of each group of heads together: q q .. k v, q q .. k v, ..."""

    groups: int
    heads_per_group: int
    head_dim: int

    def join(self, tensors: Tensors) -> torch.Tensor:
        q, k, v = (t.view(self.groups, -1, *t.shape[1:]) for t in tensors)
        return torch.cat([q, k, v], 1).flatten(0, 1)

    def split(self, full: torch.Tensor) -> Tensors:
        grouped = full.view(self.groups, -1, *full.shape[1:])
        sizes = [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]
        return [t.flatten(0, 1) for t in grouped.split(sizes, 1)]


@dataclasses.dataclass(frozen=True)
class _GateUp:
    """megatron stores gate and up of each shard together: gate 0, up 0, gate 1, up 1, ..."""

    parts: int

    def join(self, tensors: Tensors) -> torch.Tensor:
        return torch.cat(
            [piece for pair in zip(*(t.chunk(self.parts) for t in tensors), strict=True) for piece in pair]
        )

    def split(self, full: torch.Tensor) -> Tensors:
        pieces = full.chunk(2 * self.parts)
        return [torch.cat(pieces[0::2]), torch.cat(pieces[1::2])]


def _mlp_entries(mlp: Any, prefix: str, group: dist.ProcessGroup, expert: int | None = None) -> Iterator[Entry]:
    gate_up = _GateUp(group.size())
    names = (f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight")
    yield Entry(mlp.linear_fc1.weight, names, 0, group, gate_up.join, gate_up.split, expert=expert)
    yield Entry(mlp.linear_fc2.weight, (f"{prefix}down_proj.weight",), 1, group, expert=expert)


def _layer_entries(layer: Any, model: Model) -> Iterator[Entry]:
    layout, config = model.layout, model.config
    prefix = f"model.layers.{layer.layer_number - 1}."
    attention, tp = layer.self_attention, layout.tp_group
    yield Entry(layer.input_layernorm.weight, (f"{prefix}input_layernorm.weight",))
    qkv = _QKV(config.num_query_groups, config.num_attention_heads // config.num_query_groups, config.kv_channels)
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
    first = layout.ep_rank * len(experts.local_experts)
    for i, expert in enumerate(experts.local_experts, start=first):
        yield from _mlp_entries(expert, f"{prefix}mlp.experts.{i}.", layout.etp_group, expert=i)


def entries(model: Model) -> Iterator[Entry]:
    """The parameters of this rank, in the order of the forward pass.

    The copy of a tied embedding that the last pipeline stage keeps comes last, under the embedding's name; see
    :func:`is_copy`.
    """
    tp = model.layout.tp_group
    for gpt in model.gpt:
        if gpt.pre_process:
            embedding = gpt.embedding.word_embeddings.weight
            yield Entry(embedding, ("model.embed_tokens.weight",), 0, tp, rows=model.vocab_size)
        for layer in gpt.decoder.layers:
            yield from _layer_entries(layer, model)
        if gpt.post_process:
            yield Entry(gpt.decoder.final_layernorm.weight, ("model.norm.weight",))
            if not model.tied:
                yield Entry(gpt.output_layer.weight, ("lm_head.weight",), 0, tp, rows=model.vocab_size)
            elif not gpt.pre_process:
                yield Entry(gpt.output_layer.weight, ("model.embed_tokens.weight",), 0, tp, rows=model.vocab_size)


def is_copy(entry: Entry, layout: Layout) -> bool:
    """True for the last stage's copy of a tied embedding, which is no tensor of its own."""
    return entry.names == ("model.embed_tokens.weight",) and not layout.is_first_stage


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by name, each read from disk when it is asked for.

    Experts may be stored one by one (``experts.3.gate_proj.weight``) or stacked as transformers 5 keeps them in memory
    (``experts.gate_up_proj``); both answer to the first kind of name.

    Raises:
        ValueError: there are no safetensors, or a shard that the index names is missing.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        index = os.path.join(folder, "model.safetensors.index.json")
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                self._files: dict[str, str] = json.load(file)["weight_map"]
        elif os.path.exists(os.path.join(folder, "model.safetensors")):
            names = self._file("model.safetensors").keys()
            self._files = dict.fromkeys(names, "model.safetensors")
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

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, in the dtype of the file.

        Raises:
            ValueError: the checkpoint does not have it.
        """
        if name in self._files:
            tensor: torch.Tensor = self._file(self._files[name]).get_tensor(name)
            return tensor
        before, found, after = name.partition(".experts.")
        if found:
            number, projection = after.split(".")[:2]
            fused = "gate_up_proj" if projection in ("gate_proj", "up_proj") else projection
            stacked = f"{before}.experts.{fused}"
            if stacked in self._files:
                part = self._file(self._files[stacked]).get_slice(stacked)[int(number)]
                return part.chunk(2)[("gate_proj", "up_proj").index(projection)] if fused != projection else part
        raise ValueError(
            f"{self.folder} has no tensor {name!r}; it is not a checkpoint of the model in its config.json"
        )


def load_hf_weights(model: Model, folder: str | None = None) -> None:
    """Copies the weights of a Hugging Face folder into this rank's part of the model.

    Each rank reads the tensors of its own layers, one at a time, so that beside the model there is never more on the
    host than one tensor. After the optimizer was built call its ``reload_weights``.

    Args:
        folder: default the folder the model was built from.

    Raises:
        ValueError: a tensor is missing or has another shape; the message names it.
    """
    source = SafetensorsFolder(folder or model.hf_folder)
    filled = set()
    with DeviceContext(), torch.no_grad():
        for entry in entries(model):
            shard = entry.shard([source[name] for name in entry.names])
            if shard.shape != entry.param.shape:
                raise ValueError(
                    f"{source.folder}: {' + '.join(entry.names)} gives a shard of shape {tuple(shard.shape)}, but "
                    f"config.json asks for {tuple(entry.param.shape)}; weights and config.json do not belong together"
                )
            entry.param.data.copy_(shard)
            filled.add(id(entry.param))
    for gpt in model.gpt:
        missing = [name for name, param in gpt.named_parameters() if id(param) not in filled]
        assert not missing, f"parameters without a Hugging Face name: {missing}"
