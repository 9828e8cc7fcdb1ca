"""Kinds of computation: products, attention, and what memory holds up: elementwise operators and copies."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import orjson

from relax_profiling.trace.flops import operator_flops
from relax_profiling.trace.load import COMMUNICATION, GpuColumns, HostColumns, Trace

PRODUCTS, ATTENTION, ELEMENTWISE, COPIES, OTHER = KINDS = ("products", "attention", "elementwise", "copies", "other")

# Kernels: cuBLAS (nvjet on Hopper), CUTLASS and grouped products; attention of torch, FlashAttention, FlashInfer.
_KERNELS = (
    (
        ATTENTION,
        re.compile(r"flash|fmha|attention|mha_|BatchPrefill|BatchDecode|_fwd_grouped_kernel|_fwd_kernel", re.I),
    ),
    (PRODUCTS, re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|grouped_mm|splitK|matmul", re.I)),
    (COPIES, re.compile(r"copy_kernel|CatArrayBatchedCopy|^Memcpy DtoD", re.I)),
    # torch's own; a fused kernel (Triton, a library) has a name of its own and is no candidate for fusing.
    (ELEMENTWISE, re.compile(r"elementwise_kernel|reduce_kernel|SoftMax(Forward|Backward)", re.I)),
)
_OPERATORS = (
    (ATTENTION, re.compile(r"attention|::_?flash", re.I)),
    (
        PRODUCTS,
        re.compile(
            r"^aten::(addmm_?|mm|bmm|baddbmm_?|_grouped_mm|_scaled_mm|addmv_?|dot|mkldnn_linear)$"
            r"|^mkldnn::_linear_pointwise$|gemm",
            re.I,
        ),
    ),
    (COPIES, re.compile(r"^aten::(copy_|cat|stack|clone|index_copy_)$")),
    (
        ELEMENTWISE,
        re.compile(
            r"^aten::(r?sub|add|mul|div|neg|pow|r?sqrt|square|exp|log|sigmoid|tanh|silu|gelu|relu|threshold|clamp|where|sum"
            r"|mean|norm|max|amax|_?softmax|_log_softmax|rms_norm|native_layer_norm|fill|zero|addc?mul|addcdiv|lerp|sin|cos)"
            r"(_backward|_data)?_?$"
        ),
    ),
)
_AUTOGRAD = re.compile(r"^autograd::engine::evaluate_function: (\w+)")
_FOREIGN = re.compile(r"^(<built-in|nn\.Module:|torch/|.*/(torch|site-packages/torch|lib/python[\d.]+)/)|^<")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Who causes elementwise work or copies: an operator, and the line of Python where stacks were recorded.

    ``microseconds`` are of the device, or on a CPU the operator's own; ``line`` is empty when it is not known.
    """

    operator: str
    line: str
    calls: int
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Product:
    """The matrix products ``[rows, inner] x [inner, columns]`` with one number of columns.

    ``rows`` are those of the largest of them, ``calls`` and ``flops`` of all.
    """

    rows: int
    inner: int
    columns: int
    calls: int
    flops: float


@dataclasses.dataclass(frozen=True)
class Work:
    """Time by kind of computation (microseconds, summed over streams or threads), and what is behind it.

    Attributes:
        time: of each of :data:`KINDS`.
        causes: of elementwise work and copies, the largest first.
        fastest_tflops: rate of the products, in TFLOP/s, that had it highest: what this device reaches here. None
            where no shapes were recorded or no product is long enough to be measured.
        largest: the products with the most columns, which in a language model are those of the vocabulary.
        tokens: of the longest micro-batch, from the shapes of embeddings; 0 when they were not recorded.
        recomputed: backward passes of checkpoints that computed a forward pass again.
    """

    time: dict[str, float]
    causes: list[Cause]
    fastest_tflops: float | None = None
    largest: Product | None = None
    tokens: int = 0
    recomputed: int = 0

    def share(self, *kinds: str) -> float:
        """Part of the computation that is of these kinds."""
        everything = sum(self.time.values())
        return sum(self.time[kind] for kind in kinds) / everything if everything else 0.0


def device_work(trace: Trace, gpu: GpuColumns) -> Work:
    """The work of one GPU; each kernel is charged to the operator and line that launched it."""
    kind_of = _kinds(trace, _KERNELS)
    time = dict.fromkeys(KINDS, 0.0)
    asked: dict[object, list[tuple[float, int]]] = {}
    for i, (name, kind) in enumerate(zip(gpu.name, gpu.kind, strict=True)):
        work = kind_of[name]
        if kind == COMMUNICATION or (kind != 0 and work != COPIES):
            continue
        time[work] += gpu.end[i] - gpu.start[i]
        launched = trace.launches.get(gpu.correlation[i])
        if launched is not None and work in (PRODUCTS, ELEMENTWISE, COPIES):
            asked.setdefault(trace.launched_by.get(gpu.correlation[i]), []).append((launched, i))
    found: dict[tuple[str, str], list[float]] = {}
    measured: dict[tuple[object, int], float] = {}  # a product may be several kernels
    for thread, launches in asked.items():
        launches.sort()
        times = [at for at, _ in launches]
        stacks = _stacks(trace.threads.get(thread), times)
        frames = _stacks(trace.frames.get(thread), times)
        for (_, i), stack, frame in zip(launches, stacks, frames, strict=True):
            duration = gpu.end[i] - gpu.start[i]
            columns = trace.threads.get(thread)
            if kind_of[gpu.name[i]] == PRODUCTS:
                if stack and columns is not None and stack[-1] in columns.flops:
                    measured[thread, stack[-1]] = measured.get((thread, stack[-1]), 0.0) + duration
                continue
            operator = _operator(trace, columns, stack) or trace.names[gpu.name[i]][:60]
            _charge(found, operator, _line(trace, trace.frames.get(thread), frame), duration)
    rates = (
        trace.threads[thread].flops[i] / duration / 1e6
        for (thread, i), duration in measured.items()
        if duration >= _MEASURABLE_US
    )
    return _work(trace, time, found, max(rates, default=None))


