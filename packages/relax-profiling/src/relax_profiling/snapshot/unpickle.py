"""Loads torch's memory snapshots. A pickle can hold code; this loader runs none."""

import pickle
from pathlib import Path
from typing import Any


class NotASnapshot(ValueError):
    """The file holds no memory snapshot; the message names it and the reason."""


class _PlainDataUnpickler(pickle.Unpickler):
    """Builds numbers, text, lists, tuples and dictionaries. A snapshot needs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; a memory snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def load_snapshot(path: Path) -> dict[str, Any]:
    """A snapshot as torch's ``_snapshot()`` returned it.

    Raises:
        NotASnapshot: for anything else, also for a pickle that would run code.
        OSError: when the file cannot be opened.
    """
    with path.open("rb") as f:
        if not f.peek(1):
            raise NotASnapshot(f"{path}: the file is empty")
        try:
            data = _PlainDataUnpickler(f).load()
        except pickle.UnpicklingError as e:
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
