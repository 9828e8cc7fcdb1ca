"""Gives the device's memory to the inference engine between training steps, and takes it back.

Weights, master weights and optimizer moments go to pinned host memory; gradients are dropped, since the next step
begins by clearing them. It works on storages, not on tensors: a storage is emptied and later filled again in place, so
every view of it (parameters inside megatron's flat buffers, the optimizer's shards of them) stays valid.
"""

from collections.abc import Iterator

import torch

from relax_train.backend.optimizer import Optimizer
from relax_train.models.build import Model

PIECE = 256 << 20
"""Bytes of one pinned allocation: torch rounds those up to a power of two, which wastes up to half of a big one."""


class Offload:
    """The device memory of one model and its optimizer.

    Args:
        model: trainable.
        optimizer: of that model.
    """

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._kept: list[tuple[torch.UntypedStorage, int]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._host: list[torch.Tensor] = []  # reused from one sleep to the next

    @property
    def asleep(self) -> bool:
        """Whether the memory is given away; nothing of the model may be touched then."""
        return bool(self._kept)

    def sleep(self) -> None:
        """Frees the memory; harmless when it is free already."""
        if self.asleep:
            return
        self._optimizer.megatron.zero_grad()  # the shards' own gradients
        device = self._model.parallel.device
        gradients = _storages(self._gradient_tensors(), device)
        kept = _storages(self._state_tensors(), device)
        for key in gradients:
            kept.pop(key, None)
        self._kept = [(storage, storage.nbytes()) for storage in kept.values()]
        self._dropped = [(storage, storage.nbytes()) for storage in gradients.values()]
        for piece, host in self._pieces(device):
            host.copy_(piece, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        for storage, _ in [*self._kept, *self._dropped]:
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Takes the memory back and fills it with what was there; gradients are zero. Harmless when awake."""
        if not self.asleep:
            return
        device = self._model.parallel.device
        for storage, size in [*self._kept, *self._dropped]:
            storage.resize_(size)
        for piece, host in self._pieces(device):
            piece.copy_(host, non_blocking=True)
        for storage, size in self._dropped:
            _bytes_of(storage, 0, size, device).zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._kept, self._dropped = [], []

    def _pieces(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of what is kept, each with its place on the host, as bytes."""
        number = 0
        for storage, size in self._kept:
            for start in range(0, size, PIECE):
                length = min(PIECE, size - start)
                if number == len(self._host):
                    self._host.append(torch.empty(length, dtype=torch.uint8, pin_memory=device.type == "cuda"))
                elif len(self._host[number]) < length:
                    self._host[number] = torch.empty(length, dtype=torch.uint8, pin_memory=device.type == "cuda")
                yield _bytes_of(storage, start, length, device), self._host[number][:length]
                number += 1

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data

    def _state_tensors(self) -> Iterator[torch.Tensor]:
        for gpt in self._model.gpt:
            for parameter in gpt.parameters():
                yield parameter.data
        for group in self._optimizer.megatron.param_groups:
            for parameter in group["params"]:
                yield parameter.data
        for part in self._optimizer.parts:
            for state in part.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        yield value


def _storages(tensors: Iterator[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages of ``tensors`` on ``device``, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device == device and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return found


def _bytes_of(storage: torch.UntypedStorage, start: int, length: int, device: torch.device) -> torch.Tensor:
    """uint8 view of a part of a storage."""
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, start, (length,), (1,))
