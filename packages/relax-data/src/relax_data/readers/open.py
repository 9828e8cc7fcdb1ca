"""Opens a file of rows with the reader that its name asks for."""

from relax_data.readers.base import RowFile
from relax_data.readers.jsonl import JsonlRows


def open_rows(path: str) -> RowFile:
    """Opens a file by its suffix, or a dataset by its ``hf://`` address.

    Raises:
        DataError: it cannot be read.
    """
    if path.startswith("hf://"):
        from relax_data.readers.hub import HubRows

        return HubRows(path)
    if path.endswith(".parquet"):
        from relax_data.readers.parquet import ParquetRows

        return ParquetRows(path)
    return JsonlRows(path)
