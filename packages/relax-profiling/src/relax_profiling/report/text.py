"""The report as text for a terminal."""

from relax_profiling.analysis.breakdown import IDLE_CAUSES, Breakdown
from relax_profiling.report.model import MemoryReport, Report, TraceReport
from relax_profiling.timeline.shares import Timeline

_MIB = 2**20


def to_text(report: Report) -> str:
    """The report, advice first."""
    lines: list[str] = []
    if report.findings:
        lines.append("What to change")
        for f in report.findings:
            lines.append(f"  {f.rule} ({f.where})")
            lines.append(f"    {f.figure}")
            lines.append(f"    -> {f.advice}" + (f": {', '.join(f.flags)}" if f.flags else ""))
        lines.append("")
    if report.timelines:
        lines += ["Timeline", *(line for t in report.timelines for line in _timeline(t)), ""]
    for role, title in (("train", "Training"), ("engine", "Engines")):
        chosen = [t for t in report.traces if t.role == role]
        if chosen:
            lines += [title, *(line for t in chosen for line in _trace(t)), ""]
    if report.memory:
        lines += ["Memory", *(line for m in report.memory for line in _memory(m)), ""]
    if report.problems:
        lines += ["Not read, or only in part", *(f"  {p}" for p in report.problems), ""]
    if not report.findings and (report.traces or report.timelines):
        lines.append("No rule found something to change.")
    return "\n".join(lines).rstrip() + "\n"


def trace_title(t: TraceReport) -> str:
    """``rank0_dp0_tp0_pp0 train_overall`` or ``engine0 TP-0, rollout 2``."""
    return f"{t.label}, rollout {t.rollout}" if t.rollout is not None else f"{t.label} {t.target}".strip()


def milliseconds(us: float) -> str:
    """Microseconds in the unit that suits them, milliseconds or seconds."""
    return f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    if 0 < count < _MIB:
        return f"{count / 1024:.1f} KiB"
    return f"{count / _MIB:.1f} MiB" if count < 1024 * _MIB else f"{count / _MIB / 1024:.2f} GiB"


def seen_between(b: Breakdown) -> bool:
    """Whether there is time between marked steps to speak of."""
    return b.share("between") >= 0.001


def idle_causes(b: Breakdown) -> list[tuple[str, float]]:
    """Causes of idle time in the steps, and their shares of the span."""
    shares = {cause: b.of_span(us) for cause, us in b.idle_causes.items() if cause != "between"}
    return [(IDLE_CAUSES[cause], share) for cause, share in shares.items() if share >= 0.001]


def in_steps(b: Breakdown) -> str:
    """The shares of the steps alone: between them a trainer has nothing to do while it is the engines' turn."""
    parts = {
        "compute": b.compute,
        "communication": b.communication_exposed,
        "copies": b.memory,
        "idle": b.idle_in_steps,
    }
    shares = ", ".join(f"{name} {b.of_steps(us):.1%}" for name, us in parts.items())
    return f"of the steps alone: {shares} (between them it is the engines' turn with --colocate)"


def computation(t: TraceReport) -> list[str]:
    """What a trace computes, by kind, and how fast; nothing where nothing computes."""
    work = t.work
    if work is None or not sum(work.time.values()):
        return []
    shares = [f"{kind} {work.share(kind):.1%}" for kind in work.time if work.share(kind) >= 0.001]
    lines = [f"computation: {', '.join(shares)}"]
    if t.tflops is not None and work.fastest_tflops is not None:
        lines.append(f"{t.tflops:.1f} TFLOP/s; the fastest products alone {work.fastest_tflops:.1f}")
    return lines


def _timeline(t: Timeline) -> list[str]:
    judged, setup = t.judged, t.setup
    lines = [f"  {setup.flag}, steps {judged[0].step} to {judged[-1].step}  {t.file}"]
    lines.append(f"    shares of {t.window_in_words}")
    shares = "   ".join(f"{name} {share:.1%}" for name, share in t.trainer.items() if share >= 0.001)
    lines.append(f"    trainer, {t.seconds / len(judged):.2f} s a step: {shares}")
    for name, e in t.engines.items():
        turn = f"   trainer's turn {e.resting:.1%}" if setup.mode == "colocate" else f"   paused {e.paused:.1%}"
        lines.append(f"    {name}: busy {e.busy:.1%}   idle {e.idle:.1%}{turn}   {e.running:.1f} requests while busy")
    return lines


def _trace(t: TraceReport) -> list[str]:
    b = t.breakdown
    lines = [f"  {trace_title(t)}  [{t.device}]  {t.file}"]
    step = f", {len(t.steps)} steps of {milliseconds(t.step_mean)}" if t.step_mean is not None else ""
    lines.append(f"    {milliseconds(b.span)} recorded{step}")
    between = f"   between steps {b.share('between'):.1%}" if seen_between(b) else ""
    lines.append(
        f"    compute {b.share('compute'):.1%}   communication {b.share('communication_exposed'):.1%} exposed, "
        f"{b.share('communication_overlapped'):.1%} overlapped   copies {b.share('memory'):.1%}   "
        f"idle {b.share('idle_in_steps'):.1%}{between}"
    )
    causes = [f"{name} {share:.1%}" for name, share in idle_causes(b)]
    if causes:
        lines.append(f"    idle: {', '.join(causes)}")
    if between:
        lines.append(f"    {in_steps(b)}")
    if t.mfu is not None:
        lines.append(f"    MFU {t.mfu:.1%} ({t.flops / 1e12:.2f} TFLOP in operators with recorded shapes)")
    lines += [f"    {line}" for line in computation(t)]
    for s in t.stages:
        lines.append(
            f"    {s.name}: {s.steps} steps, batch {s.batch_mean:.1f} (largest {s.batch_max}), "
            f"{s.tokens_mean:.1f} tokens a step, {milliseconds(s.time)}"
        )
    if t.waits is not None:
        lines.append(
            f"    last at {t.waits.last} of {t.waits.collectives} collectives; waits {b.of_span(t.waits.waits):.1%} "
            "of the time for later ranks"
        )
    for title, entries in (("kernels", t.kernels[:5]), ("operators, own time", t.operators[:5])):
        if entries:
            lines.append(f"    top {title}:")
            lines += [f"      {milliseconds(e.microseconds):>10}  {e.calls:>6} x  {e.name[:90]}" for e in entries]
    return lines


def _memory(m: MemoryReport) -> list[str]:
    lines = [f"  {m.label}, {m.kind}  {m.file}"]
    for d in m.devices:
        lines.append(
            f"    GPU {d.device}: peak {size(d.peak)} at {d.peak_time:.3f} s; at the end {size(d.allocated)} "
            f"allocated of {size(d.reserved)} reserved, largest free block {size(d.largest_free_block)}"
        )
        for oom in d.oom:
            lines.append(
                f"    out of memory: {size(oom.asked)} asked for at {oom.stack[0]}, {size(oom.device_free)} free"
            )
        lines += [f"      {size(h.bytes):>10}  {h.blocks:>5} blocks  {h.place}" for h in d.peak_holders[:5]]
    if m.host_peak is not None:
        lines.append(f"    host memory: peak {size(m.host_peak)}")
        lines += [f"      {size(h.bytes):>10}  {h.blocks:>5} allocations  {h.place}" for h in m.host_holders[:5]]
    if m.growth:
        lines.append("    grown since the snapshot before:")
        lines += [f"      {size(g.grown):>10}  {g.stack[0] if g.stack else '?'}" for g in m.growth[:5]]
    if m.note:
        lines.append(f"    {m.note}")
    return lines
