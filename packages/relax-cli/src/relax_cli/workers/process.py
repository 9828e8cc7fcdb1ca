"""First steps of every actor: a log file of its own in the run directory, and a quiet environment."""

import gc
import logging
import os
import warnings
from pathlib import Path


def actor_environment(device: str, *, threads: int) -> dict[str, str]:
    """Environment variables of a Ray actor that imports torch.

    Args:
        device: ``cuda`` or ``cpu``.
        threads: OpenMP threads of the process.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron's sequence parallelism relies on the launch order
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    if device == "cpu":
        # A machine with GPUs may be asked to train on CPU; Ray hides no GPU from an actor that asked for none.
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # Megatron decorates some 40 helpers with torch.compile when it is imported; on CPU compiling them costs
        # minutes and gains nothing.
        environment["TORCH_COMPILE_DISABLE"] = "1"
    return environment


def enter_folder(folder: Path) -> None:
    """Makes ``folder``, the driver's current directory, that of this process too.

    Relative paths (``--prompt-data``, files of ``--custom-rm-path``) and modules beside them mean the same everywhere,
    also in a cluster that was started elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)


def start_log(run_dir: Path, name: str) -> None:
    """Sends this process's Python log and warnings to ``<run_dir>/logs/<name>.log``."""
    path = run_dir / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for chatty in ("httpx", "httpcore", "asyncio", "urllib3", "matplotlib"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.simplefilter("default")
    logging.getLogger(__name__).info("pid %d", os.getpid())


def spare_what_stays() -> None:
    """Has garbage collections leave alone what there is now: modules and tables of a start, which stay anyway.

    A full collection walks over a million of their objects, for some tenths of a second, in the middle of a rollout.
    """
    gc.collect()
    gc.freeze()
