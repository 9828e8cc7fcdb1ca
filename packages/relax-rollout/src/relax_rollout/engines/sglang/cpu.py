"""Everything that SGLang needs in order to run without a GPU; the GPU path never imports this module.

Needed are: an environment variable that selects SGLang's CPU engine, a stand-in for the kernel package that PyPI has no
CPU build of (``cpu_stand_in/``, on the import path of the server process only), and backends that are plain PyTorch.
Llama-like models (Llama, Qwen2, Qwen3, Qwen3-MoE) and Qwen2.5-VL run; models that call other kernels say so when they
load. Only the model files that can be of use are imported, and once for all processes of a server, which saves a start
some thirty seconds of CPU time.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

STAND_IN = Path(__file__).with_name("cpu_stand_in")

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "disable-overlap-schedule": True,
        # An idle server would otherwise keep one core busy.
        "sleep-on-idle": True,
        "max-total-tokens": 16384,
        # A forward pass costs little more for many sequences than for a few.
        "max-running-requests": 256,
    }
)
"""Server options on CPU; what the user sets as ``--sglang-<name>`` wins."""

MODEL_FILES = frozenset({"llama", "mistral", "qwen2", "qwen2_moe", "qwen2_5_vl", "qwen3", "qwen3_moe", "transformers"})
"""SGLang's model files that are loaded; ``transformers`` is its wrapper for models without one of their own."""


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with what the server process needs on CPU.

    One OpenMP thread unless ``OMP_NUM_THREADS`` says otherwise: for small models more threads cost more than they
    give.
    """
    path = [str(STAND_IN), *([base["PYTHONPATH"]] if base.get("PYTHONPATH") else [])]
    return {
        **base,
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": base.get("OMP_NUM_THREADS", "1"),
        # It would start ranks by way of another program, which a copy of the server is not (fork_processes).
        "SGLANG_NUMA_BIND_V2": "0",
        "SGLANG_DISABLED_MODEL_ARCHS": base.get("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_other_model_files())),
        "PYTHONPATH": os.pathsep.join(path),
    }


def fork_processes() -> None:
    """Makes scheduler and detokenizer copies of this process, which has imported what they need.

    SGLang asks for ``spawn``, as CUDA demands; each process then imports everything again, for some nine seconds. To be
    called in the server's process before it starts any of them: a copy has no other thread than the one that forks.
    """
    set_start_method = multiprocessing.set_start_method

    def fork_instead(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = fork_instead


def _other_model_files() -> list[str]:
    """Names of the installed SGLang's model files that are not in ``MODEL_FILES``; imports nothing of it."""
    spec = importlib.util.find_spec("sglang")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    files = [f.stem for folder in folders for f in Path(folder, "srt", "models").glob("*.py")]
    return sorted(set(files) - MODEL_FILES - {"__init__", "registry"})


def check(*, tp_size: int, enable_memory_saver: bool) -> None:
    """Refuses what has no meaning on CPU.

    Raises:
        ValueError: more than one rank an engine, or the memory saver, is asked for.
    """
    if tp_size != 1:
        raise ValueError(f"an engine on CPU is one process: set --rollout-num-gpus-per-engine 1, not {tp_size}")
    if enable_memory_saver:
        raise ValueError("the memory saver releases GPU memory; on CPU leave it off")
