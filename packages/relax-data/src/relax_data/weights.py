"""A bucket of weights, as the trainer exports them and engines load them. Needs no torch."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Some whole tensors of a model, one after the other in one flat tensor.

    Attributes:
        names: Hugging Face names of the tensors, in the order in which they lie.
        shapes: the shape of each.
        dtype: of all of them, as torch calls it: ``bfloat16``, ``float32``.
        flat: torch tensor ``[elements of all]`` of that dtype, contiguous, without gaps. Whoever takes the bucket may
            keep it; the tensors of :meth:`items` are views of it and keep it alive.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    flat: Any

    def __post_init__(self) -> None:
        """Checks that the flat tensor holds just these tensors.

        Raises:
            ValueError: there is no tensor, a name without a shape or there twice, or the flat tensor has another size
                or dtype, or gaps.
        """
        if not self.names:
            raise ValueError("an empty bucket of weights; leave it out")
        if len(self.names) != len(self.shapes):
            raise ValueError(f"a bucket of weights with {len(self.names)} names but {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise ValueError(f"a bucket of weights holds {', '.join(twice)} twice")
        if str(self.flat.dtype).removeprefix("torch.") != self.dtype:
            raise ValueError(f"a bucket of weights is said to be {self.dtype}, but its tensor is {self.flat.dtype}")
        if tuple(self.flat.shape) != (sum(self.numels),) or not self.flat.is_contiguous():
            raise ValueError(
                f"the tensors of a bucket of weights have {sum(self.numels)} elements, but its flat tensor has the "
                f"shape {tuple(self.flat.shape)} and strides {self.flat.stride()}; it must be one-dimensional and "
                "without gaps"
            )

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Any]]) -> "Bucket":
        """Copies named torch tensors, of any strides, into a new bucket.

        Raises:
            ValueError: there are none, or they differ in dtype or device.
        """
        named = [(name, tensor.detach()) for name, tensor in tensors]
        if not named:
            raise ValueError("an empty bucket of weights; leave it out")
        for what in ("dtype", "device"):
            values = {str(getattr(tensor, what)) for _, tensor in named}
            if len(values) > 1:
                raise ValueError(f"a bucket of weights has one {what}, not {sorted(values)}; make one bucket for each")
        first = named[0][1]
        bucket = cls(
            names=tuple(name for name, _ in named),
            shapes=tuple(tuple(tensor.shape) for _, tensor in named),
            dtype=str(first.dtype).removeprefix("torch."),
            flat=first.new_empty(sum(tensor.numel() for _, tensor in named)),
        )
        for (_, view), (_, tensor) in zip(bucket.items(), named, strict=True):
            view.copy_(tensor)
        return bucket

    @classmethod
    def split(cls, tensors: Iterable[tuple[str, Any]], max_bytes: int) -> "Iterator[Bucket]":
        """Buckets of tensors that are at hand, in their order, each of at most ``max_bytes``; a larger tensor alone.

        Args:
            tensors: names and tensors, all of one dtype.
        """
        part: list[tuple[str, Any]] = []
        size = 0
        for name, tensor in tensors:
            if part and size + tensor.nbytes > max_bytes:
                yield cls.of(part)
                part, size = [], 0
            part.append((name, tensor))
            size += tensor.nbytes
        yield cls.of(part)

    @property
    def numels(self) -> list[int]:
        """Number of elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def offsets(self) -> list[int]:
        """Element of the flat tensor at which each tensor begins."""
        return [0, *itertools.accumulate(self.numels)][:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return int(self.flat.numel() * self.flat.element_size())

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.names)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Name and tensor of each, in order; the tensors are views of the flat one."""
        for name, shape, start, numel in zip(self.names, self.shapes, self.offsets, self.numels, strict=True):
            yield name, self.flat[start : start + numel].view(shape)
