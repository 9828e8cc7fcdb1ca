"""Options of how the model is spread over ranks, and of what is recomputed or offloaded to save memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from relax_data.options import LARGEST_COUNT, Settings, flag, option

RecomputeModule = Literal["layernorm", "mlp_act", "moe_act", "core_attn", "mlp", "moe"]
"""A part of a layer that can be recomputed by itself; Megatron's names, and ``mlp_act`` beside its ``moe_act``."""

CHEAP_TO_RECOMPUTE: tuple[RecomputeModule, ...] = ("layernorm", "mlp_act", "moe_act")
"""What is recomputed in one pass over memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSettings(Settings):
    """Megatron's parallel sizes, with Megatron's names and meanings."""

    TITLE: ClassVar[str] = "Parallelism and memory"

    tensor_model_parallel_size: int = option(1, "Ranks that share each layer's matrices (TP).", ge=1, le=LARGEST_COUNT)
    pipeline_model_parallel_size: int = option(1, "Ranks that share the stack of layers (PP).", ge=1, le=LARGEST_COUNT)
    context_parallel_size: int = option(1, "Ranks that share each sequence (CP).", ge=1, le=LARGEST_COUNT)
    expert_model_parallel_size: int = option(
        1, "Ranks that share the experts of a mixture-of-experts layer (EP).", ge=1, le=LARGEST_COUNT
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "Ranks that share each expert's matrices; default: --tensor-model-parallel-size.",
        ge=1,
        le=LARGEST_COUNT,
    )
    sequence_parallel: bool = option(
        False, "Split activations outside the matrices over the tensor-parallel ranks too; needs TP > 1."
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        None,
        "Recompute activations in the backward pass: whole layers (full), or the parts that --recompute-modules names "
        "(selective).",
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None, "With full: every chunk of layers (uniform), or the first layers of a stage (block)."
    )
    recompute_num_layers: int | None = option(
        None, "With full: layers in a chunk (uniform), or layers that are recomputed (block).", ge=1, le=LARGEST_COUNT
    )
    recompute_modules: tuple[RecomputeModule, ...] = option(
        (),
        "With selective: what is recomputed. Of every layer the outputs of the norms (layernorm) and of SwiGLU "
        "(mlp_act, moe_act), which cost next to nothing and are the default; the attention kernel (core_attn); the "
        "whole MLP (mlp, moe).",
    )
    optimizer_cpu_offload: bool = option(
        False, "Keep the optimizer's moments in host memory; each step passes them through the GPU piece by piece."
    )

    @property
    def recomputed_modules(self) -> tuple[RecomputeModule, ...]:
        """``recompute_modules`` after its default; empty unless recomputation is selective."""
        if self.recompute_granularity != "selective":
            return ()
        return self.recompute_modules or CHEAP_TO_RECOMPUTE

    @property
    def model_parallel_size(self) -> int:
        """Ranks that one replica of the model takes: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def resolved_expert_tensor_parallel_size(self) -> int:
        """``expert_tensor_parallel_size`` after its default."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            found.append(
                "--sequence-parallel has no effect with --tensor-model-parallel-size 1; remove it or raise the size"
            )
        return found + self._recompute_problems()

    def _recompute_problems(self) -> list[str]:
        found = []
        if self.recompute_granularity == "full":
            if self.recompute_method is None or self.recompute_num_layers is None:
                found.append(
                    "--recompute-granularity full needs --recompute-method and --recompute-num-layers, "
                    "for example --recompute-method uniform --recompute-num-layers 1"
                )
        else:
            for name in ("recompute_method", "recompute_num_layers"):
                if getattr(self, name) is not None:
                    found.append(f"{flag(name)} needs --recompute-granularity full; add it or remove {flag(name)}")
        if self.recompute_modules and self.recompute_granularity != "selective":
            found.append(
                "--recompute-modules needs --recompute-granularity selective; add it or remove --recompute-modules"
            )
        for part, whole in (("mlp_act", "mlp"), ("moe_act", "moe")):
            if {part, whole} <= set(self.recompute_modules):
                found.append(f"--recompute-modules {part} has no effect beside {whole}, which recomputes it; remove it")
        return found

    def model_problems(self, hf_config: Mapping[str, Any], world_size: int) -> list[str]:
        """Lists what does not fit between these sizes, the model and the number of ranks.

        Args:
            hf_config: sizes of the model (:meth:`relax_train.models.shape.ModelShape.as_config`).
            world_size: ranks of the trainer.
        """
        found: list[str] = []
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        ep, etp = self.expert_model_parallel_size, self.resolved_expert_tensor_parallel_size
        if min(tp, pp, ep, etp, self.context_parallel_size) < 1:
            return found  # problems() says so

        def divides(size: int, name: str, key: str, default: Any = None) -> None:
            value = hf_config.get(key) or default
            if isinstance(value, int) and value % size:
                found.append(f"{flag(name)} {size} does not divide the model's {key} {value}; choose a divisor of it")

        if world_size % self.model_parallel_size:
            found.append(
                f"the trainer has {world_size} ranks, which is no multiple of TP x PP x CP = {tp} x {pp} x "
                f"{self.context_parallel_size} = {self.model_parallel_size}; change the sizes or the number of GPUs"
            )
        heads = hf_config.get("num_attention_heads")
        divides(tp, "tensor_model_parallel_size", "num_attention_heads")
        divides(tp, "tensor_model_parallel_size", "num_key_value_heads", heads)
        divides(tp, "tensor_model_parallel_size", "intermediate_size")
        divides(pp, "pipeline_model_parallel_size", "num_hidden_layers")
        dense = not hf_config.get("num_experts")
        found += [
            f"--recompute-modules {name} has no effect: the model has {'no' if dense else 'only'} layers with experts"
            for name in self.recompute_modules
            if name.startswith("moe" if dense else "mlp") and (dense or not hf_config.get("mlp_only_layers"))
        ]
        if dense:
            if ep > 1:
                found.append("--expert-model-parallel-size has no effect: the model has no experts; remove it")
            if self.expert_tensor_parallel_size is not None:
                found.append("--expert-tensor-parallel-size has no effect: the model has no experts; remove it")
            return found
        divides(ep, "expert_model_parallel_size", "num_experts")
        divides(etp, "expert_tensor_parallel_size", "moe_intermediate_size")
        if world_size % (ep * etp * pp):
            default = f" (ETP is TP = {tp} unless --expert-tensor-parallel-size is set, and 1 is allowed)"
            found.append(
                f"the trainer has {world_size} ranks, which is no multiple of EP x ETP x PP = {ep} x {etp} x {pp} = "
                f"{ep * etp * pp}{default if tp > 1 and self.expert_tensor_parallel_size is None else ''}; "
                "change the sizes or the number of GPUs"
            )
        if tp > 1 and not self.sequence_parallel:
            found.append(
                "a mixture-of-experts model with --tensor-model-parallel-size > 1 needs --sequence-parallel; add it"
            )
        return found
