"""Rows of a Hugging Face dataset, through the ``datasets`` library and its memory-mapped Arrow cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_data.errors import DataError
from relax_data.readers.address import split_hub_address
from relax_data.readers.base import Row

_UNIT_ROWS = 64


class HubRows:
    """Rows of ``hf://OWNER/NAME?config=C&split=S&revision=R``; ``split`` is ``train`` unless given.

    ``datasets`` downloads it once and maps it into memory, so any row can be read at once and memory does not grow.
    A local folder that ``datasets`` can load is named by its absolute path: ``hf:///data/folder``.
    """

    def __init__(self, address: str):
        self.name = address
        name, options = split_hub_address(address)
        try:
            import datasets
        except ImportError:
            raise DataError(f"{address} needs the library datasets: pip install 'relax-data[hf]'") from None
        try:
            self._data = datasets.load_dataset(
                name, options.get("config"), split=options.get("split", "train"), revision=options.get("revision")
            )
        except Exception as error:
            # The library raises what its loaders, the hub client and the file formats raise.
            raise DataError(f"{address} cannot be loaded: {type(error).__name__}: {error}") from error
        # As in the other sources an image stays the path or the bytes that the row holds.
        self._data = self._data.with_format("arrow")
        self.count = len(self._data)
        self.units = np.unique(np.append(np.arange(0, self.count, _UNIT_ROWS), self.count)).astype(np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Changes when the data set does: its name, its rows, the library's own hash."""
        # The library's own hash covers the files and every step that led to this table.
        return {"name": self.name, "size": self.count, "ends": str(self._data._fingerprint)}

    def read(self, start: int, stop: int) -> "_HubBlock":
        """Rows ``start`` to ``stop``, out of the mapped table."""
        return _HubBlock(self._data[start:stop])

    def close(self) -> None:
        """Nothing to close: the mapping goes with the object."""


class _HubBlock:
    def __init__(self, table: Any):
        self._table = table

    def rows(self, offsets: Sequence[int]) -> list[Row | DataError | None]:
        return self._table.take(list(offsets)).to_pylist() if len(offsets) else []
