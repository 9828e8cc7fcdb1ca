"""The kernels and operators that take the most time."""

import dataclasses
import re

from relax_profiling.trace.load import COMMUNICATION, GpuColumns, Trace

_FUNCTOR = re.compile(r"\w+(?:_kernel_cuda|_kernel_impl|Functor\w*|_functor)\b")


@dataclasses.dataclass(frozen=True)
class TopEntry:
    """One kernel or operator: calls, and microseconds in all (an operator's own, without those it calls)."""

    name: str
    calls: int
    microseconds: float
    communication: bool = False


def top_kernels(trace: Trace, gpu: GpuColumns, limit: int = 10) -> list[TopEntry]:
    """The device's activities by summed time."""
    time: dict[int, float] = {}
    calls: dict[int, int] = {}
    communicates: set[int] = set()
    for start, end, name, kind in zip(gpu.start, gpu.end, gpu.name, gpu.kind, strict=True):
        time[name] = time.get(name, 0.0) + (end - start)
        calls[name] = calls.get(name, 0) + 1
        if kind == COMMUNICATION:
            communicates.add(name)
    merged: dict[str, TopEntry] = {}
    for i, microseconds in time.items():
        short = short_kernel(trace.names[i])
        old = merged.get(short, TopEntry(short, 0, 0.0))
        merged[short] = TopEntry(short, old.calls + calls[i], old.microseconds + microseconds, i in communicates)
    return sorted(merged.values(), key=lambda e: -e.microseconds)[:limit]


def top_operators(trace: Trace, limit: int = 10) -> list[TopEntry]:
    """The host's operators by their own time, that is without the operators that they call."""
    own: dict[int, float] = {}
    calls: dict[int, int] = {}
    for thread in trace.threads.values():
        order = sorted(range(len(thread.start)), key=lambda i: (thread.start[i], -thread.duration[i]))
        stack: list[tuple[float, int]] = []
        for i in order:
            start, duration, name = thread.start[i], thread.duration[i], thread.name[i]
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack:
                own[stack[-1][1]] -= duration
            own[name] = own.get(name, 0.0) + duration
            calls[name] = calls.get(name, 0) + 1
            stack.append((start + duration, name))
    best = sorted(own, key=own.__getitem__, reverse=True)[:limit]
    return [TopEntry(trace.names[i], calls[i], max(0.0, own[i])) for i in best]


def short_kernel(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters, as far as that can be told."""
    depth = 0
    kept: list[str] = []
    for c in name.replace("(anonymous namespace)", "anonymous"):
        if c in "<(":
            depth += 1
        elif c in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(c)
    short = re.sub(r"^(void|static|inline|__global__)\s+", "", "".join(kept)).strip()
    # torch's elementwise kernels differ only in their template arguments.
    functor = _FUNCTOR.search(name) if "elementwise" in short or "multi_tensor" in short else None
    return f"{short} [{functor.group(0)}]" if functor else (short or name)
