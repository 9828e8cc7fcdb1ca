"""The shape of a model: its sizes and its weights, and what follows from them. Needs no torch: a plan asks too.

:func:`relax_train.models.architectures.model_shape` reads one from a ``config.json``. Everything that counts parameters
walks the same list of weights that the trainer loads and exports, so a plan and a run cannot disagree.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from relax_train.models.rope import Rope
from relax_train.models.vision.shape import VisionShape

Config = Mapping[str, Any]
"""The content of a ``config.json``."""
Kind = Literal["dense", "experts"]
"""What the MLP of a layer is: one for all tokens, or a mixture of experts."""
Dim = Literal["hidden", "queries", "keys", "head_dim", "ffn", "experts", "expert_ffn", "vocab"]
"""A dimension of a weight, by the size it has; queries and keys are all heads of a token side by side."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of the Hugging Face checkpoint.

    Attributes:
        name: its full name; ``{layer}`` and ``{expert}`` stand for numbers from 0.
        dims: its dimensions, in order.
    """

    name: str
    dims: tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core's model and the Hugging Face tensors that it holds.

    Attributes:
        module: path of the parameter, below its layer or below the model; ``{expert}`` is the number of the expert
            among those of a rank.
        tensors: in the order in which the parameter holds them.
        cut: dimension along which each tensor is cut into equal parts over tensor-parallel ranks; None when each has
            all.
        join: how the tensors lie in the parameter: ``rows`` one after another, ``qkv`` the heads of a group together.
    """

    module: str
    tensors: tuple[Tensor, ...]
    cut: Literal[0, 1] | None = None
    join: Literal["rows", "qkv"] = "rows"

    @property
    def of_expert(self) -> bool:
        """Whether every expert of the layer has one."""
        return "{expert}" in self.module


