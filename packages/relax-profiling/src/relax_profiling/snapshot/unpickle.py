"""Loads torch's memory snapshots. A pickle can hold code; this loader runs none."""

import gzip
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

from relax_profiling.snapshot.opcodes import check_opcodes

# Snapshots compress to a tenth or a twentieth.
_MOST_UNPACKED = 200
_FEW_BYTES = 16 << 20


class NotASnapshot(ValueError):
    """The file holds no memory snapshot; the message names it and the reason."""


class _PlainDataUnpickler(pickle.Unpickler):
    """Builds numbers, text, lists, tuples and dictionaries. A snapshot needs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a memory snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def load_snapshot(path: Path) -> dict[str, Any]:
    """A snapshot as torch's ``_snapshot()`` returned it, from a pickle or a gzip file of one.

    Its opcodes are looked through first, so that reading costs memory and time in proportion to the file.

    Raises:
        NotASnapshot: for anything else, also for a pickle that would run code.
        OSError: when the file cannot be opened.
    """
    content = _content(path)
    if not content:
        raise NotASnapshot(f"{path}: the file is empty")
    try:
        check_opcodes(content)
        data = _PlainDataUnpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, ValueError) as e:
        raise NotASnapshot(f"{path}: not read, because {e}") from e
    except (EOFError, MemoryError, RecursionError) as e:
        raise NotASnapshot(f"{path}: cut off or damaged ({type(e).__name__})") from e
    except Exception as e:  # a damaged pickle may fail in any way that its opcodes can
        raise NotASnapshot(f"{path}: damaged ({type(e).__name__}: {e})") from e
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
        raise NotASnapshot(f"{path}: a pickle, but not of a memory snapshot (no segments)")
    if not isinstance(data.get("device_traces", []), list):
        raise NotASnapshot(f"{path}: a pickle, but not of a memory snapshot (device_traces is no list)")
    return data


def _content(path: Path) -> bytes:
    """The pickle in a file, unpacked."""
    packed = path.read_bytes()
    if packed[:2] != b"\x1f\x8b":
        return packed
    most = _FEW_BYTES + _MOST_UNPACKED * len(packed)
    content = bytearray()
    try:
        with gzip.open(io.BytesIO(packed)) as f:
            while len(content) <= most and (piece := f.read(1 << 20)):
                content += piece
    except (EOFError, OSError, zlib.error) as e:
        raise NotASnapshot(f"{path}: its compressed data is cut off or damaged ({e})") from e
    if len(content) > most:
        raise NotASnapshot(f"{path}: unpacks to more than {_MOST_UNPACKED} times its size, which no snapshot does")
    return bytes(content)
