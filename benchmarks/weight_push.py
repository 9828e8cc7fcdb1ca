"""Weight pushes to one SGLang server on CPU, way by way in one run: MB/s over gloo, by value, and over files.

    python benchmarks/weight_push.py [--parameters-m 60] [--bucket-mib 32] [--pushes 5] [--folder FOLDER]

Makes a random Qwen3 of about that many million float32 parameters, starts a server, pushes to it, and prints a line for
each transport: median seconds of a push, MB/s, and the ratio to ``value``, which colocate runs on CPU take.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from relax_data.weights import Bucket
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.weight_sync.transports import make_transport

WAYS = ("value", "group", "disk")


def make_model(folder: Path, millions: int) -> Any:
    """A random model of two layers; its vocabulary makes up the size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=max(256, (millions * 1_000_000 - 13_000_000) // 1024),
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        dtype="float32",
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return model


def buckets(model: Any, limit: int) -> Iterator[Bucket]:
    """All tensors in buckets of at most ``limit`` bytes; a larger one alone."""
    sent = [(n, t) for n, t in model.state_dict().items() if n != "lm_head.weight"]
    return Bucket.split(sent, limit)


def measure(server: SGLangServer, model: Any, options: argparse.Namespace, folder: Path) -> None:
    address, version = server.address, 0
    transports = {
        name: make_transport([address], rank=0, world_size=1, device="cpu", gpus_per_engine=1, name=name, folder=folder)
        for name in WAYS
    }
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(options.pushes + 1):
        for name, transport in transports.items():
            version += 1
            begin = time.perf_counter()
            report = transport.push(buckets(model, options.bucket_mib << 20), version)
            times[name].append(time.perf_counter() - begin)
    print(f"{report.bytes / 1e6:.0f} MB in {report.buckets} buckets, {options.pushes} pushes after a first one")
    for name in WAYS:
        first, rest = times[name][0], times[name][1:]
        median, ratio = statistics.median(rest), statistics.median(times["value"][1:]) / statistics.median(rest)
        print(
            f"{name:6s} first {first:6.3f} s  then {median:6.3f} s ({min(rest):.3f} to {max(rest):.3f})  "
            f"{report.bytes / median / 1e6:6.0f} MB/s  x{ratio:.1f}"
        )
    for transport in transports.values():
        transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters-m", type=int, default=60)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--pushes", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relax-benchmark-") as place:
        model = make_model(Path(place) / "model", options.parameters_m)
        server = SGLangServer(
            SGLangSettings(sglang_extra={"skip-tokenizer-init": True}),
            model_path=Path(place) / "model",
            name="engine0",
            log_path=Path(place) / "engine0.log",
            device="cpu",
            dtype="float32",
        )
        server.start()
        try:
            measure(server, model, options, options.folder or Path(place) / "weights")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
