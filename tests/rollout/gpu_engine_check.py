"""Checks the SGLang engine on real GPUs: what others see, parity, sleep, wake, CUDA IPC push, abort.

Prints one line a step.

    python tests/rollout/gpu_engine_check.py [MODEL_FOLDER] [--tp 1] [--out FOLDER]

Without a folder it makes a Qwen3 of 0.6 B random parameters. With ``--tp 2`` this one process plays both ranks of the
trainer: it holds a copy of each bucket on each GPU. Exits with 1 if a step fails.
"""

import argparse
import asyncio
import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, SamplingParams, updating
from relax_rollout.engines.sglang import gpu
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.engines.sglang.transport import bearer
from relax_rollout.weight_sync.ipc import share
from relax_rollout.weight_sync.transports import make_transport

sys.path.insert(0, str(Path(__file__).parents[1]))

from char_tokenizer import char_tokenizer

PROMPT = [10, 11, 12, 13, 14, 15, 16]
MEAN_LIMIT, MOST_LIMIT = 1.5, 3.0
"""Times the difference that transformers itself has in bfloat16 from float32, on the same weights and tokens: two sound
implementations round differently but about as much. Measured on an H200: mean 0.0064 to 0.0070 where transformers has
0.0070 to 0.0076, and 0.035 to 0.047 with the weights of one push before."""