class ParallelSizes(Protocol):
    """The sizes of a parallel layout: what the number of parameters on a rank depends on."""

    @property
    def tp(self) -> int:
        """Ranks that share each matrix."""
        ...

    @property
    def pp(self) -> int:
        """Stages of the pipeline."""
        ...

    @property
    def cp(self) -> int:
        """Ranks that share each packed row."""
        ...

    @property
    def dp(self) -> int:
        """Ranks with different samples."""
        ...

    @property
    def ep(self) -> int:
        """Ranks that share the experts of a layer."""
        ...

    @property
    def etp(self) -> int:
        """Ranks that share each expert's matrices."""
        ...

    @property
    def expert_dp(self) -> int:
        """Ranks that hold the same experts."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and weights of a decoder-only transformer.

    Attributes:
        model_type: as Hugging Face calls the architecture.
        kinds: what the MLP of each layer is.
        hidden: size of the residual stream.
        ffn: inner size of a dense MLP.
        heads: query heads; ``kv_heads`` key and value heads.
        head_dim: size of a head.
        vocab: entries of the vocabulary.
        tied: whether the output layer is the input embedding.
        experts: experts of a layer; 0 when no layer has any.
        expert_ffn: inner size of an expert.
        experts_per_token: experts that a token goes to.
        renormalised: whether the weights of a token's experts are made to sum to 1.
        qkv_bias: whether query, key and value have a bias.
        qk_norm: whether query and key are normalised, head by head.
        norm_eps: what RMSNorm adds to the mean square.
        rope: the rotary embedding: base of its frequencies, and how they are scaled.
        max_positions: longest sequence that the model was made for, in tokens; None when nobody knows.
        weights: those of a layer of each kind.
        embedding_weight, final_norm_weight, head_weight: those outside the layers; a tied model has no head of its own.
        vision: the tower that reads pictures; None of a model that reads text only.
    """

    model_type: str
    kinds: tuple[Kind, ...]
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    experts_per_token: int = 0
    renormalised: bool = False
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: Rope
    max_positions: int | None
    weights: Mapping[Kind, tuple[Weight, ...]] = dataclasses.field(repr=False)
    embedding_weight: Weight = dataclasses.field(repr=False)
    final_norm_weight: Weight = dataclasses.field(repr=False)
    head_weight: Weight = dataclasses.field(repr=False)
    vision: VisionShape | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)

    # ------------------------------------------------------------------ tensors

    def size(self, dims: tuple[Dim, ...]) -> tuple[int, ...]:
        """The dimensions as numbers."""
        sizes: dict[Dim, int] = {
            "hidden": self.hidden,
            "queries": self.heads * self.head_dim,
            "keys": self.kv_heads * self.head_dim,
            "head_dim": self.head_dim,
            "ffn": self.ffn,
            "experts": self.experts,
            "expert_ffn": self.expert_ffn,
            "vocab": self.vocab,
        }
        return tuple(sizes[dim] for dim in dims)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the Hugging Face checkpoint, each expert's by itself."""
        yield from self.named(self.embedding_weight)
        for layer, kind in enumerate(self.kinds):
            yield from self.layer_tensors(layer, kind)
        yield from self.named(self.final_norm_weight)
        if not self.tied:
            yield from self.named(self.head_weight)
        if self.vision is not None:
            yield from self.vision.tensors()

    def layer_tensors(self, layer: int, kind: Kind) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of a layer of that kind."""
        for weight in self.weights[kind]:
            for expert in range(self.experts) if weight.of_expert else (0,):
                yield from self.named(weight, layer=layer, expert=expert)

    def named(self, weight: Weight, **numbers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of the tensors of a weight, with the numbers of its layer and expert filled in."""
        for tensor in weight.tensors:
            yield tensor.name.format(**numbers), self.size(tensor.dims)

    def _count(self, weight: Weight) -> int:
        return sum(math.prod(self.size(tensor.dims)) for tensor in weight.tensors)

    # ------------------------------------------------------------------ parameters

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self._count(self.embedding_weight)

    def shared_in_layer(self, kind: Kind) -> int:
        """Parameters of a layer that every token meets: attention, dense MLP or router, norms."""
        return sum(self._count(weight) for weight in self.weights[kind] if not weight.of_expert)

    def experts_in_layer(self, kind: Kind) -> int:
        """Parameters of all experts of a layer."""
        return self.experts * sum(self._count(weight) for weight in self.weights[kind] if weight.of_expert)

    def _shared(self, kinds: tuple[Kind, ...]) -> int:
        return sum(n * self.shared_in_layer(kind) for kind, n in collections.Counter(kinds).items())

    def _experts(self, kinds: tuple[Kind, ...]) -> int:
        return sum(n * self.experts_in_layer(kind) for kind, n in collections.Counter(kinds).items())

    @property
    def shared_parameters(self) -> int:
        """Parameters of all layers and of the last norm, without embeddings and experts."""
        return self._shared(self.kinds) + self._count(self.final_norm_weight)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return self._experts(self.kinds)

    @property
    def parameters(self) -> int:
        """All parameters, a vision tower's too; a tied output layer is not counted twice."""
        vision = self.vision.parameters if self.vision is not None else 0
        return self.shared_parameters + self.expert_parameters + self.embedding * (1 if self.tied else 2) + vision

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: all but the experts that it does not go to."""
        idle = self.experts - self.experts_per_token
        return self.parameters - (self.expert_parameters // self.experts * idle if self.experts else 0)

    @property
    def multiplied_parameters(self) -> int:
        """Entries of the matrices that one token is multiplied with, which is what its FLOPs follow from.

        Of a mixture of experts the router and the experts that the token goes to count; the output layer counts, the
        input embedding does not, because it is looked up; norms and biases are no matrices.
        """
        total = self._count(self.head_weight)
        for kind, layers in collections.Counter(self.kinds).items():
            for weight in self.weights[kind]:
                times = layers * (self.experts_per_token if weight.of_expert else 1)
                total += times * sum(math.prod(self.size(t.dims)) for t in weight.tensors if len(t.dims) == 2)
        return total

    def parameters_per_rank(self, sizes: ParallelSizes) -> tuple[int, int]:
        """(parameters outside the experts, expert parameters) of the fullest rank of the trainer.

        TP divides the matrices, PP the layers; the embedding lies on the first stage and the output layer on the last,
        so one of the two counts in full (both without PP). ETP x EP divide the experts.
        """
        stages = [self._stage(stage, sizes) for stage in range(sizes.pp)]
        return max(stages, key=sum)

    def _stage(self, stage: int, sizes: ParallelSizes) -> tuple[int, int]:
        each = self.layers // sizes.pp
        kinds = self.kinds[stage * each : (stage + 1) * each]
        first, last = stage == 0, stage == sizes.pp - 1
        shared = self._shared(kinds) + (self._count(self.final_norm_weight) if last else 0)
        # The last of several stages keeps a copy of a tied embedding.
        ends = int(first) + int(last and (not self.tied or not first))
        dense = shared // sizes.tp + ends * self.embedding // sizes.tp
        return dense, self._experts(kinds) // (sizes.etp * sizes.ep)

    # ------------------------------------------------------------------ memory

    def training_bytes(
        self, sizes: ParallelSizes, *, bf16: bool, offload: bool, vision_trained: bool = False
    ) -> tuple[int, int]:
        """(device, host) bytes of weights, gradients and optimizer on the fullest rank, without activations.

        bf16: 2 (weights) + 4 (float32 gradients) + 12 / replicas (float32 weights and both moments of Adam, which the
        distributed optimizer divides among the replicas) bytes a parameter. float32: 4 + 4 + 8 / replicas.
        ``--optimizer-cpu-offload`` moves the last term to the host. A vision tower is whole on the first stage; frozen,
        it has weights alone.
        """
        fixed, divided = (6, 12) if bf16 else (8, 8)
        dense, expert = self.parameters_per_rank(sizes)
        optimizer = divided * dense // (sizes.dp * sizes.cp) + divided * expert // sizes.expert_dp
        weights = fixed * (dense + expert)
        if self.vision is not None and vision_trained:
            optimizer += divided * self.vision.parameters // (sizes.dp * sizes.cp)
            weights += fixed * self.vision.parameters
        elif self.vision is not None:
            weights += (2 if bf16 else 4) * self.vision.parameters
        return (weights, optimizer) if offload else (weights + optimizer, 0)

    def sleeping_bytes(self, sizes: ParallelSizes, *, bf16: bool, offload: bool) -> int:
        """Bytes that move to the host while an engine has the GPU: :meth:`training_bytes` without the gradients."""
        device, _ = self.training_bytes(sizes, bf16=bf16, offload=offload)
        return device - 4 * sum(self.parameters_per_rank(sizes))

    def kv_cache_bytes(self, width: int) -> int:
        """Bytes of the keys and values of one token in all layers, at ``width`` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    # ------------------------------------------------------------------ the configuration again

    def as_config(self) -> dict[str, Any]:
        """The values that the shape was read from, under its Hugging Face keys, defaults filled in."""
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "num_experts": self.experts,
            "moe_intermediate_size": self.expert_ffn,
            "rms_norm_eps": self.norm_eps,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": self.renormalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, kind in enumerate(self.kinds) if kind == "dense" and self.experts],
            **self.rope.as_config(),
            "vision_config": None if self.vision is None else dict(self.vision.sizes),
        }
