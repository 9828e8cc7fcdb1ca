"""The report as one self-contained HTML page."""

from collections.abc import Iterable

from relax_profiling.analysis.top import TopEntry
from relax_profiling.report.model import Finding, MemoryReport, Report, TraceReport
from relax_profiling.report.step_drawing import draw
from relax_profiling.report.style import page, table, text
from relax_profiling.report.text import (
    computation,
    idle_causes,
    in_steps,
    milliseconds,
    seen_between,
    size,
    trace_title,
)
from relax_profiling.report.timeline import timeline
from relax_profiling.snapshot.analyse import Holder

_PARTS = (
    ("compute", "compute", "--compute"),
    ("communication_exposed", "communication, exposed", "--comm"),
    ("memory", "memory copies", "--copy"),
    ("idle_in_steps", "idle", "--idle"),
    ("between", "between steps", "--line"),
)


def to_html(report: Report) -> str:
    """A page that opens without a network."""
    body = ["<h1>Profile</h1>", f'<p class="file">{text(", ".join(report.sources))}</p>']
    body.append("<h2>What to change</h2>")
    if report.findings:
        body.append(f'<div class="grid">{"".join(map(_finding, report.findings))}</div>')
    else:
        body.append('<p class="soft">No rule found something to change.</p>')
    if report.timelines:
        body.append(f"<h2>Timeline</h2>{''.join(map(draw, report.timelines))}")
    for role, title in (("train", "Training"), ("engine", "Engines")):
        chosen = [t for t in report.traces if t.role == role]
        if chosen:
            body.append(f"<h2>{title}</h2>{_overview(chosen)}")
            body.append(f'<div class="grid">{"".join(map(_trace, chosen))}</div>')
    if report.memory:
        body.append(f'<h2>Memory</h2><div class="grid">{"".join(map(_memory, report.memory))}</div>')
    if report.problems:
        items = "".join(f"<li>{text(p)}</li>" for p in report.problems)
        body.append(f'<h2>Not read, or only in part</h2><div class="card problem"><ul>{items}</ul></div>')
    return page("Profile", "".join(body))


def memory_page(report: MemoryReport) -> str:
    """The page of one memory recording."""
    return page(f"Memory of {report.label}", f"<h1>Memory of {text(report.label)}</h1>{_memory(report)}")


def _finding(f: Finding) -> str:
    flags = "".join(f"<code>{text(flag)}</code>" for flag in f.flags)
    return (
        f'<div class="card finding"><h3>{text(f.rule)}</h3><p>{text(f.figure)}</p>'
        f'<p class="soft">{text(f.advice)}</p><p class="flags">{flags}</p></div>'
    )


def _overview(traces: list[TraceReport]) -> str:
    """All ranks or engines under each other, for comparison at a glance."""
    if len(traces) < 2:
        return ""
    rows = []
    for t in traces:
        b = t.breakdown
        rows.append(
            [
                trace_title(t),
                milliseconds(b.span),
                milliseconds(t.step_mean) if t.step_mean is not None else "",
                *(f"{b.share(part):.1%}" for part, _, _ in _PARTS),
                f"{b.of_span(t.waits.waits):.1%}" if t.waits else "",
                f"{t.mfu:.1%}" if t.mfu is not None else "",
            ]
        )
    head = [("", False), ("recorded", True), ("step", True), ("compute", True), ("communication", True)]
    head += [("copies", True), ("idle", True), ("between steps", True), ("waits for ranks", True), ("MFU", True)]
    return f'<div class="card" style="margin-bottom:14px">{table(head, rows)}</div>'