def make_model(folder: Path) -> Path:
    """A random Qwen3-0.6B and a tokenizer of single characters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    char_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        dtype="bfloat16",
    )
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def buckets(model: Any, limit: int = 512 << 20) -> Iterator[Bucket]:
    tensors = model.state_dict().items()
    sent = [(n, t) for n, t in tensors if n != "lm_head.weight" or not model.config.tie_word_embeddings]
    return Bucket.split(sent, limit)


async def push_to_ranks(engine: SGLangEngine, model: Any, version: int, tp: int) -> None:
    """What several trainer ranks do together, done by one process with a copy of the bucket on each GPU."""
    async with updating(engine, version):
        for bucket in buckets(model):
            copies = [bucket.flat.to(f"cuda:{i}") for i in range(tp)]
            await engine.load(bucket, [share(copy) for copy in copies])
            del copies


class Check:
    def __init__(self, server: SGLangServer, engine: SGLangEngine, model: Any, tp: int) -> None:
        self.address, self.engine, self.model, self.tp, self.failed = server.address, engine, model, tp, False
        self.before: Any = None
        """The model before it was last disturbed."""

    def say(self, name: str, good: bool, text: str) -> None:
        self.failed |= not good
        print(f"{'ok  ' if good else 'FAIL'} {name}: {text}", flush=True)

    async def parity(self, name: str, version: int) -> None:
        sampling = SamplingParams(max_new_tokens=128, ignore_eos=True)
        results = await asyncio.gather(
            *(
                self.engine.generate(GenerateRequest(rid=f"p{i}", input_ids=[*PROMPT, 20 + i], sampling=sampling))
                for i in range(8)
            )
        )
        responses = [[*PROMPT, 20 + i, *result.tokens] for i, result in enumerate(results)]
        exact = self.log_probs(copy.deepcopy(self.model).float(), responses)
        own = (self.log_probs(self.model, responses) - exact).abs()
        engine = (torch.tensor([r.log_probs for r in results], device="cuda") - exact).abs()
        stale = (self.log_probs(self.before, responses) - exact).abs().mean() if self.before is not None else None
        versions = {v for r in results for v in r.versions}
        mean, most = engine.mean() / own.mean(), engine.max() / own.max()
        good = bool(mean < MEAN_LIMIT and most < MOST_LIMIT) and versions == {version}
        text = (
            f"|log-prob difference| from float32: mean {engine.mean():.4f}, at most {engine.max():.4f}; of "
            f"transformers in bfloat16 {own.mean():.4f}, {own.max():.4f}; versions {versions}"
        )
        if stale is not None:
            # The limit means something only when weights of one push before are beyond it.
            good &= bool(stale > MEAN_LIMIT * own.mean())
            text += f"; the weights before the push would be {stale:.4f} off"
        self.say(name, good, text)

    @torch.no_grad()
    def log_probs(self, model: Any, responses: list[list[int]]) -> torch.Tensor:
        """float32 ``[responses, tokens after the prompt]``: of each token, one response after the other."""
        found = []
        for response in responses:
            tokens = torch.tensor([response], device="cuda")
            expected = torch.log_softmax(model(tokens).logits[0, len(PROMPT) : -1].float(), -1)
            found.append(expected.gather(1, tokens[0, len(PROMPT) + 1 :, None]).squeeze(1))
        return torch.stack(found)

    @torch.no_grad()
    def disturb(self) -> None:
        self.before = copy.deepcopy(self.model)
        for parameter in self.model.parameters():
            parameter.mul_(0.975 + 0.05 * torch.rand((), device=parameter.device))

    async def push(self, version: int) -> float:
        begin = time.perf_counter()
        if self.tp == 1:
            transport = make_transport([self.address], rank=0, world_size=1, device="cuda", gpus_per_engine=1)
            # It is called by the trainer, which has no event loop.
            await asyncio.to_thread(transport.push, buckets(self.model), version)
        else:
            await push_to_ranks(self.engine, self.model, version, self.tp)
        return time.perf_counter() - begin

    def exposure(self, pid: int) -> None:
        """Who can reach it: its processes listen on the loopback alone, and the HTTP server asks for the key."""
        server = psutil.Process(pid)
        processes = [server, *server.children(recursive=True)]
        listening = {
            (c.laddr.ip, c.laddr.port)
            for process in processes
            for c in process.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }
        ranks = [p.name() for p in processes if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline())]
        meeting = Path(server.environ()["TMPDIR"], "ranks")
        http = ("127.0.0.1", int(self.address.url.rpartition(":")[2]))
        good = {ip for ip, _ in listening} == {"127.0.0.1"} and http in listening
        good &= len(ranks) == self.tp and meeting.exists()
        others = sorted(port for ip, port in listening if (ip, port) != http)
        self.say("what listens", good, f"HTTP at {http}, others at {others}; ranks {ranks} met by {meeting}")
        asked = self.address.url + "/model_info"
        without = httpx.get(asked, trust_env=False).status_code
        right = httpx.get(asked, trust_env=False, headers=bearer(self.address.key)).status_code
        self.say("the key", (without, right) == (401, 200), f"{without} without it, {right} with it")

    async def run(self) -> None:
        await self.parity("parity of the start weights", 0)
        for version in (1, 2, 3):
            self.disturb()
            self.say(f"push {version}", True, f"{await self.push(version) * 1e3:.0f} ms")
        await self.parity("parity after three pushes", 3)
        for version in (4, 5):
            self.disturb()
            begin = time.perf_counter()
            before = torch.cuda.mem_get_info()[0]
            await self.engine.release_memory()
            slept = time.perf_counter()
            freed = torch.cuda.mem_get_info()[0] - before
            await self.engine.resume_memory(("weights",))
            woken = time.perf_counter()
            await self.push(version)
            pushed = time.perf_counter()
            await self.engine.resume_memory(("kv_cache",))
            end = time.perf_counter()
            parts = [slept - begin, woken - slept, pushed - woken, end - pushed]
            text = ", ".join(
                f"{n} {t * 1e3:.0f} ms" for n, t in zip(("sleep", "wake", "push", "wake KV"), parts, strict=True)
            )
            self.say(f"sleep, wake and push {version}", end - begin < 1.0, f"{text}; {freed / 2**30:.1f} GiB freed")
            await self.parity(f"parity after sleep and push {version}", version)
        task = asyncio.create_task(
            self.engine.generate(
                GenerateRequest(
                    rid="long", input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=7000, ignore_eos=True)
                )
            )
        )
        await asyncio.sleep(0.5)
        await self.engine.abort("long")
        result = await task
        self.say("abort", result.finish_reason == "abort", f"{len(result.tokens)} tokens so far")
        await self.engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "relax-gpu-check")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.model or make_model(options.out / "model")
    torch.cuda.empty_cache()
    print(f"kernels of the gpu extra installed: {gpu.kernels_installed()}; options {gpu.options()}")
    server = SGLangServer(
        SGLangSettings(rollout_num_gpus_per_engine=options.tp, sglang_mem_fraction_static=0.5),
        model_path=folder,
        name="engine0",
        log_path=options.out / "engine0.log",
        device="cuda",
        tp_size=options.tp,
        gpu_ids=list(range(options.tp)),
        dtype="bfloat16",
        enable_memory_saver=True,
    )
    begin = time.perf_counter()
    server.start(progress=print, deadline_s=400)
    print(f"healthy after {time.perf_counter() - begin:.0f} s", flush=True)
    try:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to("cuda").eval()
        engine = SGLangEngine(server.url, name="engine0", key=server.key, log_path=server.log_path, alive=server.alive)
        check = Check(server, engine, model, options.tp)
        check.exposure(server.pid)
        asyncio.run(check.run())
    finally:
        begin = time.perf_counter()
        server.stop()
        print(f"stopped in {time.perf_counter() - begin:.1f} s")
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
