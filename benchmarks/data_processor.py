"""A multimodal processor in threads and in processes, in one run; and its share of a training step.

    python benchmarks/data_processor.py --samples 200 --steps 6

JPEG files of ``--side`` pixels go through the image processor of Qwen2.5-VL (built here, nothing is downloaded). The
start of the workers is not counted; it is told apart, because each process imports torch and transformers.

With ``--steps`` two short runs of `examples/shapes` follow, on CPU, with threads and with processes. Their rows are
read as they are needed (``--use-streaming-dataset``), so that the processor works in each step: otherwise all pictures
are processed before the first one. The first step is left out, in which everything is slow.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from partial_rollout import train
from relax_data.multimodal.processor import ProcessorPool

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "shapes"


def load() -> Any:
    from transformers import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor()


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


def seconds(pool: ProcessorPool, paths: list[str]) -> tuple[float, float]:
    """Seconds that the pictures took: of the clock, and of this process's CPU time."""
    start, cpu = time.perf_counter(), time.process_time()
    for future in [pool.submit(p, "", {"image": [p]}) for p in paths]:
        future.result()
    return time.perf_counter() - start, time.process_time() - cpu


def step_share(folder: Path, size: int, steps: int) -> tuple[float, float]:
    """Seconds of a training step and of the processor in it, medians.

    Args:
        folder: with the task of the example.
        size: of the pool of processes; 0 is threads.
        steps: that are counted.
    """
    name = f"processes-{size}"
    words = ["--config", str(EXAMPLE / "train.toml"), "--hf-checkpoint", str(folder / "model")]
    words += ["--prompt-data", str(folder / "data" / "train.parquet"), "--use-streaming-dataset"]
    words += ["--eval-prompt-data", "heldout", str(folder / "data" / "heldout.parquet"), "--eval-interval", "1000"]
    words += ["--mm-processor-pool-size", str(size), "--num-rollout", str(steps + 1)]
    train(words, name, folder)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [m for m in map(json.loads, lines) if "time/step" in m][1:]
    medians = [statistics.median(row[key] for row in rows) for key in ("time/step", "data/processor_s")]
    return medians[0], medians[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=0, help="of the two runs; 0: none")
    options = parser.parse_args()
    kinds = {
        "1 thread": {"threads": 1},
        "4 threads (pool size 0)": {"threads": 4},
        "2 processes": {"size": 2},
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = write_images(Path(folder), options.samples, options.side)
        print("| workers | samples/s | against 1 thread | CPU s a sample, of this process | start s |")
        print("|---|---|---|---|---|")
        base = None
        for name, arguments in kinds.items():
            start = time.perf_counter()
            with ProcessorPool(functools.partial(load), **arguments) as pool:
                seconds(pool, paths[:8])
                started = time.perf_counter() - start
                taken, cpu = seconds(pool, paths)
            base = base or taken
            rate = options.samples / taken
            mine = f"{cpu / options.samples:.3f}"
            print(f"| {name} | {rate:.1f} | {base / taken:.2f} | {mine} | {started:.1f} |", flush=True)
    if not options.steps:
        return
    with tempfile.TemporaryDirectory() as made:
        task = Path(made)
        subprocess.run([sys.executable, str(EXAMPLE / "make_task.py"), "--out", made], check=True, capture_output=True)
        shares = {size: step_share(task, size, options.steps) for size in (0, 2)}
        print("| --mm-processor-pool-size | processor, s a step | step, s | share |")
        print("|---|---|---|---|")
        for size, (step, processor) in shares.items():
            print(f"| {size} | {processor:.3f} | {step:.2f} | {processor / step:.1%} |", flush=True)


if __name__ == "__main__":
    main()
