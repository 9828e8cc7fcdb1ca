"""From what the user names as prompt data to the files behind it."""

import collections
import dataclasses
import difflib
import glob
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from relax_data.errors import DataError
from relax_data.readers.address import HUB, split_hub_address
from relax_data.readers.open import READERS

logger = logging.getLogger(__name__)

SUFFIXES = tuple(READERS)
"""Ends of the names of the files that can be read."""
_SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>(-?[0-9]{1,18})?):(?P<stop>(-?[0-9]{1,18})?)\]$")


@dataclasses.dataclass(frozen=True)
class FileSlice:
    """One file, or one Hugging Face dataset, and which of its rows.

    Attributes:
        path: local path, or the address that begins with ``hf://``.
        start, stop: as in a Python slice over the rows; None is an open end, negative counts from the end.
    """

    path: str
    start: int | None = None
    stop: int | None = None

    @property
    def is_hub(self) -> bool:
        """Whether the path is an ``hf://`` address."""
        return self.path.startswith(HUB)

    @property
    def spelling(self) -> str:
        """The address as the user writes it: ``path``, or ``path@[start:stop]``."""
        if self.start is None and self.stop is None:
            return self.path
        start, stop = ("" if x is None else str(x) for x in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"

    def bounds(self, rows: int) -> tuple[int, int]:
        """First row and the row after the last one of a file that has ``rows`` rows."""
        start, stop, _ = slice(self.start, self.stop).indices(rows)
        return start, max(start, stop)


def resolve_files(specs: str | Iterable[str]) -> list[FileSlice]:
    """Expands files, folders, globs and slices, in the order given; folders and globs are sorted by name.

    Raises:
        DataError: a file is missing, empty or of an unknown kind, a folder or a glob holds no data file, an address
            of the hub or a slice is written wrong, a slice holds no row or stands behind several files, or the same
            file and slice is named twice.
    """
    found: list[FileSlice] = []
    for spec in [specs] if isinstance(specs, str) else list(specs):
        found.extend(_expand(spec))
    if not found:
        raise DataError("no prompt data is named: give a .jsonl or .parquet file, a folder or hf://OWNER/NAME")
    for file, times in collections.Counter(found).items():
        if times > 1:
            raise DataError(f"{file.path} is named {times} times: its prompts would be trained as often; name it once")
    return found


def warn_of_repeats(files: Sequence[FileSlice], counts: Sequence[int]) -> None:
    """Warns once, naming both, when rows of one file are read twice: under two spellings, or by slices that overlap.

    Args:
        files: as :func:`resolve_files` gives them.
        counts: number of rows of each.
    """
    slices: dict[object, list[tuple[int, int, str]]] = {}
    for file, count in zip(files, counts, strict=True):
        start, stop = file.bounds(count)
        slices.setdefault(_identity(file.path), []).append((start, stop, file.spelling))
    found = []
    for of_one_file in slices.values():
        of_one_file.sort()
        _, end, name = of_one_file[0]
        for start, stop, other in of_one_file[1:]:
            twice = min(end, stop) - start
            if twice > 0:
                found.append(f"{name} and {other} hold {twice} rows in common")
            if stop > end:
                end, name = stop, other
    if found:
        more = f" (and {len(found) - 3} more such pairs)" if len(found) > 3 else ""
        logger.warning(
            "prompt data: %s%s: their prompts are trained as often; name each row once", "; ".join(found[:3]), more
        )


def _identity(path: str) -> object:
    """The same for all spellings of a file: absolute, relative, through links; or of a dataset of the hub."""
    if path.startswith(HUB):
        name, options = split_hub_address(path)
        return name, tuple(sorted({"split": "train", **options}.items()))
    try:
        state = os.stat(path)
    except OSError:  # removed since it was read
        return path
    return state.st_dev, state.st_ino


def _expand(spec: str) -> Iterator[FileSlice]:
    path, start, stop = _split_slice(spec)
    if not path:
        raise DataError("an empty path: is a shell variable in it not set?")
    if path.startswith(HUB):
        split_hub_address(path)
        yield FileSlice(path, start, stop)
        return
    try:
        paths = _paths(path)
    except (OSError, RuntimeError) as error:
        # A name that is too long, a folder that may not be read, ~ of a user that there is not.
        raise DataError(f"{path[:200]} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(paths) > 1 and (start is not None or stop is not None):
        raise DataError(f"{spec} slices {len(paths)} files at once: put the slice behind each file")
    for p in paths:
        if p.stat().st_size == 0:
            raise DataError(f"{p} is empty")
        yield FileSlice(str(p), start, stop)


def _split_slice(spec: str) -> tuple[str, int | None, int | None]:
    match = _SLICE.match(spec)
    if match is None:
        if "@[" in spec:
            shown = spec if len(spec) <= 200 else spec[:200] + "..."
            raise DataError(f"{shown}: a slice is written FILE@[START:STOP], with numbers of rows")
        return spec, None, None
    start, stop = (int(x) if x else None for x in (match["start"], match["stop"]))
    if stop == 0 or (start is not None and stop is not None and start >= stop and (start < 0) == (stop < 0)):
        raise DataError(f"{spec[:200]}: the slice holds no row, STOP must lie behind START")
    return match["path"], start, stop


def _paths(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if _is_data(p) and not _hidden(p.relative_to(path)))
        if not files:
            raise DataError(f"the folder {text} holds no data file ({', '.join(SUFFIXES)})")
        return files
    if path.is_file():
        if not _is_data(path):
            raise DataError(f"{text}: unknown kind of file; known are {', '.join(SUFFIXES)}")
        return [path]
    if path.exists():
        raise DataError(
            f"{text} is no regular file (a pipe, socket or device): rows are read at any place and more than once, so "
            "write them to a file first"
        )
    if glob.has_magic(text):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if _is_data(p))
        if not files:
            raise DataError(f"no data file matches {text} ({', '.join(SUFFIXES)})")
        return files
    raise DataError(f"{text} does not exist" + _near_miss(path))


def _is_data(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and path.is_file()


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _near_miss(path: Path) -> str:
    """Names the nearest file that is there, when the folder exists: most missing files are misspelt ones."""
    if not path.parent.is_dir():
        return f" (nor does its folder {path.parent})"
    names = [p.name for p in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
