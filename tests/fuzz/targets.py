"""What is fuzzed: how a case is made from a seed, and what reading it may do.

Each target makes an input from a seeded generator and reads it as a user's would be read. It may be accepted or refused
with the errors that are meant for users; anything else, also a cost out of proportion to the input, is a fault.
"""

import contextlib
import dataclasses
import functools
import json
import pickle
import random
import shutil
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from char_tokenizer import char_tokenizer
from fuzz.mutations import PICKLE_PIECES, TEXTS, TRACE_PIECES, changed, damaged, packed, value

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
RECORDED = ROOT / "tests" / "profiling" / "data"
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of input. ``run`` makes a case in an empty folder and reads it; ``cases`` are run in the test suite."""

    name: str
    run: Callable[[random.Random, Path], None]
    cases: int


def run_case(target: Target, seed: int, number: int, folder: Path) -> None:
    """Runs one case; the same seed and number make the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    target.run(random.Random(f"{target.name} {seed} {number}"), folder)


class TooMuch(AssertionError):
    """Reading cost more memory than the input can be worth."""


@contextlib.contextmanager
def memory_bound(limit: int) -> Iterator[None]:
    """Holds that no more than ``limit`` bytes come to be in use inside."""
    tracemalloc.start()
    try:
        yield
        used = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if used > limit:
        raise TooMuch(f"{used >> 20} MiB were used where {limit >> 20} MiB are enough")


# ---------------------------------------------------------------------- settings


def _settings(rng: random.Random, folder: Path) -> None:
    """A configuration file, the environment and the command line, with any values for any options."""
    from relax_cli.checks.plan import plan_text
    from relax_cli.config.export import to_toml
    from relax_cli.config.options import namespace
    from relax_cli.config.resolution import resolve
    from relax_cli.config.run_config import ConfigError

    options = list(namespace().options)
    content = (EXAMPLE / "smoke.toml").read_text().replace("${config_dir}", str(EXAMPLE))
    words, environment = [], {}
    kind = rng.choice(("toml", "yaml"))
    if kind == "yaml":
        content = content.replace(" = ", ": ")
    for _ in range(rng.randrange(4)):
        name, new = rng.choice(options), value(rng)
        where = rng.randrange(3)
        if where == 0:
            content += f"\n{name}{': ' if kind == 'yaml' else ' = '}{_written(new, kind)}"
        elif where == 1:
            words += [f"--{name.replace('_', '-')}", *([] if rng.random() < 0.2 else [str(new).replace("\0", "")])]
        else:
            environment[f"RELAX_{name.upper()}"] = str(new)
    if rng.random() < 0.15:
        words += ["--sglang-" + rng.choice(("page-size", "log-level", "nope", "model-impl")), rng.choice(TEXTS)]
    text = content.encode("utf-8", "surrogatepass")
    path = folder / f"run.{kind}"
    path.write_bytes(
        damaged(rng, text, (b"[", b"= ", b"\0", b"!!int x", b"&a *a", b"<<: ")) if rng.random() < 0.4 else text
    )
    with contextlib.suppress(ConfigError):
        config = resolve([*words, "--config", str(path), "--dry-run"], environment)
        plan_text(config)
        to_toml(config)


def _written(new: Any, kind: str) -> str:
    if isinstance(new, bool) or new is None:
        return {True: "true", False: "false", None: "null" if kind == "yaml" else "none"}[new]
    if isinstance(new, int):
        # More digits than Python turns into text.
        return str(new) if abs(new) < 10**300 else "9" * 5000
    return json.dumps(new) if isinstance(new, str | list | dict) else repr(new)


# ---------------------------------------------------------------------- rows


