"""Starting and losing a real SGLang server: what users see, and that nothing is left behind."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_gate import KEY, Gate, underway
from relax_rollout.engines.base import EngineDied, GenerateRequest, SamplingParams
from relax_rollout.engines.sglang import cpu
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.log import last_lines, last_words
from relax_rollout.engines.sglang.process.supervisor import shared_memory
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings


def server(model: Path, log: Path, **options: Any) -> SGLangServer:
    return SGLangServer(
        options.pop("settings", SGLangSettings()),
        model_path=model,
        name="engine0",
        log_path=log,
        device=options.pop("device", "cpu"),
        dtype="float32",
        key=KEY,
        **options,
    )


def until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)


def running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------------- without starting one


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"engine0: port {port} on 127.0.0.1 is already in use"):
            server(tmp_path, tmp_path / "log", port=port).start()
    assert not (tmp_path / "log").exists()


def test_the_users_options_win_over_ours_and_ours_over_sglangs(tmp_path: Path) -> None:
    settings = SGLangSettings(sglang_extra={"max_running_requests": 7, "cuda_graph_max_bs": 5})
    command = server(tmp_path, tmp_path / "log", settings=settings, weight_version=3, context_length=99).command()

    def value(flag: str) -> str:
        assert command.count(flag) == 1
        return command[command.index(flag) + 1]

    assert value("--max-running-requests") == "7"
    assert value("--cuda-graph-max-bs") == "5"
    assert value("--attention-backend") == "torch_native"
    assert value("--weight-version") == "3"
    assert value("--context-length") == "99"
    assert value("--host") == "127.0.0.1"
    assert value("--mem-fraction-static") == "0.8"


def test_the_gpu_path_does_not_import_the_cpu_part(tmp_path: Path) -> None:
    code = (
        "import sys; from relax_rollout.engines.sglang.server import SGLangServer;"
        "from relax_rollout.engines.sglang.settings import SGLangSettings;"
        "s = SGLangServer(SGLangSettings(), model_path='m', name='engine0', log_path='l', device='cuda', tp_size=2,"
        "gpu_ids=[2, 3], enable_memory_saver=True); c = s.command(); e = s.environment();"
        "assert '--enable-memory-saver' in c and '--device' not in c, c;"
        "assert e['CUDA_VISIBLE_DEVICES'] == '2,3' and 'SGLANG_USE_CPU_ENGINE' not in e;"
        "print([m for m in sys.modules if m in ('relax_rollout.engines.sglang.cpu', 'torch', 'sglang')])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_cpu_server_loads_few_model_files_unless_told_otherwise() -> None:
    skipped = cpu.environment({})["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "deepseek_v2" in skipped
    assert not cpu.MODEL_FILES & set(skipped)
    assert cpu.environment({"SGLANG_DISABLED_MODEL_ARCHS": ""})["SGLANG_DISABLED_MODEL_ARCHS"] == ""


def test_processes_of_a_cpu_server_are_copies_of_it() -> None:
    code = (
        "import multiprocessing as mp; from relax_rollout.engines.sglang import cpu; cpu.fork_processes();"
        "mp.set_start_method('spawn', force=True);"
        "imported = ['what takes long'];"
        "child = mp.Process(target=lambda: print(imported)); child.start(); child.join(); assert child.exitcode == 0"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "['what takes long']", done.stderr


def test_options_without_meaning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--rollout-num-gpus-per-engine 1"):
        server(tmp_path, tmp_path / "log", tp_size=2)
    with pytest.raises(ValueError, match="memory saver"):
        server(tmp_path, tmp_path / "log", enable_memory_saver=True)
    with pytest.raises(ValueError, match="--sglang-port cannot be set"):
        server(tmp_path, tmp_path / "log", settings=SGLangSettings(sglang_extra={"port": 1}))
    with pytest.raises(ValueError, match="2 GPUs an engine, but 1 given"):
        server(tmp_path, tmp_path / "log", device="cuda", tp_size=2, gpu_ids=[0])


def test_the_last_words_are_readable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"one\n\n\x1b[31mtwo\x1b[0m\n10%\r50%\r100%\nbad \xff\n")
    assert last_lines(log) == ["one", "two", "100%", "bad �"]
    assert last_lines(log, 1) == ["bad �"]
    assert "is empty" in last_words(tmp_path / "none")


async def test_an_engine_that_never_was_says_so_within_seconds(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("the last words\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = SGLangEngine(f"http://127.0.0.1:{port}", name="engine3", log_path=tmp_path / "log")
    with pytest.raises(EngineDied, match=r"(?s)engine3 .*is gone.*the last words"):
        await asyncio.wait_for(engine.weight_version(), 60)
    await engine.close()


# ---------------------------------------------------------------------- with real servers


@pytest.mark.sglang
@pytest.mark.slow
def test_a_server_that_dies_at_the_start_tells_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    messages: list[str] = []
    one = server(tmp_path / "model", tmp_path / "logs" / "engine0.log")
    with pytest.raises(EngineDied, match="engine0 ended with exit code") as error:
        one.start(messages.append, deadline_s=400, every_s=0.0)
    assert str(tmp_path / "model") in str(error.value), "the message must hold SGLang's own reason"
    assert messages
    assert messages[0].partition(" s: ")[0].isdigit()
    assert one.poll() is not None


@pytest.mark.sglang
@pytest.mark.slow
def test_scheduler_and_detokenizer_import_nothing_again(sglang_server: Any) -> None:
    children = [p.name() for p in psutil.Process(sglang_server.pid).children()]
    assert sorted(children) == ["sglang::detokenizer", "sglang::scheduler"], "those that are spawned have a tracker"


# Runs a server, tells where it is, and waits to be killed.
OWNER = """
import json, pathlib, sys, time
from engine_gate import KEY, Gate
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
settings = SGLangSettings(sglang_extra=Gate(pathlib.Path(sys.argv[3]).parent).options())
server = SGLangServer(settings, model_path=sys.argv[1], name="engine0", log_path=sys.argv[2], device="cpu",
                      dtype="float32", key=KEY)
