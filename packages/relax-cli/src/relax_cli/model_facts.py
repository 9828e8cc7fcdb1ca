"""Size of a model, computed from its Hugging Face ``config.json`` alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from relax_train.settings.model import experts_key

from relax_cli.layout import Layout


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
            ValueError: a key is missing or is no integer; the message names it.
        """

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key)
            if value is None:
                value = default
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"config.json: {key} should be an integer, not {value!r}")
            return value

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        return cls(
            model_type=str(config.get("model_type")),
            hidden=hidden,
            layers=number("num_hidden_layers"),
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // max(1, heads)),
            intermediate=number("intermediate_size"),
            vocab=number("vocab_size"),
            tied=bool(config.get("tie_word_embeddings")),
            experts=number(experts_key(config), 0),
            expert_intermediate=number("moe_intermediate_size", 0),
            experts_per_token=number("num_experts_per_tok", 0),
            max_positions=None if config.get("rope_scaling") else number("max_position_embeddings", 0) or None,
        )

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

    def parameters_per_rank(self, layout: Layout) -> tuple[int, int]:
        """(parameters outside the experts, expert parameters) of the fullest rank of the trainer.

        TP divides the matrices, PP the layers; the embedding lies on the first stage and the output layer on the last,
        so one of the two counts in full (both without PP). ETP x EP divide the experts.
        """
        ends = 1 if self.tied or layout.pp > 1 else 2
        dense = self.shared_parameters // (layout.tp * layout.pp) + ends * self.embedding // layout.tp
        return dense, self.expert_parameters // (layout.etp * layout.ep * layout.pp)

    def training_bytes(self, layout: Layout, *, bf16: bool, offload: bool) -> tuple[int, int]:
        """(device, host) bytes of weights, gradients and optimizer on the fullest rank, without activations.

        bf16: 2 (weights) + 4 (float32 gradients) + 12 / replicas (float32 weights and both moments of Adam, which the
        distributed optimizer divides among the replicas) bytes a parameter. float32: 4 + 4 + 8 / replicas.
        ``--optimizer-cpu-offload`` moves the last term to the host.
        """
        fixed, divided = (6, 12) if bf16 else (8, 8)
        dense, expert = self.parameters_per_rank(layout)
        replicas = layout.dp * layout.cp
        optimizer = divided * dense // replicas + divided * expert // layout.expert_dp
        weights = fixed * (dense + expert)
        return (weights, optimizer) if offload else (weights + optimizer, 0)
