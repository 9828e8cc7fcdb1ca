"""megatron-core as this package uses it: the one place that imports it.

Works with the versions of :data:`TESTED_VERSIONS`, on CUDA without TransformerEngine and on the CPU. Beside the
imports there are three names that megatron-core's own code refers to but defines only when TransformerEngine is there,
and faster versions of two functions that it defines only when it is not.
"""

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from relax_train.backend.device import add_product, before_megatron

before_megatron()


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Inside, an optional module is not there to be imported, unless it was imported already."""
    modules: dict[str, Any] = sys.modules
    hidden = modules.setdefault(name, None) is None  # how Python marks a module that must not be imported
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


# Its inference engine imports wandb where that is installed: it takes a second, makes two temporary folders, and a rank
# that is killed leaves them there.
with warnings.catch_warnings(), _without("wandb"):
    # That apex and TransformerEngine are missing is how we use it.
    warnings.simplefilter("ignore")
    import megatron.core as megatron_core
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, clip_grads, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import layers as megatron_layers
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer


VERSION: str = megatron_core.__version__
TESTED_VERSIONS = ((0, 16, 1), (0, 20, 0))
"""Lowest version, and the first one beyond: the versions that the tests of this package passed with."""


class _NoFP8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _no_autocast(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _define_missing_names() -> None:
    # The router of 0.16 refers to it also when TransformerEngine is absent.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Recomputation of a single module ("layernorm", "moe_act") refers to these; `fp8 is not None` holds for False too.
    if not megatron_random.HAVE_TE:
        megatron_random.FP8GlobalStateManager = _NoFP8
        megatron_random.activation_recompute_forward = _no_autocast
        megatron_random.fp8_autocast = _no_autocast


def _l2_norm(_: int, __: Any, tensor_lists: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, float32 ``[1]``."""
    norms = torch._foreach_norm(tensor_lists[0])
    return torch.stack(norms).norm().float().view(1), None


def _scale(_: int, __: Any, tensor_lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiplies the tensors of the first list by ``factor`` into those of the second."""
    source, target = tensor_lists
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(source, target, strict=True)):
        torch._foreach_mul_(target, factor)
    else:
        torch._foreach_copy_(target, torch._foreach_mul(source, factor))


def _replace_slow_fallbacks() -> None:
    # Without apex and TransformerEngine megatron asks the device for the norm of each gradient in turn.
    if clip_grads.l2_norm_impl is getattr(clip_grads, "local_multi_tensor_l2_norm", None):
        clip_grads.l2_norm_impl = _l2_norm
        clip_grads.multi_tensor_scale_impl = _scale


class _WeightGradient:
    """Stands for apex's ``fused_weight_gradient_mlp_cuda``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: torch.Tensor, grad: torch.Tensor, total: torch.Tensor) -> None:
        add_product(total, grad, inputs)


def _define_gradient_accumulation() -> None:
    # A matrix product that adds to the float32 buffer: without it each gradient is written, read, and added.
    if not megatron_layers._grad_accum_fusion_available:
        megatron_layers._grad_accum_fusion_available = True
        megatron_layers.fused_weight_gradient_mlp_cuda = _WeightGradient


_define_missing_names()
_replace_slow_fallbacks()
_define_gradient_accumulation()


def to_torch_checkpoint(sharded_state: Any) -> Any:
    """The sharded part of a state as ``torch.distributed.checkpoint`` takes it, each shard on one of its ranks."""
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state, True)
    return mcore_to_pyt_state_dict(flat, False)


__all__ = [
    "MLP",
    "TESTED_VERSIONS",
    "VERSION",
    "AttnMaskType",
    "CheckpointingConfig",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MCoreSavePlanner",
    "MegatronModule",
    "MegatronOptimizer",
    "MoELayer",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "SelfAttention",
    "SequentialMLP",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "dist_checkpointing",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "is_main_replica",
    "megatron_random",
    "parallel_state",
    "save_config",
    "save_preprocess",
    "tensor_parallel",
    "to_torch_checkpoint",
    "token_dispatcher",
]
