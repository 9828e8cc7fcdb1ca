"""Shuffled streaming of a large jsonl or parquet file: rows/s, memory and resume, against two libraries in one run.

    python benchmarks/data_streaming.py --megabytes 1000 --rows 200000

Each contender runs in a process of its own and reads the first ``--rows`` rows through a shuffle buffer of 10,000; then
a new process resumes from the state it had after half of them. The peers' packages exclude each other, so each is a
script that names its own (``data_streaming_datasets.py``, ``data_streaming_mosaic.py``) and runs with
``uv run --script``, or with the interpreter named by ``--python NAME=PATH``. The conversion that mosaicml-streaming
needs first is not counted.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

BUFFER = 10_000
AFTER_RESUME = 2_000
LIMIT_S = 1800
HERE = Path(__file__).resolve()
SCRIPTS = {
    "ours": HERE,
    "datasets": HERE.with_name("data_streaming_datasets.py"),
    "mosaicml-streaming": HERE.with_name("data_streaming_mosaic.py"),
}
CONTENDERS = [
    ("ours", "jsonl"),
    ("ours", "parquet"),
    ("datasets", "jsonl"),
    ("datasets", "parquet"),
    ("mosaicml-streaming", "jsonl"),
    ("mosaicml-streaming", "parquet"),
]


class Contender(Protocol):
    """A shuffled stream over one file; made from its path."""

    def rows(self) -> Iterator[int]:
        """The ``id`` of each row."""
        ...

    def state(self) -> Any:
        """Position, as JSON values."""
        ...

    def load(self, state: Any) -> None:
        """Goes on from a position, before :meth:`rows`."""
        ...


def write_files(folder: Path, megabytes: int) -> None:
    """Prompts of a few hundred characters, the same rows as jsonl and as parquet in row groups of 100,000."""
    import numpy as np
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
        from relax_data.prompts.streaming import StreamingDataset

        self._data = StreamingDataset(path, buffer_size=BUFFER, seed=0)

    def rows(self) -> Iterator[int]:
        return (s.row["id"] for s in self._data)

    def state(self) -> Any:
        return self._data.state_dict()

    def load(self, state: Any) -> None:
        self._data.load_state_dict(state)


def resident_mb(which: str = "VmRSS") -> float:
    """Resident memory of this process now, or its peak (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) / 1024
    raise OSError("this needs the /proc of Linux")


def work(make: Callable[[str], Contender], path: str, rows: int, state_path: str) -> dict[str, Any]:
    """Reads ``rows`` rows, or, when there is a state, resumes and reads a few. The imports are done by then."""
    before = resident_mb()
    if os.path.exists(state_path):
        state = json.loads(Path(state_path).read_text())
        start = time.perf_counter()
        contender = make(path)
        contender.load(state)
        stream = contender.rows()
        ids = [next(stream)]
        seconds = time.perf_counter() - start
        ids += [next(stream) for _ in range(AFTER_RESUME - 1)]
        return {"resume": seconds, "ids": ids}
    contender = make(path)
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


def work_as_told(make: Callable[[str], Contender]) -> None:
    """Runs the process of a contender: its part of the benchmark, from the command line to standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--state", required=True)
    options = parser.parse_args()
    print(json.dumps(work(make, options.path, options.rows, options.state)))


def command(name: str, pythons: dict[str, str]) -> list[str] | None:
    script = str(SCRIPTS[name])
    if name == "ours" or name in pythons:
        return [pythons.get(name, sys.executable), script]
    uv = shutil.which("uv")
    return [uv, "run", "--script", script] if uv else None


def measure(name: str, path: Path, rows: int, start: list[str]) -> dict[str, Any]:
    state = path.parent / f"state-{name}-{path.suffix[1:]}.json"
    found: dict[str, Any] = {}
    for _ in range(2):
        try:
            done = subprocess.run(
                [*start, "--path", str(path), "--rows", str(rows), "--state", str(state)],
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no end after {LIMIT_S} s"}
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
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="these contenders, and ours")
    parser.add_argument("--folder", help="where the files are written, and found again by the next run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("RELAX_CACHE_DIR", str(folder / "cache"))
        if not (folder / "data.parquet").exists():
            write_files(folder, options.megabytes)
        for state in folder.glob("state-*.json"):
            state.unlink()
        print("| contender | file | rows/s | ours is faster by | growth MB | resume s | exact | state bytes |")
        print("|---|---|---|---|---|---|---|---|")
        ours: dict[str, float] = {}
        for name, kind in CONTENDERS:
            if name not in {"ours", *options.only}:
                continue
            start = command(name, dict(p.split("=", 1) for p in options.python))
            found: dict[str, Any] = {"error": "no uv and no --python"} if start is None else {}
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
    if "--state" in sys.argv:
        work_as_told(Ours)
    else:
        main()
