# /// script
# requires-python = ">=3.11"
# dependencies = ["datasets"]
# ///
"""The part of ``data_streaming.py`` that reads with ``datasets``; that script starts it."""

from collections.abc import Iterator
from typing import Any

import datasets
from data_streaming import BUFFER, work_as_told


class Datasets:
    def __init__(self, path: str):
        kind = "parquet" if path.endswith("parquet") else "json"
        loaded = datasets.load_dataset(kind, data_files=path, split="train", streaming=True)
        self._data = loaded.shuffle(seed=0, buffer_size=BUFFER)

    def rows(self) -> Iterator[int]:
        return (row["id"] for row in self._data)

    def state(self) -> Any:
        return self._data.state_dict()

    def load(self, state: Any) -> None:
        self._data.load_state_dict(state)


if __name__ == "__main__":
    work_as_told(Datasets)
