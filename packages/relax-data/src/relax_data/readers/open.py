"""The file readers: which one opens a file, by the end of its name.

A new kind of file is one function here and one line for each of its suffixes in :data:`READERS`: prompt data, folders
and globs then take it, and messages name it. The libraries that read a file are imported when one is opened.
"""

from collections.abc import Callable

from relax_data.errors import DataError
from relax_data.readers.address import HUB
from relax_data.readers.base import RowFile


def _jsonl(path: str) -> RowFile:
    from relax_data.readers.jsonl import JsonlRows

    return JsonlRows(path)


def _parquet(path: str) -> RowFile:
    from relax_data.readers.parquet import ParquetRows

    return ParquetRows(path)


def _hub(path: str) -> RowFile:
    from relax_data.readers.hub import HubRows

    return HubRows(path)


READERS: dict[str, Callable[[str], RowFile]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".jsonl.gz": _jsonl,
    ".ndjson.gz": _jsonl,
    ".jsonl.zst": _jsonl,
    ".ndjson.zst": _jsonl,
    ".parquet": _parquet,
}
"""By the end of a file's name: what opens it. A reader raises :class:`DataError` when the file cannot be read."""


def open_rows(path: str) -> RowFile:
    """Opens a file by its suffix, or a dataset by its ``hf://`` address.

    Raises:
        DataError: it cannot be read, or its name ends in none of :data:`READERS`.
    """
    if path.startswith(HUB):
        return _hub(path)
    endings = [suffix for suffix in READERS if path.endswith(suffix)]
    if not endings:
        raise DataError(f"{path}: unknown kind of file; known are {', '.join(READERS)}")
    return READERS[max(endings, key=len)](path)
