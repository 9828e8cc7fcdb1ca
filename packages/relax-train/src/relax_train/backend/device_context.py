"""The context that backend code runs in: CUDA as it is, or the CPU presented to megatron-core as its device.

Every entry point of the backend runs inside ``with DeviceContext():``. With CUDA that does nothing; without CUDA it
installs the shim of :mod:`relax_train.backend.cpu_device`, which is imported only then.
"""

from types import TracebackType
from typing import Any

from relax_train.backend.device import has_cuda


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
