"""The ``relax-profile`` command."""

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import relax_profiling

# Only the standard library is imported here: --help answers at once, and each command imports what it needs.


class UsageError(ValueError):
    """An argument has a value that cannot be meant; the message names it and the fix."""


def build_parser(program: str = "relax-profile") -> argparse.ArgumentParser:
    """The parser of the command, which another command line may offer under a name of its own."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Profiles SGLang servers, and reads traces and memory recordings: where the time and the memory "
        "go, and what to change.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sglang = commands.add_parser("sglang", help="profile running SGLang servers", allow_abbrev=False)
    sglang.add_argument("--url", action="append", required=True, help="address of a server; repeat for several")
    sglang.add_argument("--out", type=Path, required=True, metavar="DIR", help="run folder, for instance traces/NAME")
    sglang.add_argument("--num-steps", type=int, default=5, metavar="N", help="forward steps; -1: the whole duration")
    sglang.add_argument("--duration", type=float, default=60.0, metavar="S", help="seconds to wait for the steps")
    sglang.add_argument("--rollout-id", type=int, default=0, metavar="ID", help="names the folder rollout_ID")
    sglang.add_argument("--activities", nargs="+", default=["CPU", "GPU"], choices=["CPU", "GPU", "MEM", "RPD"])
    sglang.add_argument("--by-stage", action="store_true", help="prefill and decode in traces of their own")
    sglang.add_argument("--with-stack", action="store_true", help="record Python call stacks")
    sglang.add_argument("--record-shapes", action="store_true", help="record the shapes of operator inputs")
    sglang.add_argument("--api-key", help="of the servers; default: the environment variable SGLANG_API_KEY")

    report = commands.add_parser("report", help="say where time and memory go, and what to change", allow_abbrev=False)
    add_report_arguments(report)

    merge = commands.add_parser("merge", help="one Perfetto file of all traces of a run", allow_abbrev=False)
    merge.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="run folder or trace")
    merge.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="merged .json.gz")

    memory = commands.add_parser("memory", help="the memory timeline as one page", allow_abbrev=False)
    memory.add_argument(
        "snapshot", type=Path, help="snapshot of torch (.pickle, .pickle.gz) or recording of memray (.bin)"
    )
    memory.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the page, .html")
    return parser


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``report``, for a command line that offers it under a name of its own; see :func:`report`."""
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="PATH", help="run folder (traces/NAME, runs/NAME) or single files"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="X", help="peak of the GPU for MFU, instead of the table's"
    )


def main(argv: Sequence[str] | None = None, *, program: str = "relax-profile") -> int:
    """Runs the command; returns the exit status: 0, 1 when something could not be done, 2 for wrong usage."""
    arguments = build_parser(program).parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # a file's name may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    command = {"sglang": _sglang, "report": report, "merge": _merge, "memory": _memory}[arguments.command]
    try:
        with _ended_by_kill():
            return command(arguments)
    except BrokenPipeError:  # for instance `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as e:
        print(f"{program}: {e}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1


@contextlib.contextmanager
def _ended_by_kill() -> Iterator[None]:
    """A kill takes the way of an interrupt, so that no half-written file and no armed server is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(arguments: argparse.Namespace) -> int:
    """``report``: 1 when nothing at all could be read."""
    if arguments.peak_tflops is not None and not arguments.peak_tflops > 0:
        raise UsageError(f"--peak-tflops {arguments.peak_tflops}: give a number above 0, for instance 989 for an H100")
    if arguments.html is not None:
        _check_is_no_input("--html", arguments.html, arguments.paths)
    built = relax_profiling.analyze(*arguments.paths, peak_tflops=arguments.peak_tflops)
    if arguments.html is not None:
        from relax_profiling.report.html import to_html

        _write(arguments.html, to_html(built))
        print(f"report: {arguments.html}", file=sys.stderr)
    if arguments.json:
        print(_json(built.to_json()))
    else:
        from relax_profiling.report.text import to_text

        print(to_text(built), end="")
    return 0 if built.traces or built.memory or built.timelines else 1


def _json(data: dict[str, Any]) -> str:
    import json

    import orjson

    try:
        return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # the name of a file holds bytes that are no text
        return json.dumps(data, indent=2)


def _sglang(arguments: argparse.Namespace) -> int:
    from relax_profiling.recorders.sglang import RolloutProfiler
    from relax_profiling.settings import SGLangProfileSettings

    settings = SGLangProfileSettings(
        sglang_profile=True,
        sglang_profile_num_steps=arguments.num_steps,
        sglang_profile_activities=tuple(arguments.activities),
        sglang_profile_by_stage=arguments.by_stage,
        sglang_profile_with_stack=arguments.with_stack,
        sglang_profile_record_shapes=arguments.record_shapes,
    )
    found = [p.replace("--sglang-profile-", "--") for p in settings.problems()]
    if arguments.duration <= 0:
        found.append(f"--duration {arguments.duration}: give a number of seconds above 0")
    if arguments.rollout_id < 0:
        found.append(f"--rollout-id {arguments.rollout_id}: rollouts count from 0")
    if found:
        raise UsageError("\n".join(found))
    key = arguments.api_key or os.environ.get("SGLANG_API_KEY")
    print(f"asking {len(arguments.url)} servers to record ...", file=sys.stderr)
    profiler = RolloutProfiler(settings, arguments.url, arguments.out / "sglang_trace", api_key=key)
    with profiler.rollout(arguments.rollout_id) as rollout:
        if rollout.started:
            print(f"recording {rollout.started} of {len(arguments.url)} servers ...", file=sys.stderr)
        deadline = time.monotonic() + (arguments.duration if rollout.started else 0.0)
        while time.monotonic() < deadline and not rollout.complete():
            time.sleep(0.2)
    files = [str(path) for trace in rollout.traces for path in trace.files]
    print("\n".join(files), end="\n" if files else "")
    return 0 if all(trace.files for trace in rollout.traces) else 1


def _merge(arguments: argparse.Namespace) -> int:
    from relax_profiling.trace.merge import merge_traces

    count, problems = merge_traces(arguments.paths, arguments.out)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{count} traces in {arguments.out}; open it at https://ui.perfetto.dev")
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from relax_profiling.report.html import memory_page

    _check_is_no_input("--out", arguments.out, [arguments.snapshot])
    built = relax_profiling.analyze(arguments.snapshot)
    for problem in built.problems:
        print(f"relax-profile: {problem}", file=sys.stderr)
    if not built.memory:
        return 1
    _write(arguments.out, memory_page(built.memory[0]))
    print(f"memory timeline: {arguments.out}")
    return 0


def _check_is_no_input(flag: str, out: Path, paths: Sequence[Path]) -> None:
    """Raises :class:`UsageError` when the page would replace a recording that it is made of."""
    from relax_profiling.report.find_files import find_files

    if out.exists() and any(out.samefile(file.path) for file in find_files(paths)[0]):
        raise UsageError(f"{flag} {out} is one of the recordings that are read; name another file")


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8", errors="backslashreplace")
