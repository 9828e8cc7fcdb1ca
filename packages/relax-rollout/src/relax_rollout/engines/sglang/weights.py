"""A bucket as SGLang takes it, in its ``flattened_bucket`` format: inside a request, or described for a broadcast.

``/update_weights_from_tensor`` wants it pickled, base64, in JSON.

The pickle is kept in pieces and encoded while it is sent: beside the bucket there is one copy of it, not one for each
of these steps.
"""

import base64
import json
import pickle
import types
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch
from relax_data.weights import Bucket

from relax_rollout.engines.base import IpcHandle

# Position of the device in the arguments that rebuild a CUDA tensor (torch.multiprocessing.reductions). SGLang wants
# the UUID of the GPU there instead of its number, which differs between processes.
_DEVICE_ARGUMENT = 6
_MARK = "%"
_CHUNK = 3 << 16  # bytes that are encoded at a time


class UpdateBody:
    """The JSON body of one request, for :class:`relax_rollout.engines.sglang.transport.StreamedBody`."""

    def __init__(self, pickles: list[list[bytes]]) -> None:
        """Takes the pickle for each tensor-parallel rank, in pieces."""
        text = json.dumps(
            {"serialized_named_tensors": [_MARK], "load_format": "flattened_bucket", "flush_cache": False}
        )
        self._head, self._tail = text.encode().split(_MARK.encode())
        self._pickles = pickles
        sizes = [4 * -(-sum(map(len, pieces)) // 3) for pieces in pickles]
        self._length = len(self._head) + sum(sizes) + len('", "') * (len(sizes) - 1) + len(self._tail)

    def __len__(self) -> int:
        """Bytes of the body."""
        return self._length

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """The body in chunks."""
        yield self._head
        for i, pieces in enumerate(self._pickles):
            if i:
                yield b'", "'
            for chunk in _base64(pieces):
                yield chunk
        yield self._tail

    def clear(self) -> None:
        """Lets go of the weights, whoever still holds the request or was interrupted while sending it.

        httpx ties request and response into a cycle, which would live until the garbage collector runs.
        """
        for pieces in self._pickles:
            pieces.clear()


def update_body(bucket: Bucket, handles: Sequence[IpcHandle] | None) -> UpdateBody:
    """Serializes a bucket, by value or as one handle for each tensor-parallel rank of the engine.

    Raises:
        ValueError: the values of a bucket on a GPU are asked for.
    """
    if handles is None and bucket.flat.device.type != "cpu":
        raise ValueError(f"a bucket on {bucket.flat.device} travels by handles; by value it has to lie on the CPU")
    metadata = _metadata(bucket)
    flats = [bucket.flat.view(torch.uint8)] if handles is None else list(handles)
    return UpdateBody([_pickled({"flattened_tensor": flat, "metadata": metadata}) for flat in flats])


def group_update_body(bucket: Bucket, group: str) -> dict[str, Any]:
    """The JSON of ``/update_weights_from_distributed``: what the broadcast in this group will bring.

    The server lays the tensors one after the other without gaps, as a bucket does.
    """
    return {
        "names": list(bucket.names),
        "dtypes": [bucket.dtype] * len(bucket),
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": group,
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
    }


def _metadata(bucket: Bucket) -> list[types.SimpleNamespace]:
    """Lists where each tensor lies, with attributes as SGLang reads them; its ``numel`` counts bytes."""
    dtype, size = getattr(torch, bucket.dtype), bucket.flat.element_size()
    places = zip(bucket.names, bucket.shapes, bucket.offsets, bucket.numels, strict=True)
    return [
        types.SimpleNamespace(
            name=name,
            shape=torch.Size(shape),
            dtype=dtype,
            start_idx=start * size,
            end_idx=(start + numel) * size,
            numel=numel * size,
        )
        for name, shape, start, numel in places
    ]


def _pickled(value: Any) -> list[bytes]:
    """A pickle that SGLang's restricted unpickler accepts, in pieces: the values of a tensor are one of them."""
    pieces = _Pieces()
    _Pickler(pieces, protocol=5).dump(value)
    return pieces.kept


class _Pieces:
    """A file that keeps what is written as it is, so that large values are not copied once more."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def write(self, piece: bytes | memoryview) -> int:
        self.kept.append(piece if isinstance(piece, bytes) else bytes(piece))
        return len(self.kept[-1])


class _Pickler(pickle.Pickler):
    """Pickles a handle as the tensor that it becomes in the engine."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, IpcHandle):
            return NotImplemented
        before, after = obj.arguments[:_DEVICE_ARGUMENT], obj.arguments[_DEVICE_ARGUMENT + 1 :]
        return obj.rebuild, (*before, obj.gpu, *after)


def _base64(pieces: list[bytes]) -> Iterator[bytes]:
    """Base64 of the pieces as if they were one. It holds none of them while it waits: see :meth:`UpdateBody.clear`."""
    rest = b""
    for index, size in enumerate([len(piece) for piece in pieces]):
        for start in range(0, size, _CHUNK):
            chunk = rest + memoryview(pieces[index])[start : start + _CHUNK]
            whole = len(chunk) // 3 * 3
            rest = chunk[whole:]
            yield base64.b64encode(chunk[:whole])
    yield base64.b64encode(rest)