def _rows(rng: random.Random, folder: Path) -> None:
    """Rows of prompt data: read the same in memory and streaming, or refused with file and line; labels too."""
    from relax_data.errors import DataError
    from relax_data.prompts.open import open_prompts
    from relax_data.settings import DataSettings
    from relax_rollout.rewards.registry import LABEL_PROBLEMS

    good: dict[str, Any] = {"input": "1+1=", "label": "2", "metadata": {"a": 1}}
    if chat := rng.random() < 0.5:
        good["input"] = [
            {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
            {"role": "user", "content": "a"},
        ]
        good["tools"] = [{"type": "function", "function": {"name": "f"}}]
    rows = [changed(rng, good) if rng.random() < 0.5 else good for _ in range(8)]
    text = "\n".join(json.dumps(row)[: 1 << 20] for row in rows).encode()
    name = rng.choice(("rows.jsonl", "rows.jsonl.gz"))
    if rng.random() < 0.4:
        text = damaged(rng, text, (b"\n", b"\r\n", b"NaN", b"[" * 3000, b"\\ud83d", b"\0", b"\xff", b"9" * 5000))
    path = folder / name
    path.write_bytes(packed(rng, text) if name.endswith(".gz") else text)
    settings = DataSettings(
        prompt_data=(str(path),),
        label_key=rng.choice(("label", None)),
        tool_key="tools" if chat else None,
        apply_chat_template=chat,
        system_prompt=rng.choice((None, "Be brief.")) if chat else None,
        multimodal_keys=rng.choice((None, {"image": "label"})),
        skip_bad_rows=rng.random() < 0.6,
        rollout_max_prompt_len=rng.choice((None, 3, 40)),
    )
    read = []
    for streaming in (False, True):
        each = dataclasses.replace(settings, use_streaming_dataset=streaming)
        found: list[Any] = []
        with contextlib.suppress(DataError):
            source = open_prompts(each, _tokenizer(), num_epoch=1)
            while prompts := source.next(3):
                found += prompts
            json.dumps(source.state_dict())
            found.append("the end")
        read.append(found)
    _first_rows_are_the_rows(str(path))
    whole, streamed = read
    if whole and whole[-1] == "the end" and streamed and streamed[-1] == "the end":
        assert [p.source for p in whole[:-1]] == [p.source for p in streamed[:-1]]
    for prompt in whole[:-1]:
        for problem in LABEL_PROBLEMS.values():
            problem(prompt.label)


def _first_rows_are_the_rows(path: str) -> None:
    from relax_data.errors import DataError
    from relax_data.prompts.preview import first_rows
    from relax_data.readers.files import FileSlice
    from relax_data.readers.open import open_rows

    try:
        rows = open_rows(path)
    except DataError:
        return
    count = min(16, rows.count)
    all_rows = rows.read(0, count).rows(range(count)) if count else []
    rows.close()
    first = first_rows(FileSlice(path), 16)
    assert list(map(repr, (r.row for r in first))) == [repr(r) for r in all_rows if r is not None]


_TOKENIZER: list[Any] = []


def _tokenizer() -> Any:
    if not _TOKENIZER:
        _TOKENIZER.append(char_tokenizer())
    return _TOKENIZER[0]


# ---------------------------------------------------------------------- traces


_BROKEN = b'{"name": "say "aloud"", "args": [{"b": 1}, {"c": 2}]}'
_BASE = 1_790_000_000_000_000_000


def _traces(rng: random.Random, folder: Path) -> None:
    """Traces of ranks and engines, damaged anywhere: a report of what is there, a merged file that can be read."""
    from relax_profiling.report.build import build_report
    from relax_profiling.report.html import to_html
    from relax_profiling.report.text import to_text
    from relax_profiling.trace.merge import merge_traces

    size = pieces = 0
    for rank in range(rng.choice((1, 1, 2))):
        text = _trace_text(rng)
        if rng.random() < 0.8:
            text = damaged(rng, text, (*TRACE_PIECES, _BROKEN + b","))
        if compressed := rng.random() < 0.5:
            if rng.random() < 0.04:  # a small file that unpacks to megabytes
                piece = rng.choice((b" ", b"[],", b"{", b"9"))
                at = text.index(b"[") + 1
                text = text[:at] + piece * ((6 * _MIB) // len(piece)) + text[at:]
            pieces += text.count(b"{")
            text = packed(rng, text)
        name = rng.choice(("train_overall_rank{0}_dp{0}_tp0_pp0.171.json", "engine{0}-1713780123-TP-0.trace.json"))
        path = folder / (name.format(rank) + ".gz" * compressed)
        path.write_bytes(text)
        size += len(text)
        pieces += 0 if compressed else text.count(b"{")
    with memory_bound(200 * _MIB + 100 * size), _few_loads(200 + 4 * pieces):
        report = build_report([folder])
    json.dumps(report.to_json())
    to_text(report)
    to_html(report)
    merged = folder / "merged.json"
    with memory_bound(200 * _MIB + 100 * size), contextlib.suppress(ValueError):
        merge_traces([folder], merged)
    if merged.exists():
        orjson.loads(merged.read_bytes())
    _only_the_damaged_event_is_lost(rng, folder / "one.json")


def _only_the_damaged_event_is_lost(rng: random.Random, path: Path) -> None:
    from relax_profiling.trace.reader import TraceReader

    events = [{"name": str(i), "args": [{"a": i}, {"b": i}]} for i in range(rng.choice((1, 5, 200)))]
    written = [json.dumps(e).encode() for e in events]
    written.insert(rng.randrange(len(written) + 1), rng.choice((_BROKEN, b'{"name": }', b'{"a" "b"}')))
    tail = {"deviceProperties": [{"id": 0}, {"id": 1}], "baseTimeNanoseconds": _BASE, "x": [{"y": 1}]}
    path.write_bytes(b'{"traceEvents": [' + b",".join(written) + b"], " + json.dumps(tail).encode()[1:])
    reader = TraceReader(path)
    found = [e for chunk in reader.chunks() for e in chunk]
    path.unlink()
    assert [e for e in found if e in events] == events
    assert reader.meta == tail


@contextlib.contextmanager
def _few_loads(limit: int) -> Iterator[None]:
    """Holds that the reader of traces tries no more texts as JSON than ``limit``."""
    from relax_profiling.trace import reader

    calls = 0

    def counted(loads: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return loads(*arguments, **options)

        return call

    parts: Any = reader
    before = parts.orjson, parts.json
    parts.orjson = SimpleNamespace(**{**vars(orjson), "loads": counted(orjson.loads)})
    parts.json = SimpleNamespace(**{**vars(json), "loads": counted(json.loads)})
    try:
        yield
    finally:
        parts.orjson, parts.json = before
    if calls > limit:
        raise TooMuch(f"{calls} texts were tried as JSON where {limit} are enough")


def _trace_text(rng: random.Random) -> bytes:
    events: list[dict[str, Any]] = []
    for i in range(rng.choice((3, 30))):
        common = {"ph": "X", "pid": 0, "tid": 7, "ts": 10.0 * i, "dur": 6.0}
        arguments = {"correlation": i, "device": 0, "External id": i}
        events += [
            {**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": arguments},
            {**common, "cat": "kernel", "name": "gemm<float>", "ts": 10.0 * i + 3, "args": arguments},
            {**common, "cat": "cpu_op", "name": "aten::mm", "args": {"Input Dims": [[2, 2], [2, 2]]}},
        ]
    collective = {"Collective name": "allreduce", "Group size": 2, "Process Group Ranks": "[0, 1]", "device": 0}
    for i in range(3):
        common = {"ph": "X", "pid": 0, "tid": 9, "ts": 100.0 * i, "dur": 40.0}
        events.append({**common, "cat": "kernel", "name": "ncclDevKernel_AllReduce", "args": collective})
        events.append(
            {**common, "cat": "user_annotation", "name": rng.choice(("train_overall#1", "step[DECODE bs=2]"))}
        )
    events = [changed(rng, e) if rng.random() < 0.1 else e for e in events]
    tail = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "baseTimeNanoseconds": rng.choice((0, _BASE))}
    body = ",\n".join(json.dumps(e) for e in events)
    return ('{"schemaVersion": 1, "traceEvents": [' + body + "], " + json.dumps(tail)[1:]).encode("utf-8", "replace")


# ---------------------------------------------------------------------- timelines


def _timelines(rng: random.Random, folder: Path) -> None:
    """Timelines of runs whose lines have other values or are damaged: a report of those that are whole."""
    from relax_profiling.report.build import build_report
    from relax_profiling.report.html import to_html
    from relax_profiling.report.text import to_text

    lines = []
    for step in range(rng.randrange(1, 9)):
        line = _timeline_line(rng, step)
        lines.append(json.dumps(changed(rng, line) if rng.random() < 0.4 else line).encode("utf-8", "replace"))
    content = b"\n".join(lines)
    if rng.random() < 0.3:
        content = damaged(rng, content, (b"\n", b"1e999", b"[", b'"idle"'))
    (folder / "timeline.jsonl").write_bytes(content)
    with memory_bound(16 * _MIB + 100 * len(content)):
        report = build_report([folder])
        json.dumps(report.to_json())
        to_text(report)
        to_html(report)
    assert report.timelines or report.problems


def _timeline_line(rng: random.Random, step: int) -> dict[str, Any]:
    mode = rng.choice(("fully_async", "colocate"))
    sizes = ("train_gpus", "train_unit", "engine_gpus", "gpus_per_engine", "rollout_batch_size", "max_staleness")
    run = {"mode": mode, "device": "cuda", "over_sampling_batch_size": 9, **{n: rng.randrange(1, 9) for n in sizes}}
    names = ("generate", "train_step", "wait_for_rollout", "pause", "weight_update", "save", "eval", "other")
    phases = [[rng.choice(names), t, t + rng.random()] for t in range(rng.randrange(6))]
    states = ("busy", "idle", "paused")
    engine = {
        "seconds": {state: rng.choice((0.0, rng.random())) for state in states} | {"busy": 0.1},
        "running": {state: rng.choice((0.0, 9 * rng.random())) for state in states},
        "intervals": [[rng.choice(states), t, t + 1] for t in range(rng.randrange(4))],
    }
    return {
        **{"step": step, "start": 1_790_000_000.0 + 9 * step, "end": 9.0, "seconds": 9.0, "run": run, "phases": phases},
        "engines": {f"engine{i}": engine for i in range(rng.randrange(3))},
    }


# ---------------------------------------------------------------------- snapshots


def _snapshots(rng: random.Random, folder: Path) -> None:
    """Memory snapshots whose opcodes or fields are damaged, small ones that ask for much, and shared lists."""
    from relax_profiling.report.build import build_report
    from relax_profiling.report.text import to_text

    snapshot = _snapshot(rng)
    content = pickle.dumps(snapshot, rng.randrange(pickle.HIGHEST_PROTOCOL + 1))
    kind = rng.randrange(4)
    if kind == 0:
        content = damaged(rng, content, PICKLE_PIECES)
    elif kind == 1:
        content = b"\x80\x04}" + b"".join(rng.choice(PICKLE_PIECES) for _ in range(rng.randrange(1, 8))) + b"."
    elif kind == 2:
        content = content[:-1] + rng.choice(PICKLE_PIECES) * rng.choice((1, 30_000)) + b"."
    name = "x_snapshot.pickle" + ".gz" * (rng.random() < 0.3)
    (folder / name).write_bytes(packed(rng, content) if name.endswith(".gz") else content)
    with memory_bound(16 * _MIB + 100 * len(content)):
        report = build_report([folder])
        json.dumps(report.to_json())
        to_text(report)


def _snapshot(rng: random.Random) -> Any:
    frames = [{"filename": "/app/train.py", "name": "f", "line": 3}] * rng.choice((0, 1, 3))
    block = {"size": 64, "requested_size": 60, "address": 4096, "state": "active_allocated", "frames": frames}
    segment = {"device": 0, "address": 4096, "total_size": 128, "blocks": [block, {**block, "state": "inactive"}]}
    actions = ("alloc", "free_requested", "free_completed", "segment_alloc", "oom", "snapshot")
    events = [
        {"action": rng.choice(actions), "addr": 4096 * i, "size": 64, "stream": 0, "time_us": i, "frames": frames}
        for i in range(rng.choice((2, 20)))
    ]
    # A list a second time takes two bytes: thousands of them times thousands of events would take minutes.
    times = rng.choice((1, 1, 1, 3000))
    segments = [segment] * times if rng.random() < 0.5 else [segment]
    whole = {"segments": segments, "device_traces": [events * times] * times, "allocator_settings": {}}
    return changed(rng, whole) if rng.random() < 0.4 and times == 1 else whole


# ---------------------------------------------------------------------- the JSON of models and checkpoints


HELDOUT = str(EXAMPLE / "data" / "heldout.jsonl")


@functools.cache
def _whole_checkpoint() -> dict[str, bytes]:
    """A model folder and a checkpoint, by path: every case begins with the same."""
    with tempfile.TemporaryDirectory() as folder:
        _make_checkpoint(Path(folder))
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def _make_checkpoint(folder: Path) -> None:
    from relax_data.prompts.open import open_prompts
    from relax_data.serialization import STATE_FORMAT
    from relax_data.settings import DataSettings
    from relax_train.checkpoint import manifest
    from relax_train.checkpoint.folders import set_latest

    model, saved = folder / "model", folder / "saved" / "rollout_4"
    shutil.copytree(EXAMPLE / "model", model)
    saved.mkdir(parents=True)
    settings = DataSettings(prompt_data=(HELDOUT,), label_key="label")
    ones = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1)
    ones |= dict.fromkeys(("expert_model_parallel_size", "context_parallel_size", "data_parallel_size"), 1)
    content = {
        "format": manifest.FORMAT,
        "rollout_id": 4,
        "world_size": 1,
        "layout": {**ones, "expert_tensor_parallel_size": 1},
        "dtype": "float32",
        "model": manifest.architecture(json.loads((model / "config.json").read_text())),
        "optimizer": {"name": manifest.OPTIMIZER, "steps": 5},
        "scheduler": {"num_steps": 5},
        "extra": {"rollout": {"format": STATE_FORMAT, "source": open_prompts(settings, _tokenizer()).state_dict()}},
    }
    (saved / manifest.MANIFEST).write_text(json.dumps(content))
    (saved / "__0_0.distcp").write_bytes(bytes(100))
    (saved / ".metadata").write_bytes(b"... __0_0.distcp ...")
    for name in ("common.pt", "metadata.json", "rng_0.pt"):
        (saved / name).touch()
    manifest.record_files(saved)
    set_latest(saved.parent, saved.name)


def _checkpoints(rng: random.Random, folder: Path) -> None:
    """A model folder and a checkpoint, one of whose JSON files is damaged: the plan goes on or names what is wrong."""
    from relax_cli.checks.plan import plan_text
    from relax_cli.config.resolution import resolve
    from relax_cli.config.run_config import ConfigError
    from relax_train.checkpoint import manifest

    for name, content in _whole_checkpoint().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    model, saved = folder / "model", folder / "saved" / "rollout_4"
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files = [model / name for name in names] + [saved / manifest.MANIFEST] * 3 + [saved / "files.json"] * 2
    file = rng.choice([*files, saved.parent / "latest"])
    if rng.random() < 0.5 and file.suffix == ".json":
        file.write_bytes(json.dumps(changed(rng, json.loads(file.read_text()))).encode("utf-8", "replace"))
    else:
        file.write_bytes(damaged(rng, file.read_bytes(), (b"[" * 3000, b"NaN", b"9" * 5000, b"null", b"{", b"\0")))
    if file.name == manifest.MANIFEST and rng.random() < 0.7:
        (saved / "files.json").unlink()  # else its checksum says it first
        manifest.record_files(saved)
    words = ["--hf-checkpoint", str(model), "--prompt-data", HELDOUT, "--label-key", "label"]
    words += ["--rm-type", "exact-match"]
    words += ["--load", str(saved.parent), "--num-rollout", "9", "--n-samples-per-prompt", "4", "--dry-run"]
    words += ["--apply-chat-template"] * (rng.random() < 0.3)
    try:
        plan_text(resolve(words, {}))
    except ConfigError as error:
        named = "\n".join(error.problems)
    else:
        named = ""
    if file.suffix == ".json" and not _is_object(file):
        assert file.name in named or (file.name == manifest.MANIFEST and "files.json" in named), named


def _is_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False


TARGETS = (
    Target("settings", _settings, 400),
    Target("rows", _rows, 500),
    Target("traces", _traces, 200),
    Target("timelines", _timelines, 200),
    Target("snapshots", _snapshots, 200),
    Target("checkpoints", _checkpoints, 200),
)