server.start(deadline_s=400)
with open(sys.argv[3] + ".part", "w") as f:
    json.dump({"url": server.url, "pid": server.pid, "supervisor": server._process.pid}, f)
import os
os.rename(sys.argv[3] + ".part", sys.argv[3])
time.sleep(600)
"""


@pytest.mark.sglang
@pytest.mark.slow
async def test_kill_9_of_the_owner_during_generation(tiny_model: Path, tmp_path: Path) -> None:
    log, note = tmp_path / "engine0.log", tmp_path / "note"
    gate = Gate(tmp_path)
    with gate.importable():
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tiny_model), str(log), str(note)])
    try:
        until(note.exists, "the server", 400)
        facts = json.loads(note.read_text())
        supervisor = psutil.Process(facts["supervisor"])
        tree = [supervisor, *supervisor.children(recursive=True)]
        names = {p.cmdline()[0] for p in tree if p.cmdline()}
        assert {"sglang::scheduler", "sglang::detokenizer"} <= names
        files = shared_memory([p.pid for p in tree])
        assert files, "SGLang keeps its load figures in /dev/shm"
        engine = SGLangEngine(facts["url"], name="engine0", key=KEY, log_path=log)
        sampling = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        gate.close()
        tasks = [
            asyncio.create_task(engine.generate(GenerateRequest(rid=f"r{i}", input_ids=[10, 11], sampling=sampling)))
            for i in range(3)
        ]
        await underway(engine.url, 3)
        owner.kill()
        for result in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(result, EngineDied)
            assert "engine0" in str(result)
            assert f"Last lines of {log}" in str(result)
        until(lambda: not any(map(running, tree)), "every process of the server to end", 60)
        with pytest.raises(EngineDied):
            await asyncio.wait_for(engine.generate(GenerateRequest(rid="x", input_ids=[10], sampling=sampling)), 60)
        await engine.close()
        assert not [f for f in files if os.path.exists(f)]
    finally:
        owner.kill()
        owner.wait(timeout=300)
