"""Files kept between runs: line indexes and unpacked copies, each tied to the file it was made from.

The folder is ``$RELAX_CACHE_DIR``, else ``$XDG_CACHE_HOME/relax``, else ``~/.cache/relax``. Everything in it can be
deleted at any time; a folder that cannot be written costs a new scan at each start.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from relax_data.errors import DataError

logger = logging.getLogger(__name__)

LINES_PER_ENTRY = 64
BYTES_PER_ENTRY = 1 << 20
_SCAN = 16 << 20
_END = 4096


def cache_dir() -> Path:
    """Folder of the cache; not created here."""
    if own := os.environ.get("RELAX_CACHE_DIR"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"


def fingerprint(path: str) -> dict[str, Any]:
    """Name, size in bytes and a hash of the first and last 4096 bytes."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(_END))
            file.seek(max(0, size - _END))
            digest.update(file.read(_END))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return {"name": os.path.basename(path), "size": size, "ends": digest.hexdigest()[:16]}


@dataclasses.dataclass(frozen=True)
class SparseIndex:
    """The offsets of every few lines of a file.

    Attributes:
        rows: int64 ``[k + 1]``, first row of each entry; the last one is the number of rows.
        offsets: int64 ``[k + 1]``, its byte offset; the last one is the size of the file.
    """

    rows: np.ndarray
    offsets: np.ndarray


def jsonl_index(path: str) -> SparseIndex:
    """The index of a file of lines, from the cache when the file has not changed since."""
    where = _cached(path, "index", ".npy")
    if where.exists():
        # numpy takes a damaged file for a zip or a pickle, and raises what these raise.
        with contextlib.suppress(OSError, ValueError, EOFError, zipfile.BadZipFile):
            rows, offsets = np.load(where)
            return SparseIndex(rows, offsets)
    index = _scan(path)
    # A full disk costs a new scan at each start, like a folder that cannot be written.
    with contextlib.suppress(OSError), _new_file(where) as file:
        if file is not None:
            np.save(file, np.stack([index.rows, index.offsets]))
    return index


def unpacked(path: str) -> str:
    """The file itself, or for ``.gz`` and ``.zst`` its unpacked copy in the cache, made once.

    Raises:
        DataError: the file is damaged, or the cache cannot be written.
    """
    if not path.endswith((".gz", ".zst")):
        return path
    where = _cached(path, "unpacked", ".jsonl")
    if where.exists():
        return str(where)
    logger.info("unpacking %s into %s", path, where)
    with _new_file(where) as target:
        if target is None:
            raise DataError(f"{path} must be unpacked, and {where.parent} cannot be written: set RELAX_CACHE_DIR")
        try:
            with _decompressor(path) as source:
                shutil.copyfileobj(source, target, 1 << 20)
        except Exception as error:
            # gzip, zlib and pyarrow have no common base class for damaged input.
            raise DataError(f"{path} cannot be unpacked: {error}") from error
    return str(where)


@contextlib.contextmanager
def _decompressor(path: str) -> Iterator[Any]:
    if path.endswith(".gz"):
        with gzip.open(path, "rb") as stream:
            yield stream
    else:
        import pyarrow as pa

        # Not the zstandard package: its reader takes a file that was cut off for one that ends there.
        with pa.OSFile(path) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
            yield stream


def _cached(path: str, kind: str, suffix: str) -> Path:
    """File in the cache that belongs to this state of ``path``: another size, time or content has another name."""
    absolute = os.path.realpath(path)
    key = [absolute, os.stat(absolute).st_mtime_ns, fingerprint(path)]
    return cache_dir() / kind / (hashlib.sha256(repr(key).encode()).hexdigest()[:32] + suffix)


@contextlib.contextmanager
def _new_file(where: Path) -> Iterator[IO[bytes] | None]:
    """A file that appears under its name only when it is whole; None where the folder cannot be written."""
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where.parent)
    except OSError:
        yield None
        return
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, where)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _scan(path: str) -> SparseIndex:
    """Reads the file once, in pieces, and notes every ``LINES_PER_ENTRY``-th line or the first after a megabyte."""
    rows, offsets = [0], [0]
    line, base, last = 0, 0, b""
    with open(path, "rb", buffering=0) as file:
        while data := file.read(_SCAN):
            ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
            i = 0
            while i < len(ends):
                # The next entry: LINES_PER_ENTRY lines after the last one, or earlier when they are long.
                i_lines = rows[-1] + LINES_PER_ENTRY - line - 1
                i_bytes = int(np.searchsorted(ends, offsets[-1] + BYTES_PER_ENTRY - base - 1))
                i = max(i, min(i_lines, i_bytes))
                if i >= len(ends):
                    break
                rows.append(line + i + 1)
                offsets.append(base + int(ends[i]) + 1)
                i += 1
            line += len(ends)
            base += len(data)
            last = data[-1:]
    if last not in (b"\n", b""):
        line += 1
    if line > rows[-1]:
        rows.append(line)
        offsets.append(base)
    return SparseIndex(np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64))
