"""Server options on a GPU, by what is installed beside SGLang. Nothing of it is imported to find out."""

import importlib.util
from pathlib import Path
from typing import Any

KERNEL_FREE_OPTIONS: dict[str, Any] = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    # A vision tower has an attention of its own, which on Hopper and Blackwell would take the missing kernels.
    "mm-attention-backend": "triton_attn",
    # Prefill graphs need the kernels that are missing; decode graphs do not.
    "cuda-graph-backend-prefill": "disabled",
}
"""Backends that need Triton only."""


def kernels_installed() -> bool:
    """True when the packages of the ``gpu`` extra that SGLang's own default backends need are there."""
    if importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("xgrammar") is None:
        return False
    spec = importlib.util.find_spec("sgl_kernel")
    folders = spec.submodule_search_locations if spec is not None else None
    # The flash-attention library is a file of its own in the kernel package; slim builds leave it out.
    return any(next(Path(folder).glob("**/flash_ops*.so"), None) is not None for folder in folders or ())


def options() -> dict[str, Any]:
    """SGLang's own defaults when its kernels are installed, else backends that need none."""
    return {} if kernels_installed() else dict(KERNEL_FREE_OPTIONS)
