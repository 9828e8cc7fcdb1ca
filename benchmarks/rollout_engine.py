"""Speed of one SGLang engine: our loop against lists of the same prompts, our client by batch size, a weight push.

    python benchmarks/rollout_engine.py                       # the arithmetic example, on CPU
    python benchmarks/rollout_engine.py MODEL_FOLDER --device cuda --prompt-data FILE [--label-key answer] \
        [--prompts 32] [--samples 8] [--response-len 1024] [--rounds 3] [--batches 1 8 32 64] [--new-tokens 64]

Starts a server on the model, measures, prints one line a measurement, stops it. Peers are one call of the server with
all prompts as a list, and, after the server, SGLang's own offline batch (``sglang.Engine``) with the same arguments and
prompts. The limit: the loop, which collects first finished first, scores and can interrupt each response, makes at
least 0.95 x the tokens a second of the list.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from relax_cli.workers.process import spare_what_stays
from relax_data.prompts.open import open_prompts
from relax_data.settings import DataSettings
from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SUPERVISOR, SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.engines.sglang.transport import bearer
from relax_rollout.generation.seam import end_token_ids
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings
from relax_rollout.weight_sync.transports import make_transport

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
BUCKET_BYTES = 512 << 20
REPEATS = 5
WARM_UP = 2
LIMIT = 0.95


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


def rollout_loop(engine: SGLangEngine, options: argparse.Namespace) -> RolloutLoop:
    """The loop of a run with the options of the command line, on one engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = DataSettings(
        prompt_data=(str(options.prompt_data),),
        label_key=options.label_key,
        apply_chat_template=True,
        rollout_shuffle=True,
    )
    settings = RolloutSettings(
        rollout_batch_size=options.prompts,
        n_samples_per_prompt=options.samples,
        rollout_max_response_len=options.response_len,
    )
    return RolloutLoop(
        settings,
        engines=[engine],
        source=open_prompts(data, tokenizer),
        reward=build_reward(RewardSettings(rm_type="exact-match")),
        tokenizer=tokenizer,
        end_token_ids=end_token_ids(tokenizer, options.model),
    )


def list_request(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """What SGLang is asked for with all prompts at once."""
    return {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 1.0},
        "return_logprob": True,
    }


async def as_list(http: httpx.AsyncClient, prompts: list[list[int]], new_tokens: int, key: str) -> int:
    """Tokens of one call with all prompts; ``key`` keeps it from the prefix cache of the loop."""
    response = await http.post("/generate", json={**list_request(prompts, new_tokens), "extra_key": key})
    return sum(len(answer["output_ids"]) for answer in response.raise_for_status().json())


async def rollouts(
    server: SGLangServer, engine: SGLangEngine, options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[list[list[int]]]]:
    """Tokens a second of rollouts and of lists of the same prompts, in turn; and the prompts of each."""
    loop = rollout_loop(engine, options)
    spare_what_stays()  # as a run does
    rates: dict[str, list[float]] = {"loop": [], "list": []}
    asked = []
    timeout = httpx.Timeout(3600.0)
    async with httpx.AsyncClient(
        base_url=server.url, headers=bearer(server.key), timeout=timeout, trust_env=False
    ) as http:
        for number in range(WARM_UP + options.rounds):
            begin = time.perf_counter()
            result = await loop.generate(number, 0)
            samples = [sample for group in result.groups for sample in group.samples]
            rates["loop"].append(sum(len(s.tokens) for s in samples) / (time.perf_counter() - begin))
            prompts = [list(map(int, sample.prompt.input_ids)) for sample in samples]
            asked.append(prompts)
            begin = time.perf_counter()
            tokens = await as_list(http, prompts, options.response_len, f"list{number}")
            rates["list"].append(tokens / (time.perf_counter() - begin))
    return rates, asked


OFFLINE = """
import json, sys, time

if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        order = json.load(file)
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(order["words"]))
    rates = []
    for request in order["requests"]:
        begin = time.perf_counter()
        tokens = sum(len(answer["output_ids"]) for answer in engine.generate(**request))
        rates.append(tokens / (time.perf_counter() - begin))
    with open(order["rates"], "w") as file:
        json.dump(rates, file)
    engine.shutdown()
"""


def offline(server: SGLangServer, asked: list[list[list[int]]], options: argparse.Namespace) -> list[float]:
    """Tokens a second of SGLang's offline batch, which a process of its own runs; the server is stopped by now.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, told, found, log = (Path(folder, name) for name in ("offline.py", "order.json", "rates.json", "log"))
        script.write_text(OFFLINE)
        requests = [list_request(prompts, options.response_len) for prompts in asked]
        told.write_text(json.dumps({"words": server.command()[3:], "requests": requests, "rates": str(found)}))
        with log.open("w") as out:
            # The supervisor removes what SGLang's processes leave in shared memory; it ends when its input does.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), sys.executable, str(script), str(told)],
                env=server.environment(),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
            )
            with process:
                process.wait()
        if not found.exists():
            raise RuntimeError(f"SGLang's offline batch ended with {process.returncode}: {log.read_text()[-2000:]}")
        rates: list[float] = json.loads(found.read_text())
    return rates


def compare(rates: dict[str, list[float]], options: argparse.Namespace) -> float:
    """Prints the rates and their ratios; returns that of the loop to the list."""
    counted = {name: each[WARM_UP:] for name, each in rates.items()}
    for name, each in counted.items():
        spread = f"of {len(each)}: {min(each):.0f} to {max(each):.0f}"
        print(f"{name} of {options.prompts} x {options.samples}: {statistics.median(each):.0f} tokens/s ({spread})")
    ratios = {
        name: statistics.median(a / b for a, b in zip(counted["loop"], each, strict=True))
        for name, each in counted.items()
    }
    print(f"loop / list: {ratios['list']:.2f} (limit: at least {LIMIT})")
    if "offline" in ratios:
        print(f"loop / SGLang's offline batch: {ratios['offline']:.2f}")
    return ratios["list"]


async def measure(
    server: SGLangServer, engine: SGLangEngine, model: Any, options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[list[list[int]]]]:
    """Prints what needs no peer of another process; gives what :func:`rollouts` found."""
    found = await rollouts(server, engine, options)
    for batch in options.batches:
        await generation(engine, batch, 8)
        rates = [await generation(engine, batch, options.new_tokens) for _ in range(3)]
        print(
            f"batch {batch:4d}: {statistics.median(rates):8.0f} tokens/s (of 3: {min(rates):.0f} to {max(rates):.0f})"
        )
    transport = make_transport([server.address], rank=0, world_size=1, device=options.device, gpus_per_engine=1)
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
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=EXAMPLE / "model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompt-data", type=Path, default=EXAMPLE / "data" / "train.jsonl")
    parser.add_argument("--label-key", default="label")
    parser.add_argument("--prompts", type=int, default=32, help="of a rollout")
    parser.add_argument("--samples", type=int, default=8, help="responses to each")
    parser.add_argument("--response-len", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12, help="of the loop and its peers, after two more")
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
        rates, asked = asyncio.run(measure(server, engine, model, options))
    finally:
        server.stop()
    del model
    if options.device == "cuda":
        torch.cuda.empty_cache()
    rates["offline"] = offline(server, asked, options)
    ratio = compare(rates, options)
    return 0 if ratio >= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
