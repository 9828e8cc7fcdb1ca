"""Size of a model, computed from its Hugging Face ``config.json`` alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from relax_train.settings.model import experts_key

from relax_cli.cluster.placement import Placement

_LARGEST = 10**9
_MOST_PARAMETERS = 10**14
_SWITCHES_OFF = ("use_sliding_window", "attention_bias")
"""What a Qwen2 or Qwen3 model may switch on and :mod:`relax_train.models.build` does not build."""


def _check_supported(config: Mapping[str, Any]) -> None:
    """What the trainer itself checks too, but only once it has been started."""
    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < 1e15):
            raise ValueError(f"config.json: {key} should be a number above 0, not {str(value)[:40]!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; only silu is")
    for key in _SWITCHES_OFF:
        if config.get(key):
            raise ValueError(f"config.json: {key} {config[key]!r} is not supported; use a model without it")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope_parameters should be an object, not {str(rope)[:40]!r}")
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; remove it to train at the model's native context length"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The hyper-parameters that decide how large a Qwen2/Qwen3 model is."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    experts: int
    expert_intermediate: int
    experts_per_token: int
    max_positions: int | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelFacts":
        """Reads a ``config.json``.

        Raises:
            ValueError: a value is missing, no integer, absurd or not supported; the message names the key.
        """

        def number(key: str, default: int | None = None, least: int = 1) -> int:
            value = config.get(key)
            if value is None:
                value = default
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
                shown = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of many digits"
                raise ValueError(f"config.json: {key} should be an integer from {least} to {_LARGEST:,}, not {shown}")
            return value

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        _check_supported(config)
        experts = number(experts_key(config), 0, least=0)
        facts = cls(
            model_type=str(config.get("model_type")),
            hidden=hidden,
            layers=number("num_hidden_layers"),
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            intermediate=number("intermediate_size"),
            vocab=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=experts,
            expert_intermediate=number("moe_intermediate_size") if experts else 0,
            experts_per_token=number("num_experts_per_tok") if experts else 0,
            max_positions=None if config.get("rope_scaling") else number("max_position_embeddings", 0, least=0) or None,
        )
        if heads % facts.kv_heads:
            raise ValueError(
                f"config.json: num_key_value_heads {facts.kv_heads} does not divide num_attention_heads {heads}"
            )
        if facts.experts_per_token > experts:
            raise ValueError(f"config.json: num_experts_per_tok {facts.experts_per_token} of only {experts} experts")
        if facts.parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"config.json: its sizes make a model of {facts.parameters:.1e} parameters; one of them is wrong "
                f"(hidden_size {hidden}, num_hidden_layers {facts.layers}, vocab_size {facts.vocab}, ...)"
            )
        return facts

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts: three matrices each (gate, up, down)."""
        return self.layers * self.experts * 3 * self.hidden * self.expert_intermediate

    @property
    def shared_parameters(self) -> int:
        """Parameters of all layers without embeddings and experts: attention, dense MLP or router, norms."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * q + 2 * kv)
        if self.model_type == "qwen2":
            attention += q + 2 * kv  # biases
        else:
            attention += 2 * self.head_dim  # norms of query and key
        mlp = self.hidden * self.experts if self.experts else 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied output layer is not counted twice."""
        return self.shared_parameters + self.expert_parameters + self.embedding * (1 if self.tied else 2)

    def parameters_per_rank(self, placement: Placement) -> tuple[int, int]:
        """(parameters outside the experts, expert parameters) of the fullest rank of the trainer.

        TP divides the matrices, PP the layers; the embedding lies on the first stage and the output layer on the last,
        so one of the two counts in full (both without PP). ETP x EP divide the experts.
        """
        ends = 1 if self.tied or placement.pp > 1 else 2
        dense = self.shared_parameters // (placement.tp * placement.pp) + ends * self.embedding // placement.tp
        return dense, self.expert_parameters // (placement.etp * placement.ep * placement.pp)

    def training_bytes(self, placement: Placement, *, bf16: bool, offload: bool) -> tuple[int, int]:
        """(device, host) bytes of weights, gradients and optimizer on the fullest rank, without activations.

        bf16: 2 (weights) + 4 (float32 gradients) + 12 / replicas (float32 weights and both moments of Adam, which the
        distributed optimizer divides among the replicas) bytes a parameter. float32: 4 + 4 + 8 / replicas.
        ``--optimizer-cpu-offload`` moves the last term to the host.
        """
        fixed, divided = (6, 12) if bf16 else (8, 8)
        dense, expert = self.parameters_per_rank(placement)
        replicas = placement.dp * placement.cp
        optimizer = divided * dense // replicas + divided * expert // placement.expert_dp
        weights = fixed * (dense + expert)
        return (weights, optimizer) if offload else (weights + optimizer, 0)
