"""Device of the trainer: CUDA, or the CPU; dtypes and devices that follow from it."""

import functools
import importlib.util
import os
import sys
from typing import Any

import torch


def has_cuda() -> bool:
    """True when the trainer runs on CUDA; else it runs on the CPU."""
    return torch.cuda.is_available()


def local_device(local_rank: int = 0) -> torch.device:
    """The device of this rank; on CUDA it is also made the current one.

    Args:
        local_rank: number of this rank on its host; ranks beyond the visible devices wrap around, so that one visible
            device a process works as well.
    """
    if not has_cuda():
        return torch.device("cpu")
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def fuses(tensor: torch.Tensor) -> bool:
    """True for a tensor that the kernels of :mod:`relax_train.kernels` take: on CUDA, half or single precision."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float32) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def add_product(total: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor) -> None:
    """Adds ``grad.T @ inputs`` to ``total``, which may be wider than the two: one kernel on CUDA, rounded once.

    Args:
        total: ``[out, in]``.
        grad: ``[rows, out]``.
        inputs: ``[rows, in]``.
    """
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), inputs)
    elif grad.is_cuda and total.dtype == torch.float32 and accumulates_products():
        torch.addmm(total, grad.t(), inputs, out_dtype=torch.float32, out=total)
    else:
        total.add_(grad.t() @ inputs)


@functools.cache
def accumulates_products() -> bool:
    """Whether this device adds a product of bfloat16 matrices to a float32 matrix in one kernel."""
    if not has_cuda():
        return False
    half = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
    total = torch.ones(16, 16, device="cuda")
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # an older torch or card
        return False
    return bool((total == 17).all())


def default_dtype(bf16: bool | None) -> torch.dtype:
    """Dtype of parameters and activations for ``--bf16``; None is bfloat16 on CUDA and float32 on CPU."""
    if bf16 is None:
        bf16 = has_cuda()
    return torch.bfloat16 if bf16 else torch.float32


def before_megatron() -> None:
    """To be called before ``megatron.core`` is first imported.

    megatron-core decorates about forty small helpers with ``torch.compile`` while it is imported. On a CPU that means a
    C++ compiler run for each of them, for no gain at the sizes one trains there.
    """
    if has_cuda():
        # Megatron relies on one hardware queue to overlap communication in the order it was issued.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    dynamo_config: Any = sys.modules.get("torch._dynamo.config")
    if dynamo_config is not None:  # imported already, so it has read the variable
        dynamo_config.disable = os.environ["TORCH_COMPILE_DISABLE"] == "1"
