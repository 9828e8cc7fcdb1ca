"""Shuffled streaming of a large jsonl or parquet file: rows/s, memory and resume, against two libraries in one run.

    python benchmarks/data_streaming.py --megabytes 1000 --rows 200000

Each contender runs in a process of its own and reads the first ``--rows`` rows through a shuffle buffer of 10,000; then
a new process resumes from the state it had after half of them. The peers' packages exclude each other, so each gets an
environment of its own from ``uv run --with``, or the interpreter named by ``--python NAME=PATH``. The conversion that
mosaicml-streaming needs first is timed apart.

- growth: peak of resident memory, less that after the imports, MB
- resume: from a new object to its first row, seconds, imports not counted
- exact: the resumed rows are those of the uninterrupted run
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BUFFER = 10_000
AFTER_RESUME = 2_000
PEERS = {"datasets": "datasets", "mosaicml-streaming": "mosaicml-streaming"}
CONTENDERS = [
    ("ours", "jsonl"),
    ("ours", "parquet"),
    ("datasets", "jsonl"),
    ("datasets", "parquet"),
    ("mosaicml-streaming", "jsonl"),
]


def write_files(folder: Path, megabytes: int) -> None:
    """Prompts of a few hundred characters, the same rows as jsonl and as parquet in row groups of 100,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Random words, so that parquet cannot compress the text away.
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, 2 + i % 8)) for i in range(5000)]
    schema = pa.schema([("id", pa.int64()), ("input", pa.string()), ("label", pa.string())])
    with open(folder / "data.jsonl", "w") as lines, pq.ParquetWriter(folder / "data.parquet", schema) as table:
        number = 0
        while lines.tell() < megabytes << 20:
            rows = []
            for draw in rng.integers(0, len(words), (100_000, 200)):
                text = " ".join([words[k] for k in draw[: 40 + number * 31 % 160]])
                rows.append({"id": number, "input": text, "label": str(number)})
                number += 1
            lines.writelines(json.dumps(r) + "\n" for r in rows)
            table.write_table(pa.Table.from_pylist(rows, schema))


class Ours:
    def __init__(self, path: str):
        from relax_data.streaming import StreamingDataset

        self._data = StreamingDataset(path, buffer_size=BUFFER, seed=0)

    def rows(self) -> Iterator[int]:
        return (s.row["id"] for s in self._data)

    def state(self) -> Any:
        return self._data.state_dict()

    def load(self, state: Any) -> None:
        self._data.load_state_dict(state)


class Datasets:
    def __init__(self, path: str):
        import datasets

        kind = "parquet" if path.endswith("parquet") else "json"
        loaded = datasets.load_dataset(kind, data_files=path, split="train", streaming=True)
        self._data = loaded.shuffle(seed=0, buffer_size=BUFFER)

    def rows(self) -> Iterator[int]:
        return (row["id"] for row in self._data)

    def state(self) -> Any:
        return self._data.state_dict()

    def load(self, state: Any) -> None:
        self._data.load_state_dict(state)


class Mosaic:
    def __init__(self, path: str):
        from streaming import MDSWriter, StreamingDataset

        self._folder = path + ".mds"
        if not os.path.exists(self._folder):
            start = time.perf_counter()
            with (
                MDSWriter(out=self._folder, columns={"id": "int", "input": "str", "label": "str"}) as out,
                open(path) as lines,
            ):
                for line in lines:
                    out.write(json.loads(line))
            print(f"conversion: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        self._data = StreamingDataset(
            local=self._folder, shuffle=True, shuffle_seed=0, shuffle_block_size=BUFFER, batch_size=1
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


CLASSES = {"ours": Ours, "datasets": Datasets, "mosaicml-streaming": Mosaic}


def resident_mb(which: str = "VmRSS") -> float:
    """Resident memory of this process now, or its peak (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise OSError("this needs the /proc of Linux")


def import_everything(name: str) -> None:
    if name == "ours":
        import relax_data.parquet
        import relax_data.streaming  # noqa: F401
    elif name == "datasets":
        import datasets  # noqa: F401
    else:
        import streaming  # noqa: F401


def work(name: str, path: str, rows: int, state_path: str) -> dict[str, Any]:
    """Reads ``rows`` rows, or, when there is a state, resumes and reads a few."""
    import_everything(name)
    before = resident_mb()
    if os.path.exists(state_path):
        state = json.loads(Path(state_path).read_text())
        start = time.perf_counter()
        contender = CLASSES[name](path)
        contender.load(state)
        stream = contender.rows()
        ids = [next(stream)]
        seconds = time.perf_counter() - start
        ids += [next(stream) for _ in range(AFTER_RESUME - 1)]
        return {"resume": seconds, "ids": ids}
    contender = CLASSES[name](path)
    stream = contender.rows()
    next(stream)
    start, ids, state = time.perf_counter(), [], None
    for i in range(1, rows):
        if i == rows // 2:
            state = contender.state()
        number = next(stream)
        if rows // 2 <= i < rows // 2 + AFTER_RESUME:
            ids.append(number)
    seconds = time.perf_counter() - start
    Path(state_path).write_text(json.dumps(state))
    return {"rows_per_second": rows / seconds, "growth": resident_mb("VmHWM") - before, "ids": ids}


def command(name: str, pythons: dict[str, str]) -> list[str] | None:
    if name == "ours" or name in pythons:
        return [pythons.get(name, sys.executable)]
    uv = shutil.which("uv")
    return [uv, "run", "--no-project", "--with", PEERS[name], "python"] if uv else None


def measure(name: str, path: Path, rows: int, start: list[str]) -> dict[str, Any]:
    state = path.parent / f"state-{name}-{path.suffix[1:]}.json"
    found: dict[str, Any] = {}
    for _ in range(2):
        done = subprocess.run(
            [*start, __file__, "--work", name, "--path", str(path), "--rows", str(rows), "--state", str(state)],
            capture_output=True,
            text=True,
            timeout=3600,
        )
        if done.returncode:
            return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:100]}
        part = json.loads(done.stdout.splitlines()[-1])
        if "ids" in found:
            found["exact"] = found["ids"] == part["ids"]
        found |= part
    found["state_bytes"] = state.stat().st_size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--folder", help="where the files are written, and found again by the next run")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.path, options.rows, options.state)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        os.environ.setdefault("RELAX_CACHE_DIR", str(folder / "cache"))
        if not (folder / "data.parquet").exists():
            write_files(folder, options.megabytes)
        for state in folder.glob("state-*.json"):
            state.unlink()
        print("| contender | file | rows/s | ours is faster by | growth MB | resume s | exact | state bytes |")
        print("|---|---|---|---|---|---|---|---|")
        ours: dict[str, float] = {}
        for name, kind in CONTENDERS:
            start = command(name, dict(p.split("=", 1) for p in options.python))
            found = {"error": "no uv and no --python"} if start is None else {}
            found = found or measure(name, folder / f"data.{kind}", options.rows, start or [])
            if "error" in found:
                print(f"| {name} | {kind} | not measured: {found['error']} | | | | | |", flush=True)
                continue
            speed = found["rows_per_second"]
            ours.setdefault(kind, speed)
            print(
                f"| {name} | {kind} | {speed:.0f} | {ours[kind] / speed:.2f} | {found['growth']:.0f} "
                f"| {found['resume']:.2f} | {found['exact']} | {found['state_bytes']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
