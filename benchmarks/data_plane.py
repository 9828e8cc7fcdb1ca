"""Rows/s and MB/s through both data planes, against the plain Ray object store as the limit, in one run.

    python benchmarks/data_plane.py --units 1 2 4

A batch of rows with an int64 and two float32 columns is put, taken and cleared, ``--rounds`` times; the best round
counts, because what else runs on the machine only makes rounds slower. One TransferQueue lives in a Ray cluster, so
each number of storage units has a Ray of its own.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from relax_data.plane.base import DataPlane
from relax_data.plane.local import LocalPlane

SIZES = [(256, 64), (64, 8192)]


def batch(rows: int, tokens: int) -> dict[str, list[np.ndarray]]:
    return {
        "tokens": [np.arange(tokens, dtype=np.int64) for _ in range(rows)],
        "log_probs": [np.zeros(tokens, dtype=np.float32) for _ in range(rows)],
        "advantages": [np.ones(tokens, dtype=np.float32) for _ in range(rows)],
    }


def through_plane(plane: DataPlane) -> Callable[[dict[str, list[np.ndarray]]], tuple[float, float]]:
    def once(columns: dict[str, list[np.ndarray]]) -> tuple[float, float]:
        start = time.perf_counter()
        plane.put(columns)
        between = time.perf_counter()
        rows = plane.take("train", list(columns), len(columns["tokens"]), timeout=120)
        end = time.perf_counter()
        plane.clear(rows.ids)
        return between - start, end - between

    return once


def through_object_store(ray: Any) -> Callable[[dict[str, list[np.ndarray]]], tuple[float, float]]:
    def once(columns: dict[str, list[np.ndarray]]) -> tuple[float, float]:
        start = time.perf_counter()
        reference = ray.put(columns)
        between = time.perf_counter()
        ray.get(reference)
        return between - start, time.perf_counter() - between

    return once


def report(name: str, once: Callable[..., tuple[float, float]], rounds: int, limits: dict[Any, float]) -> None:
    for rows, tokens in SIZES:
        columns = batch(rows, tokens)
        size = sum(a.nbytes for values in columns.values() for a in values) / 1e6
        once(columns)
        timings = [once(columns) for _ in range(rounds)]
        put, take = min(t[0] for t in timings), min(t[1] for t in timings)
        both = rows / (put + take)
        limit = limits.setdefault((rows, tokens), both)
        speeds = f"{rows / put:.0f} | {size / put:.0f} | {rows / take:.0f} | {size / take:.0f}"
        print(f"| {name} | {rows} x {tokens} | {speeds} | {both / limit:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    import ray
    from relax_data.plane.transferqueue import TransferQueuePlane

    print("| plane | rows x tokens | put rows/s | put MB/s | take rows/s | take MB/s | of the object store |")
    print("|---|---|---|---|---|---|---|")
    limits: dict[Any, float] = {}
    for units in options.units:
        ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False)
        try:
            if not limits:
                report("Ray object store", through_object_store(ray), options.rounds, limits)
                report("in one process", through_plane(LocalPlane()), options.rounds, limits)
            plane = TransferQueuePlane("benchmark", units=units)
            report(f"TransferQueue, {units} units", through_plane(plane), options.rounds, limits)
            plane.shutdown()
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
