"""The part of ``sgl_kernel`` that SGLang's CPU path without AMX calls, in plain PyTorch.

PyPI has no CPU build of the kernel package. Without AMX instructions SGLang calls one function of it for dense
Llama-like models; the other ``*_cpu`` names are imported at module level and never called, so they exist here and raise
when they are. This folder is on the import path of the server process only (see
:mod:`relax_rollout.engines.sglang.cpu`).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0+relax.cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes each request's new cache slots into its row of the request table, in place.

    Args:
        req_pool_indices: row of each request, integer ``[n]``.
        req_to_token: the table, int32 ``[rows, pool_len]``.
        start_offset: first column of each request's new tokens, integer ``[n]``.
        end_offset: one past the last column, integer ``[n]``.
        out_cache_loc: the slots of all requests in order, integer ``[sum(end - start)]``.
        pool_len: columns of the table.
    """
    counts = (end_offset - start_offset).long()
    rows = torch.repeat_interleave(req_pool_indices.long(), counts)
    # Column of token j of a request: its start plus j; j is the global index minus where the request begins.
    begins = counts.cumsum(0) - counts
    shift = torch.repeat_interleave(start_offset.long() - begins, counts)
    columns = torch.arange(rows.numel()) + shift
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU version here: this model or option of SGLang needs a GPU"
        )

    call.__name__ = name
    return call


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.endswith("_cpu") and not name.startswith("_"):
        return _absent(name)
    raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")


for _name in (
    *("fused_gdn_gating_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
    *("fused_qkvzba_split_reshape_cat_contiguous_cpu", "fused_sigmoid_mul_cpu"),
):
    # SGLang's processor of pictures for Qwen2.5-VL imports the model files of Qwen3.5 too, which take these operators
    # by name. Without an implementation they raise when they are called.
    torch.library.define(f"sgl_kernel::{_name}", "(Tensor x) -> Tensor")
