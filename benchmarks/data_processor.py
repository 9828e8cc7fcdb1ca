"""A multimodal processor in threads and in processes, in one run.

    python benchmarks/data_processor.py --samples 200

JPEG files of ``--side`` pixels go through a CLIP processor (image part only, built here, nothing is downloaded). The
start of the workers is not counted; it is told apart, because each process imports torch and transformers.
"""

import argparse
import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from relax_data.multimodal.processor import ProcessorPool


def load() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor()


def write_images(folder: Path, count: int, side: int) -> list[str]:
    """Smooth random pictures: noise would take JPEG longer to decode than photographs do."""
    from PIL import Image

    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        small = Image.fromarray(rng.integers(0, 255, (24, 32, 3), dtype=np.uint8))
        paths.append(str(folder / f"{i}.jpg"))
        small.resize((side, side)).save(paths[-1])
    return paths


def seconds(pool: ProcessorPool, paths: list[str]) -> float:
    start = time.perf_counter()
    for future in [pool.submit(p, "", {"image": [p]}) for p in paths]:
        future.result()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--side", type=int, default=1024)
    options = parser.parse_args()
    kinds = {
        "1 thread": {"threads": 1},
        "4 threads (pool size 0)": {"threads": 4},
        "2 processes": {"size": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder), options.samples, options.side)
        print("| workers | samples/s | against 1 thread | start s |")
        print("|---|---|---|---|")
        base = None
        for name, arguments in kinds.items():
            start = time.perf_counter()
            with ProcessorPool(functools.partial(load), **arguments) as pool:
                seconds(pool, paths[:8])
                started = time.perf_counter() - start
                taken = seconds(pool, paths)
            base = base or taken
            rate = options.samples / taken
            print(f"| {name} | {rate:.1f} | {base / taken:.2f} | {started:.1f} |", flush=True)


if __name__ == "__main__":
    main()
