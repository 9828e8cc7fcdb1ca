"""Speed of one SGLang engine through our client: tokens a second by batch size, and the time of a weight push.

    python benchmarks/rollout_engine.py MODEL_FOLDER [--device cpu|cuda] [--batches 1 8 32 64] [--new-tokens 64]

Starts a server on the model, measures, prints one line a measurement, stops it.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.weight_sync.transports import make_transport

BUCKET_BYTES = 512 << 20
REPEATS = 5


def buckets(model: Any) -> Iterator[Bucket]:
    """All tensors of a transformers model in buckets of at most ``BUCKET_BYTES``."""
    tensors = model.state_dict().items()
    sent = [(n, t) for n, t in tensors if n != "lm_head.weight" or not model.config.tie_word_embeddings]
    return Bucket.split(sent, BUCKET_BYTES)


async def generation(engine: SGLangEngine, batch: int, new_tokens: int) -> float:
    """Tokens a second of ``batch`` requests that start together."""
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [
        GenerateRequest(rid=f"{i}", input_ids=[10 + i % 50, 11, 12, 13], sampling=sampling) for i in range(batch)
    ]
    begin = time.perf_counter()
    results = await asyncio.gather(*(engine.generate(r) for r in requests))
    return sum(len(r.tokens) for r in results) / (time.perf_counter() - begin)


async def measure(
    server: SGLangServer, engine: SGLangEngine, model: Any, device: str, batches: list[int], new_tokens: int
) -> None:
    for batch in batches:
        await generation(engine, batch, 8)
        rates = [await generation(engine, batch, new_tokens) for _ in range(3)]
        print(
            f"batch {batch:4d}: {statistics.median(rates):8.0f} tokens/s (of 3: {min(rates):.0f} to {max(rates):.0f})"
        )
    transport = make_transport([server.address], rank=0, world_size=1, device=device, gpus_per_engine=1)
    times = []
    for version in range(1, REPEATS + 1):
        begin = time.perf_counter()
        # It is called by the trainer, which has no event loop.
        report = await asyncio.to_thread(transport.push, buckets(model), version)
        times.append(time.perf_counter() - begin)
    spread = f"of {REPEATS}: {min(times) * 1e3:.0f} to {max(times) * 1e3:.0f}"
    size = f"{report.bytes / 2**20:.1f} MiB in {report.buckets} bucket(s)"
    print(f"push of {size}: {statistics.median(times) * 1e3:.0f} ms ({spread})")
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    log = Path(tempfile.mkdtemp(prefix="relax-benchmark-")) / "engine0.log"
    server = SGLangServer(
        SGLangSettings(sglang_mem_fraction_static=0.5),
        model_path=options.model,
        name="engine0",
        log_path=log,
        device=options.device,
        dtype=str(dtype).removeprefix("torch."),
    )
    begin = time.perf_counter()
    server.start(progress=print)
    try:
        print(f"healthy after {time.perf_counter() - begin:.0f} s; log in {log}")
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device)
        engine = SGLangEngine(server.url, name="engine0", key=server.key, log_path=log, alive=server.alive)
        asyncio.run(measure(server, engine, model, options.device, options.batches, options.new_tokens))
    finally:
        server.stop()


if __name__ == "__main__":
    main()
