"""The reference model of the KL terms: a second set of weights in host memory, for the one model on the device."""

import contextlib
from collections.abc import Iterator

import torch

from relax_train.models.build import Model


class ReferenceWeights:
    """Weights that can take the place of the model's for a while.

    They cost host memory for one more set of this rank's parameters and nothing on the device: putting them in
    exchanges the two sets tensor by tensor, so that the host then holds the policy's. That is two copies of the
    weights over the host link for each use, a fraction of a second where a second model would take gigabytes.
    """

    def __init__(self, model: Model) -> None:
        """Copies the weights that ``model`` has now."""
        self._model = model
        self._stored: list[torch.Tensor] = []
        with torch.no_grad():
            for parameter in self._parameters():
                copy = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
                self._stored.append(copy.copy_(parameter.detach()))

    @contextlib.contextmanager
    def put_in(self) -> Iterator[None]:
        """The model has the reference weights inside; afterwards its own ones again, bit for bit, also on errors."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, stored in zip(self._parameters(), self._stored, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(stored)
            stored.copy_(current)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for gpt in self._model.gpt:
            yield from gpt.parameters()
