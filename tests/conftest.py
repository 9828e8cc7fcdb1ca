"""Fixtures that every package's tests share. The heavy ones exist once a session."""

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from engine_gate import KEY, Gate
from leftovers import Leftovers

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

# Before torch, ray or megatron are imported anywhere: one thread a process on small machines, no hub look-ups, no
# compilation of megatron's helpers on CPU, and no uv inside Ray's workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without byte code every process of the tests compiles torch's modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collected once, when all modules are there (pytest_collection_finish).
gc.disable()

# How long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("relax", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("relax")

GPU_SCRIPT_SECONDS = 3500
"""What one script on GPUs may take; its test has a little more."""


def pytest_configure(config: pytest.Config) -> None:
    """Gives the session a temporary folder of its own and fails it for whatever it leaves behind."""
    config.pluginmanager.register(Leftovers(), "leftovers")


def pytest_collection_finish() -> None:
    """Leaves what the imports made out of each later collection of garbage, here and in forked ranks.

    torch, transformers and megatron are a million objects that stay; to walk over them was a fifth of the tests' time,
    and a forked process copies each page of memory that the walk touches.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random Qwen3 of 0.1 M float32 parameters and a character-level chat tokenizer."""
    import torch
    from char_tokenizer import char_tokenizer
    from tiny_models import SHAPE
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    char_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, max_position_embeddings=2048, tie_word_embeddings=True))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def run_on_gpus() -> Callable[..., str]:
    """``run_on_gpus(script, *arguments, gpus=1, launcher=())`` runs a script of ours on GPUs and returns its output.

    Skips the test where there are fewer GPUs. torch is asked here and not when tests are collected. The script is a
    process of its own, with what this file sets for CPU tests taken away, and it is ended with all that it started.
    """

    def run(script: Path, *arguments: str | Path, gpus: int = 1, launcher: tuple[str, ...] = ()) -> str:
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < gpus:
            pytest.skip(f"needs {gpus} CUDA device{'s' * (gpus > 1)} and this host has {found}")
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")}
        command = [sys.executable, *launcher, str(script), *map(str, arguments)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=GPU_SCRIPT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.returncode == 0, f"{script.name} exited with {process.returncode}:\n{output[-8000:]}"
        return output

    return run


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local Ray for the session, with logical CPUs to spare."""
    import ray

    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@dataclasses.dataclass(frozen=True)
class RunningServer:
    """A real SGLang server: where it listens, the model it started with, its log, its process, and what holds it."""

    url: str
    address: "EngineAddress"
    model_path: Path
    log_path: Path
    pid: int
    gate: Gate


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One SGLang server on CPU with ``tiny_model``; starts once (about a minute) and stops at the end.

    Tests that change its weights push the start weights back, and those that close its gate open it again.
    """
    from relax_rollout.engines.sglang.server import SGLangServer
    from relax_rollout.engines.sglang.settings import SGLangSettings

    folder = tmp_path_factory.mktemp("sglang")
    log_path, gate = folder / "engine0.log", Gate(folder)
    server = SGLangServer(
        SGLangSettings(sglang_extra=gate.options()),
        model_path=tiny_model,
        name="engine0",
        log_path=log_path,
        device="cpu",
        dtype="float32",
        key=KEY,
    )
    with gate.importable():
        server.start(deadline_s=580)
    try:
        yield RunningServer(server.url, server.address, tiny_model, log_path, server.pid, gate)
    finally:
        server.stop()
