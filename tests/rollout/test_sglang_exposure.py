"""What a running server shows to others on the machine and on the network: nothing without the key."""

import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_gate import KEY
from relax_rollout.engines.sglang import cpu
from relax_rollout.engines.sglang.process.launch import MEETING, main
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.engines.sglang.transport import bearer


def tree(server: Any) -> list[psutil.Process]:
    process = psutil.Process(server.pid)
    return [*process.parents()[:2], process, *process.children(recursive=True)]


@pytest.mark.sglang
@pytest.mark.slow
def test_nothing_listens_but_on_the_loopback(sglang_server: Any) -> None:
    listening = {
        (c.laddr.ip, c.laddr.port)
        for process in tree(sglang_server)[1:]
        for c in process.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    ours = ("127.0.0.1", int(sglang_server.url.rpartition(":")[2]))
    assert ours in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}, listening


def own_address() -> str:
    """An address at which other machines reach this one; where there is none, another one of the loopback."""
    every = (a for addresses in psutil.net_if_addrs().values() for a in addresses if a.family is socket.AF_INET)
    return next((a.address for a in every if not a.address.startswith("127.")), "127.0.0.2")


@pytest.mark.sglang
@pytest.mark.slow
def test_two_ranks_meet_by_a_file_and_other_machines_need_the_key(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of two GPUs on a cluster, as far as a CPU has it: its server asks for the key at the node's address."""
    monkeypatch.setattr(cpu, "check", lambda **sizes: None)  # two ranks on CPU have no use but this
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", str(tmp_path / "no NCCL where there is no GPU"))
    host = own_address()
    server = SGLangServer(
        SGLangSettings(),
        model_path=tiny_model,
        name="engine0",
        log_path=tmp_path / "log",
        device="cpu",
        dtype="float32",
        tp_size=2,
        host=host,
    )
    try:
        server.start(deadline_s=580)
        processes = tree(server)[1:]
        ranks = [p.name() for p in processes if "scheduler" in p.name()]
        assert len(ranks) == 2, [p.name() for p in processes]
        listening = {
            (c.laddr.ip, c.laddr.port)
            for process in processes
            for c in process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
        assert (host, int(server.url.rpartition(":")[2])) in listening
        assert not {ip for ip, _ in listening} & {"0.0.0.0", "::"}, listening
        # Gloo's groups listen at the node's address too, where trainers of other nodes meet them.
        assert {ip for ip, _ in listening} <= {host, "127.0.0.1"}, listening
        assert (Path(processes[1].environ()["TMPDIR"]) / "ranks").exists(), "where they met"
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        with httpx.Client(base_url=server.url, trust_env=False, timeout=300) as http:
            assert http.post("/generate", json=body).status_code == 401
            answer = http.post("/generate", json=body, headers=bearer(server.key))
        assert len(answer.json()["output_ids"]) == 4, "both ranks have computed them"
    finally:
        server.stop()


@pytest.mark.sglang
@pytest.mark.slow
def test_without_the_key_the_server_tells_that_it_lives_and_no_more(sglang_server: Any) -> None:
    with httpx.Client(base_url=sglang_server.url, trust_env=False, timeout=300) as http:
        assert http.get("/health").status_code == 200
        refused = {
            path: http.request(method, path, json=None if method == "GET" else {}).status_code
            for method, path in (
                ("GET", "/model_info"),
                ("GET", "/server_info"),
                ("GET", "/v1/loads"),
                ("POST", "/generate"),
                ("POST", "/v1/completions"),
                ("POST", "/pause_generation"),
                ("POST", "/update_weights_from_disk"),
                ("POST", "/update_weights_from_tensor"),
                ("POST", "/init_weights_update_group"),
                ("POST", "/start_profile"),
            )
        }
        assert set(refused.values()) == {401}, refused
        assert http.get("/model_info", headers=bearer(KEY + "x")).status_code == 401
        answer = http.get("/server_info", headers=bearer(KEY))
        assert answer.status_code == 200
        assert KEY not in answer.text


@pytest.mark.sglang
@pytest.mark.slow
def test_the_key_is_in_no_command_line_environment_log_or_file(sglang_server: Any) -> None:
    processes = tree(sglang_server)
    shown = [" ".join(p.cmdline()) for p in processes]
    assert any("process.launch" in words for words in shown)
    assert not [words for words in shown if KEY in words]
    assert not [p for p in processes[1:] if KEY in str(p.environ())]
    assert KEY not in sglang_server.log_path.read_text(errors="replace")
    folder = Path(processes[2].environ()["TMPDIR"])
    assert folder.stat().st_mode & 0o077 == 0, "what the engine writes there is for its user alone"
    assert not [f for f in folder.rglob("*") if f.is_file() and KEY.encode() in f.read_bytes()]
    assert (folder / "ranks").exists(), "where the ranks meet"


def test_each_server_has_a_key_of_its_own_and_no_message_shows_it(tmp_path: Path) -> None:
    one, other = (
        SGLangServer(SGLangSettings(), model_path=tmp_path, name="e", log_path=tmp_path / "log", device="cpu")
        for _ in range(2)
    )
    assert one.key != other.key
    assert len(one.key) >= 32
    one._port = 1
    assert one.address.key == one.key
    assert one.key not in repr(one.address)
    assert one.key not in " ".join(one.command())


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MEETING, raising=False)
    with pytest.raises(ValueError, match="has to be the key of the server"):
        main([], "")
