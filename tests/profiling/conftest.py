"""Recorded traces, and a maker of small ones whose shares are known."""

import dataclasses
import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the recorded traces of two training ranks, an engine and two memory snapshots."""
    root = tmp_path_factory.mktemp("recorded")
    shutil.copytree(DATA / "train_trace", root / "train_trace")
    shutil.copytree(DATA / "sglang_trace", root / "sglang_trace")
    (root / "memory_snapshot").mkdir()
    for packed in (DATA / "memory_snapshot").glob("*.gz"):
        (root / "memory_snapshot" / packed.name[: -len(".gz")]).write_bytes(gzip.decompress(packed.read_bytes()))
    return root


class TraceMaker:
    """Writes a trace event by event. Times in microseconds from 0; ``host`` and ``kernel`` follow torch's fields."""

    def __init__(self, **meta: Any) -> None:
        self.meta = {"schemaVersion": 1, "baseTimeNanoseconds": 1_790_000_000_000_000_000, **meta}
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def kernel(
        self,
        start: float,
        duration: float,
        name: str = "gemm",
        *,
        stream: int = 7,
        launched: float | None = None,
        category: str = "kernel",
        **arguments: Any,
    ) -> None:
        """A device activity, launched 5 us before it starts unless said otherwise."""
        self._correlation += 1
        at = start - 5 if launched is None else launched
        common = {"correlation": self._correlation}
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": duration,
                "args": {"device": 0, "stream": stream, **common, **arguments},
            }
        )
        self.events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "ts": at,
                "dur": 2.0,
                "args": common,
            }
        )

    def collective(self, start: float, duration: float, kind: str = "allreduce", group: str = "default_pg") -> None:
        self.kernel(
            start,
            duration,
            f"ncclDevKernel_{kind}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            stream=17,
            **{  # type: ignore[arg-type]  # none of them is a named parameter of kernel
                "Collective name": kind,
                "Process Group Description": group,
                "Group size": 2,
                "Process Group Ranks": "[0, 1]",
            },
        )

    def operator(self, start: float, duration: float, name: str, *, thread: int = 1, **arguments: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": start,
                "dur": duration,
                "args": arguments,
            }
        )

    def span(self, start: float, duration: float, name: str, *, on_device: bool = False) -> None:
        category = "gpu_user_annotation" if on_device else "user_annotation"
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0 if on_device else 1,
                "tid": 7 if on_device else 1,
                "ts": start,
                "dur": duration,
            }
        )

    def write(self, path: Path) -> Path:
        """Writes the trace, compressed when the name says so."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.meta, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


@pytest.fixture
def trace_maker() -> type[TraceMaker]:
    return TraceMaker


@dataclasses.dataclass
class FrozenClock:
    """A clock that stands still, as for two files in one second."""

    now: float = 1_713_780_123.9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def frozen_clock() -> FrozenClock:
    return FrozenClock()


@pytest.fixture
def make_snapshot(tmp_path: Path) -> Callable[..., Path]:
    """Writes a memory snapshot whose blocks are given as (bytes, [(function, file, line), ...])."""
    import pickle

    def make(
        name: str,
        blocks: list[tuple[int, list[tuple[str, str, int]]]],
        *,
        reserved: int | None = None,
        oom: dict[str, int] | None = None,
        free_blocks: tuple[int, ...] = (),
    ) -> Path:
        address = 1 << 40
        events: list[dict[str, Any]] = []
        segment_blocks: list[dict[str, Any]] = []
        for i, (size, stack) in enumerate(blocks):
            frames = [{"name": f, "filename": file, "line": line} for f, file, line in stack]
            at = {"addr": address, "size": size, "stream": 0, "time_us": 1_000_000 * (i + 1), "frames": frames}
            events.append({"action": "alloc", **at})
            segment_blocks.append(
                {
                    "address": address,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated",
                    "frames": frames,
                }
            )
            address += size
        for size in free_blocks:
            segment_blocks.append({"address": address, "size": size, "state": "inactive", "frames": []})
            address += size
        if oom is not None:
            events.append({"action": "oom", "stream": 0, "time_us": 9_000_000, "frames": [], **oom})
        total = sum(b["size"] for b in segment_blocks)
        segment = {"device": 0, "address": 1 << 40, "total_size": reserved or total, "blocks": segment_blocks}
        path = tmp_path / "memory_snapshot" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}))
        return path

    return make
