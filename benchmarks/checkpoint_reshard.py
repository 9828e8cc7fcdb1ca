"""Checkpoints on CPU: save, and load under the same and other parallel sizes, against ``torch.save`` of the same bytes.

    python benchmarks/checkpoint_reshard.py [--parameters-m 30] [--repeats 3]

Makes a random Qwen3 of about that many million float32 parameters, saves it with TP 2, and loads it under each layout.
``torch`` is what the ranks of a layout do at the same time with plain torch: each saves its weights and moments to a
file of its own, which is brought to the disk (fsync) as a checkpoint is, or loads them again in place. It writes no
checksums, checks none, and loads under no other layout. Printed are median seconds, and the ratio of the two.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

SAVED = "tp2"
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    SAVED: (2, {"tensor_model_parallel_size": 2}),
    "one": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def make_model(folder: Path, millions: int) -> None:
    """A random model whose layers make up the size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=max(2, (millions - 4) // 8 * 2),  # about 4 million parameters each
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _median(repeats: int, action: Callable[[int], object]) -> float:
    """Seconds from when all ranks begin to when the last one is done; a first time is not counted."""
    import torch.distributed as dist

    times = []
    for turn in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        action(turn)
        dist.barrier()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _rank(rank: int, world: int, port: int, name: str, base: Path, repeats: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch and megatron-core warn of each other at every load
    from relax_train.backend.optimizer import build_optimizer
    from relax_train.backend.parallel import setup_parallel, teardown_parallel
    from relax_train.checkpoint.folders import sync
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint
    from relax_train.models.build import build_model
    from relax_train.models.hf_mapping import load_hf_weights
    from relax_train.settings import ModelSettings, OptimizerSettings, ParallelSettings, TrainSettings

    settings = TrainSettings(
        model=ModelSettings(hf_checkpoint=str(base / "model"), bf16=False),
        parallel=ParallelSettings(**LAYOUTS[name][1]),  # type: ignore[arg-type]  # sizes alone
        optimizer=OptimizerSettings(lr=1e-3),
    )
    model = build_model(settings, setup_parallel(settings.parallel))
    load_hf_weights(model)
    optimizer = build_optimizer(settings, model)
    held: list[Any] = [dict(model.gpt[0].named_parameters()), [shard.tensors for shard in optimizer.shards()]]
    tensors = [t.detach() for part in (held[0], *held[1]) for t in part.values()]
    size = torch.tensor(sum(t.numel() * t.element_size() for t in tensors))
    torch.distributed.all_reduce(size)
    plain = base / f"plain_{name}_{rank}.pt"

    def save_plain(_: int) -> None:
        torch.save(tensors, plain)
        sync(plain)

    def load_plain(_: int) -> None:
        with torch.no_grad():
            for target, loaded in zip(tensors, torch.load(plain, weights_only=True), strict=True):
                target.copy_(loaded)

    def line(what: str, ours: float, peer: float) -> None:
        if rank == 0:
            rate = size.item() / ours / 1e6
            print(
                f"{what:22s} {ours:6.3f} s ({rate:5.0f} MB/s)   torch {peer:6.3f} s   {ours / peer:4.1f} times",
                flush=True,
            )

    peer = _median(repeats, save_plain)
    if name == SAVED:
        if rank == 0:
            print(f"{size.item() / 1e6:.0f} MB of weights and moments, median of {repeats} times")
        ours = _median(repeats, lambda _: save_checkpoint(base / "saved", 0, model, optimizer))
        line(f"save {SAVED}", ours, peer)
    peer = _median(repeats, load_plain)
    line(f"load {SAVED} -> {name}", _median(repeats, lambda _: load_checkpoint(base / "saved", model, optimizer)), peer)
    plain.unlink()
    teardown_parallel()


def main() -> None:
    """Runs the layouts one after another, each in processes of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters-m", type=int, default=30, help="millions of parameters, about")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import relax_train.models.build  # noqa: F401  # once, for all ranks

    with tempfile.TemporaryDirectory(prefix="relax_checkpoint_") as folder:
        base = Path(folder)
        make_model(base / "model", options.parameters_m)
        for name, (world, _) in LAYOUTS.items():
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            mp.start_processes(_rank, (world, port, name, base, options.repeats), nprocs=world, start_method="fork")


if __name__ == "__main__":
    main()
