"""Where the trainer computes: CUDA, or the CPU presented to megatron-core as its device.

Every entry point of the backend runs inside ``with DeviceContext():``. With CUDA that does nothing; without CUDA it
installs the shim of :mod:`relax_train.backend.cpu_device`, which is imported only then.
"""

import os
import sys
from types import TracebackType
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


class DeviceContext:
    """Context that backend code runs in; may be nested and entered again."""

    def __init__(self) -> None:
        self._shim: Any = None
        if not has_cuda():
            from relax_train.backend import cpu_device

            self._shim = cpu_device.SHIM

    def __enter__(self) -> "DeviceContext":
        if self._shim is not None:
            self._shim.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shim is not None:
            self._shim.exit()
