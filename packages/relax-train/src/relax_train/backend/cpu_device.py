"""Presents the CPU to megatron-core as its CUDA device. Imported only where CUDA is absent.

megatron-core itself runs unmodified. It asks for ``device="cuda"``, calls ``tensor.cuda()``, compares
``tensor.type()`` with ``"torch.cuda.FloatTensor"`` and uses a few functions of ``torch.cuda``; inside the shim these
mean the CPU, and outside everything is as it was. ``torch.cuda.is_available()`` stays False, and
``torch.cuda.Stream`` stays a class because other libraries annotate with it.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from relax_train.backend.device import has_cuda
from relax_train.backend.mcore import megatron_random, token_dispatcher

assert not has_cuda(), "the CPU shim has no place beside CUDA"

CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class CudaMeansCpu(TorchFunctionMode):
    """Rewrites the calls of torch that name CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_all_gather = dist.all_gather


def _all_gather_uneven(parts: list[torch.Tensor], mine: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``all_gather`` also of parts that differ in their first size, which gloo refuses: pads, gathers, cuts.

    Megatron's expert dispatcher asks for it when each rank has another number of tokens.
    """
    if len({part.shape for part in parts}) == 1:
        return _all_gather(parts, mine, *args, **kwargs)
    longest = max(part.size(0) for part in parts)
    padded = mine.new_zeros(longest, *mine.shape[1:])
    padded[: mine.size(0)] = mine
    gathered = [torch.empty_like(padded) for _ in parts]
    _all_gather(gathered, padded, *args, **kwargs)
    for part, whole in zip(parts, gathered, strict=True):
        part.copy_(whole[: part.size(0)])
    return None


class _NullStream:
    """Stands for a stream or an event where everything is synchronous."""

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_NullStream":
        return self

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _splits_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    # Megatron turns the all-to-all splits into numpy only when they are on CUDA; the collective needs numbers.
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_torch_product = torch.matmul
_onednn_linear: Callable[..., torch.Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _product(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """``torch.matmul``; of float32 matrices outside of autograd by oneDNN.

    torch takes MKL for them, which reaches about half of oneDNN's speed on AMD's processors with AVX-512. Megatron's
    linear layers, which are functions of autograd with a backward pass of their own, call it six times a layer.
    """
    matrices = a.dim() > 1 and b.dim() == 2 and a.dtype == b.dtype == torch.float32
    empty = not a.numel() or not b.numel()  # of an expert without tokens, which oneDNN refuses
    if not matrices or empty or options or torch.is_grad_enabled() or _onednn_linear is None:
        return _torch_product(a, b, **options)
    product = _onednn_linear(a.flatten(0, -2), b.t(), None, "none", [], "")
    # Not a view: what follows may write into it (megatron's cross entropy does), which autograd forbids for views here.
    return product.resize_(*a.shape[:-1], b.shape[1])


def _rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, what it is inside the shim): a short list, each entry needed by a feature we test."""
    null, cuda = _NullStream(), torch.cuda
    return [
        (cuda, "current_device", lambda: CPU),
        (cuda, "get_rng_state", _rng_state),
        (cuda.random, "get_rng_state", _rng_state),
        (cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(seed)),
        (cuda, "synchronize", lambda *_, **__: None),
        (cuda, "current_stream", lambda *_, **__: null),
        (cuda, "stream", lambda *_, **__: contextlib.nullcontext()),
        (torch, "matmul", _product),
        (torch.Tensor, "matmul", _product),
        (megatron_random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        # Mixture of experts only. A replacement, not a case of the mode, which is off during the backward pass.
        (dist, "all_gather", _all_gather_uneven),
        # The dispatcher would make a stream of its own.
        (token_dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", null),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _splits_as_numpy),
    ]


def _not_about_two_rngs(record: logging.LogRecord) -> bool:
    # Host and device generator are one here, so that megatron's warning about the host's has no meaning.
    return "CPU RNG state changed" not in record.getMessage()


class CpuShim:
    """Counts its entries; the first installs the replacements and the last takes them back."""

    def __init__(self) -> None:
        self._depth = 0
        self._saved: list[tuple[Any, str, Any]] = []
        self._mode: CudaMeansCpu | None = None
        self._replacements = _replacements()
        logging.getLogger(megatron_random.__name__).addFilter(_not_about_two_rngs)

    def enter(self) -> None:
        """Puts the replacements in place; may be nested."""
        self._depth += 1
        if self._depth > 1:
            return
        self._saved = [(owner, name, getattr(owner, name)) for owner, name, _ in self._replacements]
        for owner, name, value in self._replacements:
            setattr(owner, name, value)
        self._mode = CudaMeansCpu()
        self._mode.__enter__()

    def exit(self) -> None:
        """Takes the replacements away with the outermost :meth:`enter`."""
        assert self._mode is not None
        self._depth -= 1
        if self._depth:
            return
        self._mode.__exit__(None, None, None)
        self._mode = None
        for owner, name, value in self._saved:
            setattr(owner, name, value)


SHIM = CpuShim()
