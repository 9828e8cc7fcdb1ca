"""The report on a trace of a million events: time and peak memory on one core.

    python benchmarks/profiling_report.py [--events 1000000] [--trace FILE]

The trace has the layout of torch's own writer and the mix of a training step on a GPU: operators with shapes, launches,
kernels on two streams, collectives, arrows.
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_EVENT = """  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      {args}
    }}
  }}"""
_ARROW = """  {{
    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts:.3f},
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }}"""
_SHAPES = (
    '"External id": {n},"Record function id": 0, "Concrete Inputs": ["", "", ""], "Input type": ["c10::BFloat16", '
    '"c10::BFloat16", "Scalar"], "Input Strides": [[4096, 1], [1, 4096], []], "Input Dims": [[2048, 4096], '
    '[4096, 4096], []], "Ev Idx": {n}'
)
_KERNEL = (
    '"External id": {n}, "queued": 0, "device": 0, "context": 1, "stream": {stream}, "correlation": {n}, '
    '"registers per thread": 96, "shared memory": 103808, "blocks per SM": 0.007, "warps per SM": 0.03, '
    '"grid": [1, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 0{more}'
)
_NCCL = (
    ', "Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "Group size": 8, '
    '"dtype": "BFloat16", "Process Group Name": "0", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", '
    '"Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"'
)


def write_trace(path: Path, events: int) -> int:
    """Writes a trace with about ``events`` events; returns how many."""
    written = 0
    head = (
        '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H200"\n    }\n  ],\n'
        '  "with_flops": 1,\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n'
    )
    with gzip.open(path, "wt", compresslevel=1) as f:
        f.write(head)
        n, at = 0, 5100345311158.0
        while written < events:
            collective = n % 20 == 19
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            if not collective:
                name = f"void at::native::elementwise_kernel<128, 4, at::native::Functor{n % 97}<float> >(int, char*)"
            stream = 17 if collective else 7
            common = {"pid": 607, "tid": 607}
            lines = [
                _EVENT.format(cat="cpu_op", name="aten::linear", ts=at, dur=9, args=_SHAPES.format(n=n), **common),
                _EVENT.format(cat="cpu_op", name="aten::mm", ts=at + 1, dur=7, args=_SHAPES.format(n=n), **common),
                _EVENT.format(
                    cat="cuda_runtime",
                    name="cudaLaunchKernel",
                    ts=at + 3,
                    dur=4,
                    args=f'"External id": {n}, "cbid": 211, "correlation": {n}',
                    **common,
                ),
                _EVENT.format(
                    cat="kernel",
                    name=name,
                    pid=0,
                    tid=stream,
                    ts=at + 8 + 12 * collective,
                    dur=30 if collective else 5 + n % 6,
                    args=_KERNEL.format(n=n, stream=stream, more=_NCCL if collective else ""),
                ),
                _ARROW.format(ph="s", id=n, pid=607, tid=607, ts=at + 3),
                _ARROW.format(ph="f", id=n, pid=0, tid=stream, ts=at + 8),
            ]
            f.write((",\n" if written else "") + ",\n".join(lines))
            written += len(lines)
            n += 1
            at += 11 + (40 if n % 500 == 0 else 0)
        f.write('\n  ],\n  "traceName": "/tmp/x.json"\n}\n')
    return written


def measure(path: Path) -> dict[str, float]:
    """Runs the command in a process of its own on one core."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "relax_profiling", "report", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, timeout=600, preexec_fn=_one_core)
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    (trace,) = json.loads(done.stdout)["traces"]
    return {
        "events": trace["events"],
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(usage.ru_maxrss / 1024),
    }


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--trace", type=Path, help="a trace of your own instead")
    arguments = parser.parse_args()
    if arguments.trace:
        print(json.dumps(measure(arguments.trace)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train_overall_rank0_dp0_tp0_pp0.1713780123.pt.trace.json.gz"
        write_trace(path, arguments.events)
        print(json.dumps({"file_mib": round(path.stat().st_size / 2**20, 1), **measure(path)}))


if __name__ == "__main__":
    main()