_MEASURABLE_US = 50.0
"""A product must take as long for its rate to say something."""


def host_work(trace: Trace) -> Work:
    """The work of a CPU: the operators' own time."""
    kind_of = _kinds(trace, _OPERATORS)
    time = dict.fromkeys(KINDS, 0.0)
    found: dict[tuple[str, str], list[float]] = {}
    best = 0.0
    for thread, columns in trace.threads.items():
        own = _own_times(columns)
        order = sorted(range(len(own)), key=columns.start.__getitem__)
        frames = _stacks(trace.frames.get(thread), [columns.start[i] for i in order])
        for i, frame in zip(order, frames, strict=True):
            name = columns.name[i]
            work = kind_of[name]
            time[work] += own[i]
            if work in (ELEMENTWISE, COPIES):
                _charge(found, trace.names[name], _line(trace, trace.frames.get(thread), frame), own[i])
            elif i in columns.flops and columns.duration[i] >= _MEASURABLE_US:
                best = max(best, columns.flops[i] / columns.duration[i] / 1e6)
    return _work(trace, time, found, best or None)


def _work(trace: Trace, time: dict[str, float], found: dict[tuple[str, str], list[float]], best: float | None) -> Work:
    causes = [Cause(operator, line, len(each), sum(each)) for (operator, line), each in found.items()]
    causes.sort(key=lambda c: -c.microseconds)
    products, tokens = _products(trace)
    backward = trace._name_ids.get("CheckpointFunctionBackward")
    recomputed = sum(list(columns.name).count(backward) for columns in trace.threads.values()) if backward else 0
    largest = max(products, key=lambda p: p.columns, default=None)
    return Work(time, causes[:20], best, largest, tokens, recomputed)


def _products(trace: Trace) -> tuple[list[Product], int]:
    """The products by their columns, and the tokens of the longest micro-batch."""
    products: dict[int, Product] = {}
    tokens = 0
    for (name, text), calls in trace.shapes.items():
        try:
            shapes = orjson.loads(text)
            if name == "aten::embedding":
                tokens = max(tokens, _count(shapes[1]))
            elif name in ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise"):
                (rows, inner), second = shapes[:2] if not name.startswith("aten::addmm") else shapes[1:3]
                _, columns = reversed(second) if name.startswith("mkldnn") else second  # which takes it transposed
                flops = calls * operator_flops(name, shapes)
                known = products.get(columns, Product(0, inner, columns, 0, 0.0))
                products[columns] = Product(
                    max(known.rows, rows), inner, columns, known.calls + calls, known.flops + flops
                )
        except (LookupError, TypeError, ValueError):
            continue
    return list(products.values()), tokens


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _kinds(trace: Trace, patterns: Iterable[tuple[str, "re.Pattern[str]"]]) -> list[str]:
    """The kind of every name of a trace."""
    table = list(patterns)
    return [next((kind for kind, words in table if words.search(name)), OTHER) for name in trace.names]


def _charge(found: dict[tuple[str, str], list[float]], operator: str, line: str, microseconds: float) -> None:
    found.setdefault((operator, line), []).append(microseconds)


def _stacks(columns: HostColumns | None, times: Sequence[float]) -> list[tuple[int, ...]]:
    """For each of the sorted times the places of what runs then, outermost first."""
    if columns is None:
        return [()] * len(times)
    start, duration = columns.start, columns.duration
    order = sorted(range(len(start)), key=lambda i: (start[i], -duration[i]))
    stacks: list[tuple[int, ...]] = []
    running: list[int] = []
    following = 0
    for at in times:
        while following < len(order) and start[order[following]] <= at:
            i = order[following]
            _leave(running, start[i], columns)
            running.append(i)
            following += 1
        _leave(running, at, columns)
        stacks.append(tuple(running))
    return stacks


def _leave(running: list[int], at: float, columns: HostColumns) -> None:
    while running and columns.start[running[-1]] + columns.duration[running[-1]] < at:
        running.pop()


def _operator(trace: Trace, columns: HostColumns | None, stack: tuple[int, ...]) -> str:
    """The innermost operator, and in the backward pass the function that it belongs to."""
    if columns is None or not stack:
        return ""
    names = [trace.names[columns.name[i]] for i in stack]
    for name in names:
        backward = _AUTOGRAD.match(name)
        if backward is not None and names[-1] != backward.group(1):
            return f"{names[-1]} in {backward.group(1)}"
    return names[-1]


def _line(trace: Trace, columns: HostColumns | None, stack: tuple[int, ...]) -> str:
    """The innermost function of Python that is not torch's: ``file(line): function``."""
    if columns is None:
        return ""
    names = (trace.names[columns.name[i]] for i in reversed(stack))
    return next((name for name in names if ".py(" in name and not _FOREIGN.match(name)), "")


def _own_times(columns: HostColumns) -> list[float]:
    """Durations without those of the operators inside."""
    own = list(columns.duration)
    order = sorted(range(len(own)), key=lambda i: (columns.start[i], -columns.duration[i]))
    running: list[int] = []
    for i in order:
        while running and columns.start[running[-1]] + columns.duration[running[-1]] <= columns.start[i]:
            running.pop()
        if running:
            own[running[-1]] -= columns.duration[i]
        running.append(i)
    return [max(0.0, t) for t in own]
