"""Builds the report from the files of one or more runs."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_profiling.analysis.breakdown import device_breakdown, host_breakdown, step_spans
from relax_profiling.analysis.communication import communication_kinds
from relax_profiling.analysis.ranks import RankTrace, match_recordings, rank_waits
from relax_profiling.analysis.stages import engine_stages
from relax_profiling.analysis.top import top_kernels, top_operators
from relax_profiling.analysis.work import device_work, host_work
from relax_profiling.report.advice import find_advice
from relax_profiling.report.find_files import FoundFile, find_files
from relax_profiling.report.model import MemoryReport, Report, TraceReport
from relax_profiling.report.step_advice import step_advice
from relax_profiling.report.work_advice import work_advice
from relax_profiling.snapshot.analyse import DeviceMemory, analyse_snapshot, growth
from relax_profiling.snapshot.memray_file import read_memray
from relax_profiling.snapshot.unpickle import NotASnapshot, load_snapshot
from relax_profiling.timeline.read import FILE, read_timeline, run_folders
from relax_profiling.timeline.shares import Timeline
from relax_profiling.trace.flops import peak_tflops
from relax_profiling.trace.load import GpuColumns, Trace, collector_paused, load_trace
from relax_profiling.trace.reader import NotATrace

_TOP = 10
# A holder list is shown to this depth; the sums of the rest are of no use to a reader.
_HOLDERS = 20


def build_report(paths: Sequence[Path], *, peak: float | None = None) -> Report:
    """Reads everything under the paths. A file that cannot be read is a problem in the report, never the end of it.

    Args:
        paths: run folders (``traces/NAME``), folders of runs, or single files.
        peak: dense peak of the GPU in TFLOP/s, in place of the table's.
    """
    found, problems = find_files(paths)
    timelines = _read_timelines(paths, problems)
    if not found and not timelines and not problems:
        problems.append(f"no traces, no memory recordings and no runs under {', '.join(map(str, paths))}")
    with collector_paused():
        traces = _read_traces([f for f in found if f.role in ("train", "engine", "trace")], peak, problems)
    memory = _read_memory([f for f in found if f.role in ("snapshot", "memray")], problems)
    findings = step_advice(timelines) + find_advice(traces, memory) + work_advice(traces, memory)
    return Report([str(p) for p in paths], traces, memory, findings, problems, timelines)


def _read_timelines(paths: Sequence[Path], problems: list[str]) -> list[Timeline]:
    folders: list[Path] = []
    for path in paths:
        with contextlib.suppress(OSError):  # a path that cannot be looked into was named before, with the traces
            folders += (folder for folder in run_folders(path) if folder not in folders)
    timelines: list[Timeline] = []
    for folder in folders:
        file = folder / FILE
        if not file.is_file():
            problems.append(
                f"{folder}: no {FILE} in it, so there is no timeline of trainer and engines; relax train writes it "
                "with the first step that ends"
            )
            continue
        try:
            steps, said = read_timeline(file)
        except OSError as e:
            problems.append(f"{file}: {e.strerror or e}")
            continue
        problems += said
        if steps:
            timelines.append(Timeline(str(file), steps))
    return timelines


def _read_traces(files: list[FoundFile], peak: float | None, problems: list[str]) -> list[TraceReport]:
    reports: list[TraceReport] = []
    ranks: dict[tuple[Path, str], list[RankTrace]] = {}
    for file in files:
        try:
            trace = load_trace(file.path)
            report = describe_trace(file, trace, peak)
        except (NotATrace, OSError) as e:
            problems.append(str(e) if str(file.path) in str(e) else f"{file.path}: {e}")
            continue
        problems += [f"{file.path}: {p}" for p in trace.problems]
        if not trace.gpus and not trace.threads:
            problems.append(f"{file.path}: holds neither device activities nor operators")
            continue
        if report.role == "train" and trace.collectives:
            rank = RankTrace(file.label, trace.clock_and_collectives(), len(reports))
            ranks.setdefault((file.run, file.target), []).append(rank)
        reports.append(report)
    for (run, target), of_target in ranks.items():
        groups, said = match_recordings(of_target)
        problems += [f"{run}, {target}: {s}" for s in said]
        for group in groups:
            for label, waited in rank_waits({str(rank.number): rank.trace for rank in group}).items():
                i = int(label)
                reports[i] = dataclasses.replace(reports[i], waits=waited)
    return reports


def describe_trace(file: FoundFile, trace: Trace, peak: float | None = None) -> TraceReport:
    """The report of one trace, of its busiest device."""
    role = file.role
    if role == "trace":
        role = "engine" if any("sglang" in p for p in trace.processes) else "train"
    gpu = _busiest(trace)
    breakdown = device_breakdown(trace, gpu) if gpu is not None else host_breakdown(trace)
    # An engine replays CUDA graphs, whose operators are not in the trace: a share of them would mislead.
    mfu = _mfu(trace, breakdown.span, peak) if role == "train" else None
    return TraceReport(
        role=role,
        run=str(file.run),
        label=file.label,
        file=str(file.path),
        events=trace.events,
        device=(trace.gpu_name or "GPU") if gpu is not None else "CPU",
        breakdown=breakdown,
        kernels=top_kernels(trace, gpu, _TOP) if gpu is not None else [],
        operators=top_operators(trace, _TOP),
        communication=communication_kinds(trace, gpu) if gpu is not None else [],
        target=file.target,
        rollout=file.rollout,
        start=trace.base + trace.first if trace.base else 0.0,
        steps=[e - s for _, s, e in step_spans(trace)] if role == "train" else [],
        flops=sum(trace.flops.values()),
        mfu=mfu,
        allocated_peak=max(trace.allocated.values(), default=None),
        stages=engine_stages(trace) if role == "engine" else [],
        launches=len(gpu) if gpu is not None else 0,
        work=device_work(trace, gpu) if gpu is not None else host_work(trace),
        device_memory=trace.gpu_memory,
    )


def _busiest(trace: Trace) -> GpuColumns | None:
    return max(trace.gpus.values(), key=len, default=None)


def _mfu(trace: Trace, span: float, peak: float | None) -> float | None:
    """Time that the counted operations take at the peak, over the time they took. None when the peak is not known."""
    if not trace.flops or span <= 0:
        return None
    seconds = 0.0
    for dtype, flops in trace.flops.items():
        top = peak or peak_tflops(trace.gpu_name, dtype)
        if top is None:
            # A few integer or float64 operations do not matter; a model of an unknown type does.
            if flops > 0.01 * sum(trace.flops.values()):
                return None
            continue
        seconds += flops / (top * 1e12)
    return seconds / (span / 1e6)


def _read_memory(files: list[FoundFile], problems: list[str]) -> list[MemoryReport]:
    reports: list[MemoryReport] = []
    for file in sorted(files, key=lambda f: (str(f.run), f.label, f.stamp, f.path.name)):
        read: Callable[[FoundFile], MemoryReport] = _read_snapshot if file.role == "snapshot" else _read_host
        try:
            report = read(file)
        except (NotASnapshot, ValueError, OSError) as e:
            problems.append(str(e) if str(file.path) in str(e) else f"{file.path}: {e}")
            continue
        earlier = [r for r in reports if (r.run, r.label) == (report.run, report.label) and r.devices]
        if earlier and report.devices and report.kind == earlier[-1].kind == "snapshot":
            report = dataclasses.replace(report, growth=growth(earlier[-1].devices[0], report.devices[0])[:_HOLDERS])
        reports.append(report)
    return [dataclasses.replace(r, devices=[_shown(d) for d in r.devices]) for r in reports]


def _shown(d: DeviceMemory) -> DeviceMemory:
    return dataclasses.replace(d, peak_holders=d.peak_holders[:_HOLDERS], held=d.held[:_HOLDERS])


def _read_snapshot(file: FoundFile) -> MemoryReport:
    devices = analyse_snapshot(load_snapshot(file.path))
    kind = "out of memory" if any(d.oom for d in devices) else "snapshot"
    return MemoryReport(str(file.run), file.label, str(file.path), kind, file.stamp, devices)


def _read_host(file: FoundFile) -> MemoryReport:
    host = read_memray(file.path)
    run, path = str(file.run), str(file.path)
    if host is None:
        note = f"to read it here: pip install memray; or: memray flamegraph {file.path.name}"
        return MemoryReport(run, file.label, path, "memray", file.stamp, note=note)
    return MemoryReport(run, file.label, path, "memray", file.stamp, host_peak=host.peak, host_holders=host.holders)
