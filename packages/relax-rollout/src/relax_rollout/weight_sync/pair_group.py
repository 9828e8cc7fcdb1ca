"""The trainer's end of a process group with one engine: rank 0, and the engine's ranks after it.

It is built from torch's backends themselves: torch's own ``new_group`` meets only processes of one world, which trainer
and engine are not. The keys under which SGLang's side (``init_custom_process_group``) looks for the others in the
store are the group's name twice and the device; torch 2.11 and SGLang 0.5.17 agree on them.
"""

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from relax_rollout.engines.base import PairGroupAddress

NCCL_ENVIRONMENT: Mapping[str, str] = MappingProxyType({"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"})
"""What SGLang sets for its processes. The trainer's have to have the same before they use NCCL at all: with the first
on one side only, every broadcast fails there with "invalid argument" while the other side waits."""

_ABORT_POLL_S = 0.02


def set_nccl_environment() -> None:
    """Sets :data:`NCCL_ENVIRONMENT` for this process; NCCL reads it once, when it is used first."""
    os.environ.update(NCCL_ENVIRONMENT)


class PairGroup:
    """Rank 0 of a process group with one engine. Calls that may block are meant for a thread of their own."""

    def __init__(self, name: str, *, host: str, engine_ranks: int, device: str, deadline_s: float) -> None:
        """Opens the place where the members meet; nobody is waited for yet.

        Args:
            name: of the group; never that of an earlier one.
            host: address of this machine that the engine reaches. Nothing listens on another one.
            engine_ranks: number of the engine's ranks.
            device: ``cuda`` takes NCCL, ``cpu`` gloo.
            deadline_s: longest time of joining, and of one broadcast over gloo.
        """
        self._timeout = datetime.timedelta(seconds=deadline_s)
        self._host, self._nccl = host, device == "cuda"
        # torch's own listener would accept connections from everywhere.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        size = 1 + engine_ranks
        self.address = PairGroupAddress(
            name=name, host=host, port=port, size=size, backend="nccl" if self._nccl else "gloo"
        )
        self._store = dist.TCPStore(
            host,
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=listener.detach(),
        )
        self._backend: Any = None
        self._work: Any = None

    def join(self) -> None:
        """Meets the engine's ranks; with NCCL that happens in the first broadcast.

        Raises:
            RuntimeError: they did not come in time.
        """
        name, device = self.address.name, "cuda" if self._nccl else "cpu"
        store = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store)))
        if self._nccl:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            # By default torch ends the whole process when a broadcast fails; an engine may die without that.
            with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
                self._backend = dist.ProcessGroupNCCL(store, 0, self.address.size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._timeout
        self._backend = gloo(store, 0, self.address.size, options)

    def broadcast(self, flat: torch.Tensor, stream: "torch.cuda.Stream | None" = None) -> None:
        """Starts to send the bytes of a tensor, which must stay as they are until :meth:`sent`.

        Args:
            flat: contiguous, on this rank's device.
            stream: the one on which its values are computed.
        """
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
        with contextlib.ExitStack() as stack:
            if flat.is_cuda:
                stack.enter_context(torch.cuda.device(flat.device))
                stack.enter_context(torch.cuda.stream(stream))
            self._work = self._backend.broadcast([flat.view(torch.uint8)], options)

    def sent(self) -> bool:
        """True when the last broadcast has ended and was good.

        Raises:
            RuntimeError: it has failed.
        """
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises what gloo met; lets go of the tensor
        if self._nccl and (error := self._backend.get_error()).name != "SUCCESS":
            raise RuntimeError(f"NCCL says {error.name}")
        self._work = None
        return True

    def abort(self) -> None:
        """Ends what runs, and the group; blocks for a while when something is stuck.

        Gloo cannot be interrupted: a broadcast that is stuck ends when the engine leaves or dies, or at the deadline.
        """
        backend, work, self._backend, self._work = self._backend, self._work, None, None
        if backend is None:
            return
        if self._nccl:
            backend.abort()
            return
        # Letting go of the backend would wait too, and hold all of Python meanwhile.
        while work is not None and not work.is_completed():
            time.sleep(_ABORT_POLL_S)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