def _trace(t: TraceReport) -> str:
    b = t.breakdown
    facts = [t.device, f"{milliseconds(b.span)} recorded", f"{t.events:,} events"]
    if t.step_mean is not None:
        facts.append(f"{len(t.steps)} steps of {milliseconds(t.step_mean)}")
    if t.mfu is not None:
        facts.append(f"MFU {t.mfu:.1%}")
    if t.allocated_peak is not None:
        facts.append(f"peak {size(t.allocated_peak)}")
    if t.waits is not None:
        facts.append(f"last at {t.waits.last} of {t.waits.collectives} collectives")
    facts += computation(t)
    parts = [
        f'<div class="card"><h3>{text(trace_title(t))}</h3><div class="file">{text(t.file)}</div>',
        f'<p class="soft" style="margin:.3em 0">{text(" · ".join(facts))}</p>',
        _bar(t),
    ]
    if t.stages:
        rows = [
            [s.name, s.steps, f"{s.batch_mean:.1f}", s.batch_max, f"{s.tokens_mean:.1f}", milliseconds(s.time)]
            for s in t.stages
        ]
        head = [("stage", False), ("steps", True), ("batch", True), ("largest", True), ("tokens", True), ("time", True)]
        parts.append(table(head, rows))
    if t.communication:
        rows = [
            [c.kind, c.group or "default", c.group_size or "", c.calls, milliseconds(c.time), milliseconds(c.exposed)]
            for c in t.communication
        ]
        head = [("collective", False), ("group", False), ("ranks", True), ("calls", True), ("time", True)]
        parts.append(table([*head, ("exposed", True)], rows))
    parts.append(_top("kernels", t.kernels) + _top("operators, own time", t.operators))
    return "".join(parts) + "</div>"


def _bar(t: TraceReport) -> str:
    b = t.breakdown
    pieces = "".join(
        f'<i style="width:{100 * b.share(part):.2f}%;background:var({color})" title="{text(name)}"></i>'
        for part, name, color in _PARTS
    )
    legend = [
        f'<span><span class="dot" style="background:var({color})"></span>{text(name)} <b>{b.share(part):.1%}</b></span>'
        for part, name, color in _PARTS
    ]
    if b.communication_overlapped:
        legend.append(f"<span>communication behind compute <b>{b.share('communication_overlapped'):.1%}</b></span>")
    causes = [f"<span>{text(name)} <b>{share:.1%}</b></span>" for name, share in idle_causes(b)]
    idle = f'<div class="legend soft"><span>idle:</span>{"".join(causes)}</div>' if causes else ""
    bar = f'<div class="bar" role="img" aria-label="shares of time">{pieces}</div>'
    steps = f'<p class="soft">{text(in_steps(b))}</p>' if seen_between(b) else ""
    return f'{bar}<div class="legend">{"".join(legend)}</div>{idle}{steps}'


def _top(title: str, entries: list[TopEntry]) -> str:
    if not entries:
        return ""
    rows = [[milliseconds(e.microseconds), f"{e.calls:,}", e.name] for e in entries]
    inner = table([("time", True), ("calls", True), ("name", False)], rows)
    return f"<details><summary>top {text(title)}</summary>{inner}</details>"


def _memory(m: MemoryReport) -> str:
    parts = [f'<div class="card"><h3>{text(m.label)}, {text(m.kind)}</h3><div class="file">{text(m.file)}</div>']
    for d in m.devices:
        facts = f"GPU {d.device}: peak {size(d.peak)} at {d.peak_time:.3f} s · at the end {size(d.allocated)} allocated"
        facts += f" of {size(d.reserved)} reserved · largest free block {size(d.largest_free_block)}"
        parts.append(f"<p>{text(facts)}</p>")
        for oom in d.oom:
            parts.append(
                f'<p style="color:var(--warn)">out of memory: {text(size(oom.asked))} asked for, '
                f"{text(size(oom.device_free))} free on the device; asked at {text(oom.stack[0])}</p>"
            )
        parts.append(timeline(d))
        parts.append(_holders("held at the peak", d.peak_holders) + _holders("held at the end", d.held))
    if m.host_peak is not None:
        parts.append(
            f"<p>host memory: peak {text(size(m.host_peak))}</p>{_holders('held at the peak', m.host_holders)}"
        )
    if m.growth:
        grown = [Holder(g.grown, 0, g.stack) for g in m.growth]
        parts.append(_holders("grown since the snapshot before", grown))
    if m.note:
        parts.append(f'<p class="soft">{text(m.note)}</p>')
    return "".join(parts) + "</div>"


def _holders(title: str, holders: Iterable[Holder]) -> str:
    lines = []
    for h in holders:
        stack = "\n".join(h.stack)
        lines.append(
            f'<tr><td class="n">{text(size(h.bytes))}</td><td class="n">{h.blocks or ""}</td>'
            f'<td class="name"><details><summary>{text(h.place)}</summary><pre>{text(stack)}</pre></details></td></tr>'
        )
    if not lines:
        return ""
    head = '<tr><th class="n">size</th><th class="n">blocks</th><th>place</th></tr>'
    return (
        f"<details open><summary>{text(title)}</summary>"
        f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(lines[:12])}</tbody></table></div></details>'
    )
