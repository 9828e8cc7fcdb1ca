"""The SGLang profiler against a scripted HTTP server: what a real one does rarely, or only on another host."""

import asyncio
import gzip
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_profiling.cli import main
from relax_profiling.recorders import sglang as sglang_module
from relax_profiling.recorders.sglang import Deadlines, RolloutProfiler
from relax_profiling.settings import SGLangProfileSettings


class Scripted:
    """The state of one scripted server. ``files`` are written at the stop, with these contents."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, bytes] = {"{id}-TP-0.trace.json.gz": gzip.compress(b'{"traceEvents": []}')}
        self.info: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "dp_size": 1}
        self.start_status = 200
        self.stop_status = 200
        self.url = ""
        self.armed: dict[str, Any] | None = None
        self.authorization: set[str | None] = set()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.calls.append((path, body))
        if path == "/server_info":
            return 200, json.dumps(self.info).encode()
        if path == "/start_profile":
            if self.start_status == 200:
                self.armed = body if body["activities"] else None
            return self.start_status, b"Start profiling."
        if self.armed is not None:
            folder = Path(self.armed["output_dir"])
            for name, content in self.files.items():
                (folder / name.format(id=self.armed["profile_id"])).write_bytes(content)
            self.armed = None
        return self.stop_status, b"Stop profiling."

    def names(self) -> list[str]:
        return [path for path, _ in self.calls]


@pytest.fixture
def scripted() -> Iterator[Callable[[], Scripted]]:
    servers: list[http.server.ThreadingHTTPServer] = []

    def make() -> Scripted:
        state = Scripted()

        class Handler(http.server.BaseHTTPRequestHandler):
            def respond(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                state.authorization.add(self.headers.get("Authorization"))
                status, content = state.answer(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = respond
            do_POST = respond

            def log_message(self, *_: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        return state

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


QUICK = Deadlines(start=60, stop=60, files=0.6)
"""For files that are there at once, or never come."""
PATIENT = Deadlines(start=60, stop=60, files=60)


def profiler_of(
    urls: list[str], out: Path, clock: Any = None, deadlines: Deadlines = QUICK, **changes: Any
) -> RolloutProfiler:
    settings = SGLangProfileSettings(sglang_profile=True, **changes)
    return RolloutProfiler(settings, urls, out, deadlines=deadlines, **({"clock": clock} if clock else {}))


def test_the_request_says_everything_explicitly(scripted: Any, tmp_path: Path, frozen_clock: Any) -> None:
    server = scripted()
    with profiler_of([server.url], tmp_path, frozen_clock).rollout(2):
        pass
    assert server.names() == ["/server_info", "/start_profile", "/stop_profile"]
    assert server.calls[1][1] == {
        "output_dir": str(tmp_path / "rollout_2" / ".engine0-1713780123.partial"),
        "profile_id": "1713780123",
        "num_steps": 3,
        "activities": ["CPU", "GPU"],
        "profile_by_stage": False,
        "with_stack": False,
        "record_shapes": False,
    }
    assert [p.name for p in (tmp_path / "rollout_2").iterdir()] == ["engine0-1713780123-TP-0.trace.json.gz"]


def test_nothing_is_asked_outside_the_window(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    profiler = profiler_of([server.url], tmp_path, sglang_profile_step_start=2, sglang_profile_step_end=4)
    for rollout_id in (0, 1, 5):
        with profiler.rollout(rollout_id):
            pass
    assert server.calls == []
    assert [profiler.wants(i) for i in range(6)] == [False, False, True, True, True, False]


def test_the_switch_off_means_off(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    with RolloutProfiler(SGLangProfileSettings(), [server.url], tmp_path).rollout(0):
        pass
    assert server.calls == []


def test_files_are_renamed_whatever_the_server_calls_them(scripted: Any, tmp_path: Path, frozen_clock: Any) -> None:
    server = scripted()
    server.info["tp_size"] = 2
    content = gzip.compress(b"{}")
    server.files = {
        "1713780200.4417-TP-0.trace.json.gz": content,
        "1713780200.4417-TP-1.trace.json.gz": content,
        "1713780201.2-TP-0-memory.pickle": b"x",
    }
    with profiler_of([server.url], tmp_path, frozen_clock).rollout(0) as rollout:
        pass
    assert rollout.traces[0].problems == ()
    assert sorted(p.name for p in (tmp_path / "rollout_0").iterdir()) == [
        "engine0-1713780123-TP-0-memory.pickle",
        "engine0-1713780123-TP-0.trace.json.gz",
        "engine0-1713780123-TP-1.trace.json.gz",
    ]


def test_engines_that_stop_in_the_same_second_keep_their_files_apart(
    scripted: Any, tmp_path: Path, frozen_clock: Any
) -> None:
    servers = [scripted() for _ in range(4)]
    profiler = profiler_of([s.url for s in servers], tmp_path, frozen_clock)
    for _ in range(2):
        with profiler.rollout(7):
            pass
    assert sorted(p.name for p in (tmp_path / "rollout_7").iterdir()) == sorted(
        f"engine{i}-{stamp}-TP-0.trace.json.gz" for i in range(4) for stamp in (1713780123, 1713780124)
    )


def test_fewer_files_than_ranks_are_said(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    server.info["tp_size"] = 2
    with profiler_of([server.url], tmp_path).rollout(0) as rollout:
        pass
    assert len(rollout.traces[0].files) == 1
    assert "1 of 2 traces arrived" in rollout.traces[0].problems[0]


def test_a_server_on_another_host_keeps_its_files_and_we_say_where(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    server.files = {}
    with profiler_of([server.url], tmp_path).rollout(0) as rollout:
        pass
    (problem,) = rollout.traces[0].problems
    assert f"no trace arrived in {tmp_path / 'rollout_0' / '.engine0-'}" in problem
    assert "another host, where its traces are under the same path" in problem
    assert list((tmp_path / "rollout_0").iterdir()) == []


def test_a_file_that_is_still_written_is_waited_for(
    scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = scripted()
    whole = gzip.compress(json.dumps({"traceEvents": [{"name": str(i)} for i in range(5000)]}).encode())
    server.files = {"{id}-TP-0.trace.json.gz": whole[: len(whole) // 2]}
    namespace = RolloutProfiler.__init__.__globals__
    is_whole, seen = namespace["_is_whole"], []

    def looked_at(path: Path) -> bool:
        """The server writes on only after the file was found incomplete."""
        seen.append(bool(is_whole(path)))
        path.write_bytes(whole)
        return seen[-1]

    monkeypatch.setitem(namespace, "_is_whole", looked_at)
    with profiler_of([server.url], tmp_path, deadlines=PATIENT).rollout(0) as rollout:
        pass
    assert not seen[0]
    assert rollout.traces[0].problems == ()
    assert rollout.traces[0].files[0].read_bytes() == whole


def test_a_file_that_never_gets_whole_stays_where_it_is(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    server.files = {"{id}-TP-0.trace.json.gz": gzip.compress(b"x" * 1000)[:-9]}
    with profiler_of([server.url], tmp_path).rollout(0) as rollout:
        pass
    assert rollout.traces[0].files == ()
    assert "still incomplete" in rollout.traces[0].problems[0]
    assert len(list(tmp_path.rglob("*TP-0*"))) == 1


def test_an_engine_that_refuses_to_start_is_stopped_all_the_same_and_hurts_no_other(
    scripted: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = scripted(), scripted()
    bad.start_status = 500
    with profiler_of([bad.url, good.url], tmp_path).rollout(0) as rollout:
        assert rollout.started == 1
    assert bad.names()[-1] == "/stop_profile", "it may be half armed"
    assert "answered 500" in rollout.traces[0].problems[0]
    assert len(rollout.traces[1].files) == 1
    assert f"engine0 ({bad.url}): did not start recording" in caplog.text


def test_a_recording_that_ended_by_itself_is_no_problem(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    server.stop_status = 500
    with profiler_of([server.url], tmp_path).rollout(0) as rollout:
        pass
    assert rollout.traces[0].problems == ()
    assert len(rollout.traces[0].files) == 1


def test_by_stage_is_disarmed_after_the_rollout(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    profiler = profiler_of([server.url], tmp_path, sglang_profile_by_stage=True, sglang_profile_num_steps=-1)
    with profiler.rollout(0):
        pass
    assert server.calls[1][1]["num_steps"] > 10**6, "without a number SGLang's scheduler fails"
    path, body = server.calls[-1]
    assert (path, body["activities"], body["profile_by_stage"]) == ("/start_profile", [], False)


def test_by_stage_waits_for_the_files_of_both_stages(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    (content,) = server.files.values()
    server.files = {"{id}-TP-0-EXTEND.trace.json.gz": content}

    polls = []

    def arrive_late(_: float) -> None:
        polls.append(1)
        for folder in (tmp_path / "rollout_0").glob(".*.partial") if len(polls) > 3 else ():
            (folder / "7-TP-0-DECODE.trace.json.gz").write_bytes(content)

    profiler = profiler_of([server.url], tmp_path, deadlines=PATIENT, sglang_profile_by_stage=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=arrive_late))
        with profiler.rollout(0) as rollout:
            pass
    (trace,) = rollout.traces
    assert trace.problems == ()
    assert sorted(p.name.split("TP-0-")[1].split(".")[0] for p in trace.files) == ["DECODE", "EXTEND"]


def test_a_stage_that_did_not_come_is_named(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    (content,) = server.files.values()
    server.files = {"{id}-TP-0-EXTEND.trace.json.gz": content}
    with profiler_of([server.url], tmp_path, sglang_profile_by_stage=True).rollout(0) as rollout:
        pass
    (trace,) = rollout.traces
    assert len(trace.files) == 1
    assert trace.problems == ("no trace of the stage DECODE: it did not come while the engine was recorded",)


def test_the_error_of_the_rollout_is_the_one_that_surfaces(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    server.stop_status = 500
    server.files = {}
    with pytest.raises(KeyError, match="first"), profiler_of([server.url], tmp_path).rollout(0):
        raise KeyError("first")
    assert server.names()[-1] == "/stop_profile"


async def test_a_cancelled_rollout_is_stopped(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    profiler = profiler_of([server.url], tmp_path)
    entered = asyncio.Event()

    async def rollout() -> None:
        async with profiler.rollout(0):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(rollout())
    await asyncio.wait_for(entered.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 60)
    assert server.names()[-1] == "/stop_profile"
    assert server.armed is None


def test_settings_with_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--sglang-profile-num-steps 0"):
        RolloutProfiler(SGLangProfileSettings(sglang_profile=True, sglang_profile_num_steps=0), [], tmp_path)


def test_an_api_key_is_sent(scripted: Any, tmp_path: Path) -> None:
    server = scripted()
    with RolloutProfiler(
        SGLangProfileSettings(sglang_profile=True), [server.url], tmp_path, api_key="s3cret", deadlines=QUICK
    ).rollout(0) as rollout:
        pass
    assert rollout.traces[0].problems == ()
    assert server.authorization == {"Bearer s3cret"}


def test_the_command_profiles_several_servers(
    scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [scripted(), scripted()]
    urls = [a for s in servers for a in ("--url", s.url)]
    arguments = ["sglang", *urls, "--num-steps", "5", "--out", str(tmp_path), "--duration", "0.3", "--with-stack"]
    assert main(arguments) == 0
    printed = [Path(line) for line in capsys.readouterr().out.split()]
    assert [p.name.split("-")[0] for p in printed] == ["engine0", "engine1"]
    assert all(p.parent == tmp_path / "sglang_trace" / "rollout_0" and p.exists() for p in printed)
    assert servers[0].calls[1][1]["num_steps"] == 5
    assert servers[0].calls[1][1]["with_stack"] is True


def test_the_command_says_when_a_server_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["sglang", "--url", "http://127.0.0.1:9", "--out", str(tmp_path), "--duration", "0.1"]) == 1
    assert "no answer from http://127.0.0.1:9" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--num-steps", "0"], "--num-steps 0"), (["--duration", "0"], "--duration"), (["--rollout-id", "-1"], "from 0")],
)
def test_the_command_refuses_impossible_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["sglang", "--url", "http://127.0.0.1:9", "--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err
