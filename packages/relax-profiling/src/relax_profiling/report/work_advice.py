"""Advice on what a device computes: what is no product, what is computed twice, and what nobody needs.

As in :mod:`relax_profiling.report.advice`, a rule is one function from the reports to findings, with its thresholds
beside it, and is silent without enough evidence.
"""

from collections.abc import Callable, Iterable, Sequence

from relax_profiling.analysis.work import ATTENTION, COPIES, ELEMENTWISE, PRODUCTS, Cause, Work
from relax_profiling.report.advice import ENOUGH_LAUNCHES, on_device, where
from relax_profiling.report.model import Finding, MemoryReport, TraceReport
from relax_profiling.trace.flops import reachable_tflops

WorkRule = Callable[[Sequence[TraceReport], Sequence[MemoryReport]], Iterable[Finding]]

_GIB = 2**30


def work_advice(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> list[Finding]:
    """The findings of all rules on computation."""
    return [finding for rule in WORK_RULES for finding in rule(traces, memory)]


def unfused_work(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """A fifth of the computation or more is elementwise operators and copies of torch, each a pass over memory."""
    for t, work in _worked(traces):
        elementwise, copies = work.share(ELEMENTWISE), work.share(COPIES)
        if elementwise + copies < 0.20 or not work.causes:
            continue
        lines = [c.line for c in work.causes[:3] if c.line]
        advice = "fuse them into one kernel (torch.compile, Triton, a library), and keep one element type between them"
        if lines:
            advice += f"; the lines: {'; '.join(dict.fromkeys(lines))}"
        else:
            advice += "; record stacks to see their lines"
        yield Finding(
            "unfused elementwise work and copies",
            where(t),
            f"products are {work.share(PRODUCTS):.0%} and attention {work.share(ATTENTION):.0%} of the computation; "
            f"elementwise operators {elementwise:.0%}, copies {copies:.0%}: {_named(work.causes, work)}",
            advice,
            () if lines else ("--profile-with-stack",),
        )


def _named(causes: Sequence[Cause], work: Work) -> str:
    everything = sum(work.time.values())
    return ", ".join(f"{c.operator} {c.microseconds / everything:.0%} ({c.calls} x)" for c in causes[:4])


def far_below_products(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """A busy device reaches less than six tenths of what matrix products alone reach on it."""
    for t, work in _worked(traces):
        if t.tflops is None or t.breakdown.share("compute") < 0.6:
            continue
        table = reachable_tflops(t.device)
        ceiling, source = (work.fastest_tflops or 0.0), "the fastest products of this trace"
        if table is not None and table > ceiling:
            ceiling, source = table, "bfloat16 products on this device"
        if not ceiling or t.tflops >= 0.6 * ceiling:
            continue
        yield Finding(
            "far below the matrix products",
            where(t),
            f"{t.tflops:.0f} TFLOP/s while the device computes {t.breakdown.share('compute'):.0%} of the time; "
            f"{source} reach {ceiling:.0f}",
            "larger micro-batches make larger products, less recomputation makes fewer of them, fused kernels leave "
            "them more of the time",
            ("--max-tokens-per-gpu", "--recompute-granularity"),
        )


def recompute_with_free_memory(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """Layers are computed twice to save memory, of which a third or more was never used."""
    for t, work in _worked(traces):
        peaks = [d.peak for m in memory if (m.run, m.label) == (t.run, t.label) for d in m.devices]
        peak = max([*peaks, t.allocated_peak or 0])
        if not work.recomputed or not peak or t.device_memory is None or peak > 0.67 * t.device_memory:
            continue
        yield Finding(
            "recomputation while memory is free",
            where(t),
            f"{work.recomputed} forward passes of checkpoints are done twice, while at most {peak / _GIB:.1f} of "
            f"{t.device_memory / _GIB:.1f} GiB are in use",
            "recompute selectively, or fewer layers; each layer that is not recomputed saves a quarter of its time",
            ("--recompute-granularity", "--recompute-num-layers"),
        )


def logits_everywhere(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """The product with the vocabulary is made for every position of a micro-batch, prompts too, and it counts."""
    for t, work in _worked(traces):
        largest = work.largest
        if largest is None or largest.columns < 8192 or not work.tokens or not t.flops:
            continue
        # Forward; the backward pass does twice as much.
        share = 3 * largest.flops / t.flops
        if largest.rows < work.tokens or share < 0.05:
            continue
        yield Finding(
            "logits of every position",
            where(t),
            f"the output layer gives {largest.columns} logits at each of {largest.rows} positions of a micro-batch, "
            f"about {min(share, 1.0):.0%} of all operations",
            "prompts need no logits: select the response positions before the output layer, where the model computes "
            "its logits, and chunk it over tokens",
            (),
        )


def small_prefill_batches(traces: Sequence[TraceReport], memory: Sequence[MemoryReport]) -> Iterable[Finding]:
    """An engine prefills one to three sequences at a time, again and again, for a tenth of its time or more."""
    for t in traces:
        stages = {s.name: s for s in t.stages} if t.role == "engine" else {}
        prefill = stages.get("EXTEND")
        if prefill is None or prefill.steps < 10 or prefill.batch_mean >= 4:
            continue
        share = prefill.time / max(sum(s.time for s in stages.values()), 1.0)
        if share < 0.10:
            continue
        yield Finding(
            "small prefill batches",
            where(t),
            f"{prefill.steps} prefill steps of {prefill.batch_mean:.1f} sequences and {prefill.tokens_mean:.0f} tokens "
            f"in the mean take {share:.0%} of the engine's steps",
            "requests that reach the scheduler together are prefilled together: let it hold them for a moment, and "
            "send more at once",
            ("--sglang-server-concurrency", "--rollout-batch-size", "--over-sampling-batch-size"),
        )


WORK_RULES: tuple[WorkRule, ...] = (
    unfused_work,
    far_below_products,
    recompute_with_free_memory,
    logits_everywhere,
    small_prefill_batches,
)


def _worked(traces: Sequence[TraceReport]) -> Iterable[tuple[TraceReport, Work]]:
    """Training traces with enough work on a device, and that work."""
    for t in on_device(traces, "train"):
        if t.work is not None and t.launches >= ENOUGH_LAUNCHES:
            yield t, t.work
