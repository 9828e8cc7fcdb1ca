"""Gives the device's memory to the inference engine between training steps, and takes it back.

Weights, master weights and optimizer moments go to pinned host memory; gradients are dropped, since the next step
begins by clearing them. It works on storages, not on tensors: a storage is emptied and later filled again in place, so
every view of it (parameters inside megatron's flat buffers, the optimizer's shards of them) stays valid.

Copies run beside the computation (:mod:`relax_train.backend.copy_stream`), one after another in one stream::

    compute   ... step | halves, push          |     engine     | forward, backward ...           | step
    copies             |[out: all]             |                |[in: weights][in: optimizer]     |
    host               begin_sleep        sleep: waits for    wake: the forward pass follows    wait: the step follows
                                          both, then frees    the weights alone                 the optimizer

Why nothing is lost: a copy out begins after the computation that wrote what it reads, and reads only, as the push does;
memory is freed after the host has waited for both. A copy in begins after the computation that used the memory before;
computation waits for copies in by a mark: for those of the weights on :meth:`Offload.wake`, for those of
the optimizer on :meth:`Offload.wait`. A copy out that comes later stands behind the copy in, in the same stream.

A master weight leaves as the half that its parameter does not tell (:mod:`relax_train.backend.remainders`). The half is
made in the memory of its gradient while the moments leave. The other half is taken from the parameters before
computation gets them back, since it may change them for a while: a reference model takes their place.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator

import torch

from relax_train.backend.copy_stream import Mark, copy_stream
from relax_train.backend.host_memory import HostMemory, Place
from relax_train.backend.optimizer import Optimizer
from relax_train.backend.remainders import Remainder, remainder
from relax_train.backend.room import room_beside
from relax_train.models.build import Model

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Part:
    """A storage that is kept over a sleep.

    Attributes:
        places: where its bytes are on the host.
        early: the forward pass needs it.
        stays: it is left on the device.
        remainder: what leaves in its place.
    """

    storage: torch.UntypedStorage
    size: int
    places: list[Place]
    early: bool
    stays: bool = False
    remainder: Remainder | None = None

    @property
    def leaving(self) -> int:
        """Bytes that leave the device."""
        return 0 if self.stays else self.size if self.remainder is None else self.remainder.low.nbytes


class Offload:
    """The device memory of one model and its optimizer.

    Args:
        model: trainable.
        optimizer: of that model.
        host: memory that was begun before; it is closed with this object.

    Attributes:
        room: bytes that may stay on the device during a sleep; it counts from the next change of the weights on.
    """

    def __init__(self, model: Model, optimizer: Optimizer, host: HostMemory | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = model.parallel.device
        self._host = HostMemory(pinned=self._device.type == "cuda") if host is None else host
        if self._device.type == "cuda":
            self._host.pin(self._device)
        self._copies = copy_stream(self._device)
        self._parts: list[_Part] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._current = False  # the host has, or gets, what the device has
        self._out: Mark | None = None
        self._in: Mark | None = None
        self.asleep = False
        """Whether the memory is given away; nothing of the model may be touched then."""
        self.room = 0
        self._measured = False

    def prepare(self) -> None:
        """Begins to make the host's memory, in the background."""
        self._host.places([storage.nbytes() for storage, _ in self._kept()])

    @property
    def prepared(self) -> bool:
        """Whether the memory of the host is there, so that :meth:`begin_sleep` does not wait for it."""
        return self._host.size > 0 and self._host.ready

    # ------------------------------------------------------------------ out

    def changed(self) -> None:
        """To be called before weights or optimizer change: what the host has is of no use then."""
        assert not self.asleep
        if self._out is not None:
            self._out.block_compute()  # nothing may change under a copy
            self._out = None
        self._current = False

    def begin_sleep(self) -> None:
        """Begins to copy out what :meth:`sleep` will free; until then it may be read, and :meth:`changed` undoes it.

        Gradients are lost at once.
        """
        if self.asleep or self._current:
            return
        self.wait()
        kept = self._kept()
        places = self._host.places([storage.nbytes() for storage, _ in kept])
        self._parts = [
            _Part(storage, storage.nbytes(), where, early) for (storage, early), where in zip(kept, places, strict=True)
        ]
        left = self.room
        for part in self._parts:
            part.stays = part.size <= left
            left -= part.size if part.stays else 0
        masters = {
            shard.tensors["master"].data_ptr(): shard for shard in self._optimizer.shards() if "master" in shard.tensors
        }
        gone = [part for part in self._parts if not part.stays]
        self._copy_out([part for part in gone if part.storage.data_ptr() not in masters])
        for part in gone:
            if (shard := masters.get(part.storage.data_ptr())) is not None:
                part.remainder = remainder(shard)
                self._copy_out([part])
        self._out, self._current = self._copies.mark(), True

    def _copy_out(self, parts: list[_Part]) -> None:
        """Copies, after what has been computed."""
        self._copies.follow()
        for part in parts:
            whole = _bytes_of(part.storage, self._device) if part.remainder is None else part.remainder.low
            for start, length, host in self._pieces(part):
                self._copies.copy(host, whole.view(torch.uint8)[start : start + length])

    def _pieces(self, part: _Part) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Of what leaves: beginning and length of each piece, and its memory on the host."""
        for start, length, chunk, offset in part.places:
            if (length := min(length, part.leaving - start)) > 0:
                yield start, length, self._host.view((start, length, chunk, offset))

    def sleep(self) -> None:
        """Frees the memory, when all of it has been copied; harmless when it is free already."""
        if self.asleep:
            return
        start = time.perf_counter()
        self._optimizer.megatron.zero_grad()  # the shards' own gradients
        if not self.prepared:
            self.prepare()
        self.begin_sleep()
        self._dropped = [(storage, storage.nbytes()) for storage in self._gradients().values()]
        if self._out is not None:
            self._out.wait()
            self._send_whole()
            self._out = None
        if self._in is not None:  # nothing has waited for it: no step was taken
            self._in.wait()
            self._in = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for part in self._parts:
            if not part.stays:
                part.storage.resize_(0)
        for storage, _ in self._dropped:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.asleep = True
        log.debug("asleep after %.2f s, %.1f GiB stay", time.perf_counter() - start, self.resident / 2**30)

    def _send_whole(self) -> None:
        """Copies out the master weights that would not come back from their remainder."""
        halved = [(part, part.remainder.overflow) for part in self._parts if part.remainder is not None]
        if not halved:
            return
        full = torch.stack([overflow for _, overflow in halved]).tolist()
        again = [part for (part, _), overflow in zip(halved, full, strict=True) if overflow]
        for part in again:
            part.remainder = None
        self._copy_out(again)
        self._copies.mark().wait()
        log.debug("%d of %d master weights leave as a half", len(halved) - len(again), len(halved))

    def measure_room(self) -> None:
        """Sets ``room`` by what is free now, while the engine has all it uses; over a run it only shrinks.

        The weights are the first to stay, since the forward pass waits for them; the master weights are the last, since
        they move at half their size.
        """
        assert self.asleep
        free, total = torch.cuda.mem_get_info(self._device)
        room = room_beside(free, self.resident, total)
        self.room = min(self.room, room) if self._measured else room
        if not self._measured:
            kept = sum(part.size for part in self._parts)
            log.info(
                "%.1f GiB of the GPU are free beside the engine: of %.1f GiB of weights and optimizer %.1f stay there",
                *(size / 2**30 for size in (free, kept, min(kept, self.room))),
            )
        self._measured = True

    @property
    def resident(self) -> int:
        """Bytes that stay on the device while it sleeps."""
        return sum(part.size for part in self._parts if part.stays)

    @property
    def leaving(self) -> int:
        """Bytes that leave the device in a sleep, and come back."""
        return sum(part.leaving for part in self._parts)

    def free_resident(self) -> None:
        """Frees also what has stayed, for an engine that starts anew; until the next :meth:`wake`."""
        assert self.asleep
        staying = [part for part in self._parts if part.stays]
        for part in staying:
            part.stays = False
        self._copy_out(staying)
        self._copies.mark().wait()
        for part in staying:
            part.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ in

    def wake(self) -> None:
        """Takes the memory back and fills it with what was there; gradients are zero. Harmless when awake.

        The weights may be used at once, the optimizer after :meth:`wait`.
        """
        if not self.asleep:
            return
        gone = [part for part in self._parts if not part.stays]
        for storage, size in [*((part.storage, part.size) for part in gone), *self._dropped]:
            storage.resize_(size)
        self._copies.follow()  # whoever had the memory before
        for part in gone:
            if part.early:
                self._copy_in(part)
        for part in gone:
            if part.remainder is not None:
                self._copies.run(part.remainder.begin)
        self._copies.mark().block_compute()
        for part in gone:
            if not part.early:
                self._copy_in(part)
        self._in = self._copies.mark()
        for storage, _ in self._dropped:
            _bytes_of(storage, self._device).zero_()
        self._dropped = []
        self.asleep = False

    def _copy_in(self, part: _Part) -> None:
        """Copies what left back to its place."""
        for start, length, host in self._pieces(part):
            if part.remainder is None:
                self._copies.copy(_bytes_of(part.storage, self._device)[start : start + length], host)
            else:
                low = host.view(torch.int16)
                self._copies.run(functools.partial(part.remainder.add, start // low.itemsize, low))
        if part.remainder is not None:
            self._copies.run(part.remainder.finish)

    def wait(self) -> None:
        """Lets what is computed from now on begin when moments and master weights are back."""
        if self._in is not None:
            self._in.block_compute()
            self._in = None

    def close(self) -> None:
        """Gives the host's memory back, when no copy is under way any more. Nothing may be called after it."""
        self._copies.close()
        self._host.close()

    # ------------------------------------------------------------------ what there is

    def _gradients(self) -> dict[int, torch.UntypedStorage]:
        return _storages(self._gradient_tensors(), self._device)

    def _kept(self) -> list[tuple[torch.UntypedStorage, bool]]:
        """The storages to keep, each once, with whether the forward pass needs it: those come first."""
        gradients = self._gradients()
        early = _storages(self._weight_tensors(), self._device)
        late = _storages(self._optimizer_tensors(), self._device)
        found = [(key, storage, True) for key, storage in early.items()]
        found += [(key, storage, False) for key, storage in late.items() if key not in early]
        return [(storage, is_early) for key, storage, is_early in found if key not in gradients]

    def _gradient_tensors(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data

    def _weight_tensors(self) -> Iterator[torch.Tensor]:
        for gpt in self._model.gpt:
            for parameter in gpt.parameters():
                yield parameter.data

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for part in self._optimizer.parts:
            for state in part.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        yield value
        for group in self._optimizer.megatron.param_groups:
            for parameter in group["params"]:
                yield parameter.data


def _storages(tensors: Iterator[torch.Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages of ``tensors`` on ``device``, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.device == device and storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return found


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """uint8 view of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
