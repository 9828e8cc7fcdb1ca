"""Reading the pickles of a checkpoint without running code from them: only what we and torch write is let in.

torch's sharded checkpoints are pickles in three places: the index ``.metadata``, which torch reads with plain
``pickle``; objects inside of the shards, which it reads with ``weights_only=False``; and small files. A pickle can name
any function and have it called, so a checkpoint from a stranger would be a program.
"""

import contextlib
import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX_CLASSES = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
    ("pathlib._local", "WindowsPath"),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES:
            return getattr(importlib.import_module(module.removesuffix("._local")), name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint holds")


def read_index(file: Path) -> Any:
    """The index of a sharded checkpoint, a ``torch.distributed.checkpoint.metadata.Metadata``.

    What it accepts, torch's own reader may read too.

    Raises:
        pickle.UnpicklingError: it is damaged, or names something else than an index does. Unpickling raises other
            errors as well.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    with file.open("rb") as opened:
        index = _IndexUnpickler(opened).load()
    if not isinstance(index, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
    return index


@contextlib.contextmanager
def data_only() -> Iterator[None]:
    """Lets ``torch.load`` read tensors, numbers, texts, lists and dicts alone, also where its caller asks for all.

    An environment variable is the only way to reach the calls inside of torch.
    """
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_numpy_arrays()):
            yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def _numpy_arrays() -> list[Any]:
    """Names that the pickle of an array of integers holds: numpy's random state is one."""
    array = np.zeros(1, np.uint32)
    return [array.__reduce__()[0], np.ndarray, np.dtype, type(array.dtype)]
