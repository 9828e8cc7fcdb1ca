"""One Perfetto file of all traces of a run: every role and rank as processes of their own, on one clock."""

import gzip
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from relax_profiling.analysis.ranks import RankTrace, clock_offsets, match_recordings
from relax_profiling.recorders.trace_files import partial_path
from relax_profiling.report.find_files import FoundFile, find_files
from relax_profiling.trace.load import FURTHEST, Trace, collector_paused, load_trace
from relax_profiling.trace.reader import Event, NotATrace, TraceReader, event_text

logger = logging.getLogger(__name__)

_STEP_PREFIXES = ("train_overall", "ProfilerStep#", "step[")
# Numbers of processes in the merged file: room for the processes and devices of each source.
_PIDS_A_FILE = 1000


def merge_traces(paths: Sequence[Path], out: Path) -> tuple[int, list[str]]:
    """Writes one trace that holds the events of all.

    Args:
        paths: run folders or single traces.
        out: the file, ``.json`` or ``.json.gz``; it must not exist.

    Returns:
        The number of merged files, and what could not be read, in words.

    Raises:
        FileExistsError: when ``out`` exists.
        ValueError: when there is nothing to merge.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; name another file or delete it")
    found, problems = find_files(paths)
    with collector_paused():
        count = _merge(found, problems, out)
    return count, problems


def _merge(found: Sequence[FoundFile], problems: list[str], out: Path) -> int:
    """Merges the files into ``out``, and adds what could not be read to the problems."""
    traces: list[tuple[FoundFile, Trace]] = []
    for file in found:
        if file.role in ("snapshot", "memray"):
            continue
        try:
            traces.append((file, load_trace(file.path).clock_and_collectives()))
            logger.info("read %s", file.path)
        except (NotATrace, OSError) as e:
            problems.append(str(e) if str(file.path) in str(e) else f"{file.path}: {e}")
    if not traces:
        raise ValueError("\n".join(["there is no trace to merge", *problems]))
    offsets = _offsets(traces, problems)
    zero = min((t.base + t.first - offsets[f.path] for f, t in traces if math.isfinite(t.first)), default=0.0)
    partial = partial_path(out.absolute().parent)
    try:
        with gzip.open(partial, "wb", compresslevel=1) if out.suffix == ".gz" else partial.open("wb") as f:
            f.write(b'{"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[\n' % int(zero * 1000))
            first = True
            for number, (file, trace) in enumerate(traces):
                shift = trace.base - offsets[file.path] - zero
                said = trace.problems.copy()
                for events in _moved(file, number, shift, said):
                    f.write((b"" if first else b",\n") + events)
                    first = False
                problems += [f"{file.path}: {p}" for p in said]
                logger.info("merged %s", file.path)
            f.write(b"\n]}\n")
        with out.open("xb"):
            partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return len(traces)


def _offsets(traces: list[tuple[FoundFile, Trace]], problems: list[str]) -> dict[Path, float]:
    """Microseconds by which each trace's clock is ahead, told by the collectives of its recording."""
    offsets = {file.path: 0.0 for file, _ in traces}
    targets: dict[tuple[Path, str], list[RankTrace]] = {}
    for number, (file, trace) in enumerate(traces):
        if trace.collectives:
            targets.setdefault((file.run, _recorded_alone(file)), []).append(RankTrace(file.label, trace, number))
    for (run, what), ranks in targets.items():
        groups, said = match_recordings(ranks)
        problems += [f"{run}, {what}: {s}" for s in said]
        for group in groups:
            for label, offset in clock_offsets({str(rank.number): rank.trace for rank in group}).items():
                offsets[traces[int(label)][0].path] = offset
    return offsets


def _recorded_alone(file: FoundFile) -> str:
    """What may share a recording with the file: a training target, or the ranks of one engine, rollout and stage."""
    if file.role != "engine":
        return file.target
    return " ".join([*re.sub(r"\bTP-\d+", "", file.label).split(), f"rollout {file.rollout}"])


def _moved(file: FoundFile, number: int, shift: float, problems: list[str]) -> Any:
    """The events of one file, as JSON text in pieces, with numbers of their own and on the common clock."""
    unwritable = 0
    pids: dict[Any, int] = {}
    title = f"{file.label}{f' rollout {file.rollout}' if file.rollout is not None else ''} {file.target}".strip()
    title = title.encode("utf-8", "backslashreplace").decode()  # from the name of a file, which need not be text

    def pid(value: Any) -> int:
        key = str(value)
        if key not in pids:
            pids[key] = number * _PIDS_A_FILE + len(pids) + 1
        return pids[key]

    named: set[int] = set()
    for events in TraceReader(file.path).chunks():
        written = bytearray()  # one text, not a list of small ones: each of those takes a kilobyte
        for event in events:
            moved = _move(event, pid, number, shift, title, named)
            if moved is None:
                continue
            text = event_text(moved)
            if text is None:
                unwritable += 1
                continue
            written += text + b",\n"
            if moved.get("cat") == "user_annotation" and str(moved.get("name", "")).startswith(_STEP_PREFIXES):
                mark = {"ph": "i", "s": "p", "cat": "step", "name": f"{title}: {moved['name']}"}
                at = {key: moved.get(key) for key in ("ts", "pid", "tid")}
                written += orjson.dumps({**mark, **at}) + b",\n"
        if written:
            yield bytes(written[:-2])
    if unwritable:
        problems.append(f"{unwritable} events hold numbers or lists that cannot be written again and are left out")
    for p in pids.values():
        if p not in named:
            yield orjson.dumps(_process_name(p, title))


def _process_name(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _move(event: Event, pid: Any, number: int, shift: float, title: str, named: set[int]) -> Event | None:
    moved = event
    if "pid" in moved:
        moved["pid"] = pid(moved["pid"])
    ts = moved.get("ts")
    if isinstance(ts, (int, float)):
        if not -FURTHEST < ts < FURTHEST:
            return None
        moved["ts"] = round(ts + shift, 3)
    elif event.get("ph") != "M":
        return None
    if "id" in moved:  # arrows connect events of one file only
        moved["id"] = f"{number}.{moved['id']}"
    if moved.get("name") == "process_name" and isinstance(moved.get("args"), dict):
        named.add(moved.get("pid", -1))
        moved["args"] = {"name": f"{title} · {moved['args'].get('name', '')}"}
    return moved
