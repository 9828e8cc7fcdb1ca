"""The record of an architecture, which is read by the plan, the checks, the trainer, the costs and the export.

:class:`Architecture` has the answers of the plainest decoder as its defaults: RMSNorm before attention and MLP, rotary
embedding, grouped-query attention, a gated MLP, no biases, and the tensor names that Llama's checkpoints brought in.
A family says where it differs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from relax_train.models.architectures.rope_keys import (
    ROPE_TYPES,
    longest_text,
    positive,
    read_rope,
    rope_problems,
)
from relax_train.models.shape import Config, Dim, Kind, ModelShape, Tensor, Weight

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
_LARGEST = 10**9
_MOST_LAYERS = _MOST_EXPERTS = 10**5
_MOST_PARAMETERS = 10**14


def experts_key(config: Config) -> str:
    """The key of a ``config.json`` that holds the number of experts: transformers 5 writes another one than before."""
    return "num_experts" if "num_experts" in config else "num_local_experts"


# ---------------------------------------------------------------------- weights

LAYER = "model.layers.{layer}."


def weight(module: str, names: str, dims: tuple[tuple[Dim, ...], ...], **how: Any) -> Weight:
    """A weight of a layer, from the names of its tensors below the layer (separated by blanks)."""
    tensors = tuple(Tensor(LAYER + name, sizes) for name, sizes in zip(names.split(), dims, strict=True))
    return Weight(module, tensors, **how)


ATTENTION_NORM = weight("input_layernorm.weight", "input_layernorm.weight", (("hidden",),))
QKV = weight(
    "self_attention.linear_qkv.weight",
    "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight",
    (("queries", "hidden"), ("keys", "hidden"), ("keys", "hidden")),
    cut=0,
    join="qkv",
)
QKV_BIAS = weight(
    "self_attention.linear_qkv.bias",
    "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
    (("queries",), ("keys",), ("keys",)),
    cut=0,
    join="qkv",
)
QK_NORM = (
    weight("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", (("head_dim",),)),
    weight("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", (("head_dim",),)),
)
ATTENTION_OUT = weight("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (("hidden", "queries"),), cut=1)
MLP_NORM = weight("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", (("hidden",),))
DENSE_MLP = (
    weight(
        "mlp.linear_fc1.weight",
        "mlp.gate_proj.weight mlp.up_proj.weight",
        (("ffn", "hidden"), ("ffn", "hidden")),
        cut=0,
    ),
    weight("mlp.linear_fc2.weight", "mlp.down_proj.weight", (("hidden", "ffn"),), cut=1),
)
EXPERTS_MLP = (
    weight("mlp.router.weight", "mlp.gate.weight", (("experts", "hidden"),)),
    weight(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "mlp.experts.{expert}.gate_proj.weight mlp.experts.{expert}.up_proj.weight",
        (("expert_ffn", "hidden"), ("expert_ffn", "hidden")),
        cut=0,
    ),
    weight(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        "mlp.experts.{expert}.down_proj.weight",
        (("hidden", "expert_ffn"),),
        cut=1,
    ),
)
EMBEDDING = Weight(
    "embedding.word_embeddings.weight", (Tensor("model.embed_tokens.weight", ("vocab", "hidden")),), cut=0
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", (Tensor("model.norm.weight", ("hidden",)),))
HEAD = Weight("output_layer.weight", (Tensor("lm_head.weight", ("vocab", "hidden")),), cut=0)


# ---------------------------------------------------------------------- configuration


def integer(config: Config, key: str, default: int | None = None, least: int = 1) -> int:
    """A size of the configuration; ``default`` where it is missing or null.

    Raises:
        ValueError: it is no integer, or absurd.
    """
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
        shown = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of many digits"
        raise ValueError(f"config.json: {key} should be an integer from {least} to {_LARGEST:,}, not {shown}")
    return value


def all_dense(config: Config, layers: int) -> tuple[Kind, ...]:
    """The layers of a model without experts."""
    dense: Kind = "dense"
    return (dense,) * layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models.

    Attributes:
        model_type: as ``config.json`` names it.
        class_name: the class of transformers that computes the same.
        attention: weights of the attention of a layer, in the order of the forward pass.
        dense_mlp: those of an MLP that all tokens pass.
        experts_mlp: those of a mixture of experts.
        embedding, final_norm, head: those outside the layers.
        has_experts: whether it reads the keys of a mixture of experts.
        layer_kinds: what the MLP of each layer is, from the configuration and the number of layers.
        activations: values of ``hidden_act`` that are built.
        rope_types: ways to scale the rotary embedding that are built.
        refuses: switches of ``config.json`` that may not be on, because what they switch on is not built.
        defaults: what transformers takes for a key that ``config.json`` leaves out.
        reads_pictures: whether it has a vision tower.
        models: well-known models of the family, for the documentation.
        tried: sizes that ran from end to end, and where, for the documentation.
    """

    model_type: str
    class_name: str
    attention: tuple[Weight, ...] = (QKV, ATTENTION_OUT)
    dense_mlp: tuple[Weight, ...] = DENSE_MLP
    experts_mlp: tuple[Weight, ...] = EXPERTS_MLP
    embedding: Weight = EMBEDDING
    final_norm: Weight = FINAL_NORM
    head: Weight = HEAD
    has_experts: bool = False
    layer_kinds: Callable[[Config, int], tuple[Kind, ...]] = all_dense
    activations: tuple[str, ...] = ("silu",)
    rope_types: tuple[str, ...] = ROPE_TYPES
    refuses: tuple[str, ...] = ("use_sliding_window", "attention_bias")
    defaults: Config = dataclasses.field(default_factory=dict)
    reads_pictures: bool = False
    models: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()

    def layer_weights(self, kind: Kind) -> tuple[Weight, ...]:
        """The weights of a layer, in the order of the forward pass."""
        mlp = self.experts_mlp if kind == "experts" else self.dense_mlp
        return (ATTENTION_NORM, *self.attention, MLP_NORM, *mlp)

    def problems(self, config: Config) -> list[str]:
        """Lists what a configuration asks for that is not built, each with its key and what to do."""
        found, with_defaults = [], {**self.defaults, **config}
        if (act := config.get("hidden_act", "silu")) not in self.activations:
            found.append(f"hidden_act {act!r} is not supported; only {' and '.join(self.activations)} is")
        found += [
            f"{key} {with_defaults[key]!r} is not supported; use a model without it"
            for key in self.refuses
            if with_defaults.get(key)
        ]
        if (kinds := config.get("layer_types")) is not None and not _all_full_attention(kinds):
            found.append(f"layer_types {str(kinds)[:60]} is not supported; only full_attention in every layer is")
        found += rope_problems(config, self.rope_types)
        return found

    def shape(self, config: Config) -> ModelShape:
        """The shape of the model that a ``config.json`` of this family describes.

        Raises:
            ValueError: a value is missing, no integer, absurd or not supported; the message names the key.
        """
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        for key in ("rms_norm_eps", "rope_theta"):
            if config.get(key) is not None:
                positive(key, config[key])
        for problem in self.problems(config):
            raise ValueError(f"config.json: {problem}")
        config = {**self.defaults, **config}
        kinds = self.layer_kinds(config, self._layers(config))
        experts = self._experts(config) if "experts" in kinds else 0
        integer(config, "max_position_embeddings", 0, 0)
        rope = read_rope(config)
        shape = ModelShape(
            model_type=self.model_type,
            kinds=kinds,
            hidden=hidden,
            ffn=integer(config, "intermediate_size"),
            heads=heads,
            kv_heads=integer(config, "num_key_value_heads", heads),
            head_dim=integer(config, "head_dim", hidden // heads),
            vocab=integer(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=experts,
            expert_ffn=integer(config, "moe_intermediate_size") if experts else 0,
            experts_per_token=integer(config, "num_experts_per_tok") if experts else 0,
            renormalised=bool(config.get("norm_topk_prob")) if experts else False,
            qkv_bias=QKV_BIAS in self.attention,
            qk_norm=QK_NORM[0] in self.attention,
            norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps")),
            rope=rope,
            max_positions=longest_text(config, rope),
            weights={kind: self.layer_weights(kind) for kind in sorted({*kinds})},
            embedding_weight=self.embedding,
            final_norm_weight=self.final_norm,
            head_weight=self.head,
        )
        _check_sizes(shape)
        return shape

    def _layers(self, config: Config) -> int:
        layers = integer(config, "num_hidden_layers")
        if layers > _MOST_LAYERS:
            raise ValueError(f"config.json: its sizes make a model of {layers:,} layers; num_hidden_layers is wrong")
        return layers

    def _experts(self, config: Config) -> int:
        key = experts_key(config)
        experts = integer(config, key, 0, least=0)
        if experts > _MOST_EXPERTS:
            raise ValueError(f"config.json: its sizes make a layer of {experts:,} experts; {key} is wrong")
        return experts


def _check_sizes(shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"config.json: num_key_value_heads {shape.kv_heads} does not divide num_attention_heads {shape.heads}"
        )
    if shape.experts_per_token > shape.experts:
        raise ValueError(f"config.json: num_experts_per_tok {shape.experts_per_token} of only {shape.experts} experts")
    if shape.parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"config.json: its sizes make a model of {shape.parameters:.1e} parameters; one of them is wrong "
            f"(hidden_size {shape.hidden}, num_hidden_layers {shape.layers}, vocab_size {shape.vocab}, ...)"
        )


def _all_full_attention(kinds: Any) -> bool:
    return isinstance(kinds, list | tuple) and all(kind == "full_attention" for kind in kinds)
