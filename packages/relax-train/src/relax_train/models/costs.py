"""What training costs, from the shape of the model: FLOPs of a sequence, memory of activations. Needs no torch."""

import dataclasses
from collections.abc import Collection
from typing import Literal

from relax_data.packing.costs import CostModel

from relax_train.models.shape import Kind, ModelShape, ParallelSizes

CHUNK_BYTES = 1 << 30
"""Logits that are in memory at a time."""


def cost_model(shape: ModelShape) -> CostModel:
    """FLOPs of a forward pass over a sequence by its length; parallel sizes and backward scale all of it alike."""
    return CostModel.from_shape(
        parameters=shape.multiplied_parameters,
        num_layers=shape.layers,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations:
    """Memory of what a training pass keeps for its backward pass, and of what a layer needs while it runs.

    Attributes:
        shape: the model.
        sizes: parallel sizes; those that cut a layer are TP, ETP and PP.
        sequence_parallel: whether the residual stream is cut over tensor-parallel ranks too.
        width: bytes of a number: 2 in bfloat16.
    """

    shape: ModelShape
    sizes: ParallelSizes
    sequence_parallel: bool
    width: int

    @property
    def _stream(self) -> int:
        """Bytes of the residual stream of a token."""
        return self.shape.hidden * self.width // (self.sizes.tp if self.sequence_parallel else 1)

    def layer(self, kind: Kind, remade: Collection[str] = ()) -> int:
        """Bytes that a layer keeps of a token, without what is ``remade`` (``--recompute-modules``).

        Norms keep their input and give an output; attention keeps its projection, queries, keys, values and output, an
        MLP its input, both halves of the first product and their SwiGLU.
        """
        shape, tp = self.shape, self.sizes.tp
        queries, keys = (n * shape.head_dim * self.width // tp for n in (shape.heads, shape.kv_heads))
        kept = 2 * self._stream + 2 * (queries + 2 * keys)
        kept += 0 if "layernorm" in remade else self._stream
        kept += 0 if "core_attn" in remade else queries
        if kind == "dense":
            inner = shape.ffn * self.width // tp
            kept += 0 if "layernorm" in remade and "mlp" not in remade else self._stream
            return kept + (0 if "mlp" in remade else 2 * inner + (0 if "mlp_act" in remade else inner))
        kept += self._stream
        if "moe" in remade:
            return kept
        inner = shape.experts_per_token * shape.expert_ffn * self.width // self.sizes.etp
        sent = shape.experts_per_token * shape.hidden * self.width
        return kept + sent + 2 * inner + (0 if "moe_act" in remade else inner)

    def of(self, tokens: int, recompute: "Recompute") -> int:
        """Bytes of a micro-batch of ``tokens`` on the fullest rank, with the micro-batches that a pipeline has open."""
        pp = self.sizes.pp
        each = self.shape.layers // pp
        kinds = self.shape.kinds[:each]
        whole = each if recompute.method == "uniform" else min(recompute.layers, each)
        kept, most = 0, 0
        for number, kind in enumerate(kinds):
            remade = recompute.modules if number >= whole else ()
            kept += self._stream if number < whole else self.layer(kind, remade)
            most = max(most, self.layer(kind))
        if recompute.method == "uniform":
            kept, most = -(-each // recompute.layers) * self._stream, most * recompute.layers
        # While one layer runs backward it has all that it keeps, and gradients of about half as much.
        return tokens * (kept * pp + most * 3 // 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute:
    """What a backward pass computes again: ``--recompute-...``.

    Attributes:
        method: ``uniform``: all layers, in chunks of ``layers``; ``block``: the first ``layers`` of a stage.
        modules: parts of the other layers.
    """

    method: Literal["uniform", "block"] | None = None
    layers: int = 0
    modules: tuple[str, ...] = ()
