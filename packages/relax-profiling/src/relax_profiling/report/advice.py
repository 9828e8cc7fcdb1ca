"""Advice: each rule looks at figures and names the flag that would change them. Without enough evidence it is silent.

A rule is one function from the reports to findings; the thresholds stand beside it.
"""

from collections.abc import Callable, Iterable, Sequence

from relax_profiling.analysis.communication import CommunicationKind
from relax_profiling.report.model import Finding, MemoryReport, TraceReport
from relax_profiling.snapshot.analyse import DeviceMemory, Holder

Rule = Callable[[Sequence[TraceReport], Sequence[MemoryReport]], Iterable[Finding]]

# Below this many activities of the device, or this much time, a trace shows a beginning and no habit.
ENOUGH_LAUNCHES = 50
_ENOUGH_US = 1_000.0
_GIB = 2**30
# Words in the frames of a call stack that say what it allocates.
_LOG_PROBS = ("log_prob", "logprob")
_LOGITS = ("logits", "cross_entropy", "log_softmax", "vocab_parallel", "lm_head")
_LAYERS = ("attention", "mlp", "rms_norm", "rmsnorm", "layernorm", "transformer_layer", "modeling_")
_OPTIMIZER = ("/optim/", "optimizer", "adam")


def find_advice(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> list[Finding]:
    """The findings of all rules."""
    return [finding for rule in RULES for finding in rule(traces, memory)]


def on_device(traces: Sequence[TraceReport], role: str) -> list[TraceReport]:
    """The traces of a role with enough work on a device; of a step's parts and the whole only the whole."""
    return [
        t
        for t in traces
        if t.role == role
        and t.breakdown.on_device
        and t.launches >= ENOUGH_LAUNCHES
        and t.breakdown.span >= _ENOUGH_US
        # The parts of a step are judged in the trace of the whole step.
        and (role != "train" or t.target in ("", "train_overall") or not _has_overall(t, traces))
    ]


def _has_overall(trace: TraceReport, traces: Sequence[TraceReport]) -> bool:
    return any(t.run == trace.run and t.label == trace.label and t.target == "train_overall" for t in traces)


def exposed_communication(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Collectives beside which nothing computes, for a fifth of the time or more, without the wait for late ranks."""
    for t in on_device(traces, "train"):
        share = t.communication_own / t.breakdown.span
        if share < 0.20 or not t.communication:
            continue
        kind = t.communication[0]
        advice, flags = _less_traffic(kind)
        figure = f"exposed {kind.kind} in {kind.group or 'the default group'}: {share:.0%} of {where(t)}"
        yield Finding("exposed communication", where(t), figure, advice, flags)


def _less_traffic(kind: CommunicationKind) -> tuple[str, tuple[str, ...]]:
    group = kind.group.upper()
    if "EXPERT" in group or kind.kind.replace("_", "").startswith("alltoall"):
        return "fewer expert-parallel ranks exchange fewer tokens", ("--expert-model-parallel-size",)
    if "PIPELINE" in group or kind.kind in ("send", "recv", "sendrecv", "send_recv"):
        return (
            "fewer pipeline stages, or more micro-batches to fill them",
            ("--pipeline-model-parallel-size", "--max-tokens-per-gpu"),
        )
    if "CONTEXT" in group:
        return "fewer context-parallel ranks, if the longest sample fits", ("--context-parallel-size",)
    if "DATA" in group:
        return (
            "gradients are exchanged once a step: a larger step spreads that over more tokens",
            ("--global-batch-size", "--max-tokens-per-gpu"),
        )
    if "TENSOR" in group or kind.kind in ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base"):
        return (
            "less tensor parallelism, if the model then fits with recomputation",
            ("--tensor-model-parallel-size", "--recompute-granularity"),
        )
    return (
        "less tensor parallelism, or larger micro-batches that hide the exchange",
        ("--tensor-model-parallel-size", "--max-tokens-per-gpu"),
    )


def straggler(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """One rank comes last to nearly all collectives, and the others wait for it for a twentieth of their time."""
    for t in on_device(traces, "train"):
        waits = t.waits
        if waits is None or waits.collectives < 3 or waits.last < 0.8 * waits.collectives:
            continue
        others = [o for o in traces if o.waits and o is not t and (o.run, o.target) == (t.run, t.target)]
        waited = max((o.breakdown.of_span(o.waits.waits) for o in others if o.waits), default=0.0)
        if waited < 0.05:
            continue
        yield Finding(
            "straggler",
            where(t),
            f"{t.label} arrives last at {waits.last} of {waits.collectives} collectives; "
            f"the others wait for it for up to {waited:.0%} of their time",
            "even out the tokens of the ranks; if they are even, look at what this rank does outside torch",
            ("--balance-data",),
        )


def launch_bound(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """The GPU is out of work because the host launches too slowly, for a quarter of the time or more."""
    figure = "the GPU waits for launches for {share:.0%} of {where}"
    yield from _large_shares(
        on_device(traces, "train"),
        lambda t: _idle(t, "launch"),
        0.25,
        "host-bound training",
        figure,
        "larger micro-batches give each launch more work",
        ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--micro-batch-size"),
    )
    yield from _large_shares(
        on_device(traces, "engine"),
        lambda t: _idle(t, "launch"),
        0.25,
        "host-bound engine",
        figure,
        "more sequences at once give each launch more work, and CUDA graphs launch whole steps",
        ("--rollout-batch-size", "--sglang-server-concurrency", "--sglang-cuda-graph-max-bs"),
    )


def waits_for_data(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Training waits for the next data for a seventh of the time or more."""
    return _large_shares(
        [t for t in on_device(traces, "train") if len(t.steps) >= 2],
        lambda t: _idle(t, "data") + _idle(t, "between"),
        0.15,
        "training waits for data",
        "{share:.0%} of {where} goes by without work, between steps or in the wait for a batch",
        "let generation run beside training, or give it more GPUs",
        ("--fully-async", "--max-staleness", "--rollout-num-gpus"),
    )


def small_decode_batches(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Decoding reads all weights for a handful of tokens."""
    for t in traces:
        if t.role != "engine":
            continue
        for stage in t.stages:
            if stage.name == "DECODE" and stage.steps >= 3 and stage.batch_mean < 8:
                yield Finding(
                    "small decode batches",
                    where(t),
                    f"decode batches of {stage.batch_mean:.1f} in the mean (largest {stage.batch_max}) "
                    f"over {stage.steps} steps",
                    "more sequences at once for each engine: a larger rollout, or fewer engines",
                    ("--rollout-batch-size", "--over-sampling-batch-size", "--rollout-num-gpus-per-engine"),
                )


def low_utilisation(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """The GPU computes most of the time and yet reaches a small part of its peak."""
    for t in on_device(traces, "train"):
        if t.mfu is not None and t.mfu < 0.20 and t.breakdown.share("compute") >= 0.6:
            yield Finding(
                "low MFU",
                where(t),
                f"{t.mfu:.1%} of the GPU's peak, while it computes {t.breakdown.share('compute'):.0%} of the time",
                "kernels are too small or recompute too much: pack more tokens into a micro-batch",
                ("--max-tokens-per-gpu", "--recompute-granularity"),
            )


def exposed_copies(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Copies between host and device that nothing hides."""
    return _large_shares(
        on_device(traces, "train"),
        lambda t: t.breakdown.share("memory"),
        0.10,
        "exposed memory copies",
        "memory copies take {share:.0%} of {where}",
        "keep the optimizer on the GPU if its states fit",
        ("--optimizer-cpu-offload",),
    )


def _large_shares(
    traces: Sequence[TraceReport],
    share_of: Callable[[TraceReport], float],
    least: float,
    rule: str,
    figure: str,
    advice: str,
    flags: tuple[str, ...],
) -> Iterable[Finding]:
    """A finding for each trace in which something takes at least this share of the time."""
    for t in traces:
        share = share_of(t)
        if share >= least:
            yield Finding(rule, where(t), figure.format(share=share, where=where(t)), advice, flags)


def _idle(t: TraceReport, cause: str) -> float:
    return t.breakdown.idle_causes.get(cause, 0.0) / t.breakdown.span


def peak_from_logits(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """A quarter of the peak or more is logits and what is made of them."""
    for m, d in _devices(memory):
        in_log_probs, _ = _held_by(d, _LOG_PROBS)
        _, everything = _held_by(d, (*_LOG_PROBS, *_LOGITS))
        if everything < 0.25:
            continue
        flags = ("--max-tokens-per-gpu", "--log-probs-max-tokens-per-gpu")
        yield Finding(
            "peak from logits",
            _memory_where(m),
            f"logits and their derivatives hold {everything:.0%} of the peak of {d.peak / _GIB:.2f} GiB",
            "fewer tokens in a micro-batch make smaller logits",
            flags[1:] if in_log_probs else flags,
        )


def peak_from_activations(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Two fifths of the peak or more are activations of the layers."""
    return _large_holders(
        memory,
        _LAYERS,
        "peak from activations",
        "activations of the layers",
        "recompute them in the backward pass",
        ("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    )


def peak_from_optimizer(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Two fifths of the peak or more are optimizer states."""
    return _large_holders(
        memory,
        _OPTIMIZER,
        "peak from the optimizer",
        "optimizer states",
        "keep them in the memory of the host",
        ("--optimizer-cpu-offload",),
    )


def _large_holders(
    memory: Sequence[MemoryReport],
    words: tuple[str, ...],
    rule: str,
    holder: str,
    advice: str,
    flags: tuple[str, ...],
) -> Iterable[Finding]:
    """A finding for each peak of which stacks with one of the words hold at least two fifths."""
    for m, d in _devices(memory):
        _, share = _held_by(d, words)
        if share >= 0.40:
            figure = f"{holder} hold {share:.0%} of the peak of {d.peak / _GIB:.2f} GiB"
            yield Finding(rule, _memory_where(m), figure, advice, flags)


def memory_grows(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """A later snapshot holds clearly more at one place than an earlier one."""
    for m in memory:
        if not m.growth or not m.devices:
            continue
        most = m.growth[0]
        if most.grown >= max(64 << 20, 0.05 * m.devices[0].allocated):
            holder = Holder(most.now, 0, most.stack)
            yield Finding(
                "memory grows",
                _memory_where(m),
                f"{most.grown / _GIB:.2f} GiB more than in the snapshot before, held by {holder.place}",
                "something keeps tensors from step to step; a later snapshot shows whether it goes on",
                ("--memory-snapshot-num-steps",),
            )


def out_of_memory(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Says what an OOM asked for, what there was, and what stood in its way."""
    for m, d in _devices(memory):
        if not d.oom:
            continue
        oom = d.oom[-1]
        unused = oom.reserved - oom.allocated
        asked = f"{oom.asked / _GIB:.2f} GiB asked for, {oom.device_free / _GIB:.2f} GiB free on the device"
        if unused >= oom.asked:
            yield Finding(
                "out of memory: fragmentation",
                _memory_where(m),
                f"{asked}; {unused / _GIB:.2f} GiB are reserved and unused, the largest free block is "
                f"{oom.largest_free_block / _GIB:.2f} GiB",
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True lets free blocks join; batches of one size help too",
                ("--use-dynamic-batch-size", "--max-tokens-per-gpu"),
            )
            continue
        holder = d.held[0] if d.held else None
        by = f"; most is held by {holder.place} ({holder.bytes / _GIB:.2f} GiB)" if holder else ""
        yield Finding(
            "out of memory",
            _memory_where(m),
            f"{asked}, {oom.allocated / _GIB:.2f} GiB allocated by this process{by}",
            "smaller micro-batches, recomputation, or less memory for the engine on the same GPU",
            ("--max-tokens-per-gpu", "--recompute-granularity", "--sglang-mem-fraction-static"),
        )


RULES: tuple[Rule, ...] = (
    out_of_memory,
    straggler,
    exposed_communication,
    launch_bound,
    waits_for_data,
    small_decode_batches,
    low_utilisation,
    exposed_copies,
    peak_from_logits,
    peak_from_activations,
    peak_from_optimizer,
    memory_grows,
)


def _devices(memory: Sequence[MemoryReport]) -> Iterable[tuple[MemoryReport, DeviceMemory]]:
    return [(m, d) for m in memory for d in m.devices if d.peak >= 64 << 20]


def _held_by(device: DeviceMemory, words: tuple[str, ...]) -> tuple[bool, float]:
    """Whether, and with which share of the peak, stacks with one of the words hold memory at the peak."""
    held = sum(h.bytes for h in device.peak_holders if any(w in frame.lower() for frame in h.stack for w in words))
    return held > 0, held / device.peak if device.peak else 0.0


def where(t: TraceReport) -> str:
    """Names a trace in a finding."""
    if t.role == "engine":
        return f"{t.label}, rollout {t.rollout}" if t.rollout is not None else t.label
    return f"{t.label} {t.target}".strip()


def _memory_where(m: MemoryReport) -> str:
    return f"{m.label}, {m.kind}"
