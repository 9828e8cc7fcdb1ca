# /// script
# requires-python = ">=3.11"
# dependencies = ["mosaicml-streaming", "pyarrow"]
# ///
"""The part of ``data_streaming.py`` that reads with mosaicml-streaming; that script starts it.

It reads no jsonl and no parquet: the file is converted to its own format first, which is not counted.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq
from data_streaming import BUFFER, work_as_told
from streaming import MDSWriter, StreamingDataset


def rows_of(path: str) -> Iterator[dict[str, Any]]:
    if path.endswith("parquet"):
        for batch in pq.ParquetFile(path).iter_batches(1000):
            yield from batch.to_pylist()
    else:
        with open(path) as lines:
            yield from map(json.loads, lines)


class Mosaic:
    def __init__(self, path: str):
        folder = path + ".mds"
        if not os.path.exists(folder):
            with MDSWriter(out=folder, columns={"id": "int", "input": "str", "label": "str"}) as out:
                for row in rows_of(path):
                    out.write(row)
        # As many rows ahead as the buffer holds: by default it waits for every eighth row, five times slower.
        self._data = StreamingDataset(
            local=folder,
            shuffle=True,
            shuffle_seed=0,
            shuffle_block_size=BUFFER,
            predownload=BUFFER,
            batch_size=1,
        )
        self._taken = 0

    def rows(self) -> Iterator[int]:
        for row in self._data:
            self._taken += 1
            yield int(row["id"])

    def state(self) -> Any:
        return self._data.state_dict(self._taken, False)

    def load(self, state: Any) -> None:
        self._data.load_state_dict(state)


if __name__ == "__main__":
    work_as_told(Mosaic)
