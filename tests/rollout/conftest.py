"""A real engine for tests of the rollout loop: transformers generates in this process, token by token."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_data.prompts.template import Drops
from relax_data.types import Prompt
from relax_data.weights import Bucket
from relax_rollout.engines.base import EngineDied, GenerateRequest, GenerateResult, IpcHandle, MemoryTag, PauseMode
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings


class TransformersEngine:
    """An engine on a Hugging Face model: real log-probabilities, abort with partial output, versions per token.

    Args:
        delay: turns of the event loop before a token, by request and number of the token: decides which request
            finishes first, without any clock.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str = "engine0",
        version: int = 0,
        eos: int = 1,
        delay: Callable[[GenerateRequest, int], int] = lambda request, token: 0,
    ) -> None:
        self._model = model
        self._name = name
        self._eos = eos
        self._delay = delay
        self._random = torch.Generator().manual_seed(0)
        self._aborted: set[str] = set()
        self.version = version
        self.running: set[str] = set()
        self.requests: list[GenerateRequest] = []
        self.most_running = 0
        self.dies_after: int | None = None
        """Number of further requests after which every call says that the process ended."""

    @property
    def name(self) -> str:
        return self._name

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        self.running.add(request.rid)
        self.most_running = max(self.most_running, len(self.running))
        try:
            return await self._decode(request)
        finally:
            self.running.discard(request.rid)
            self._aborted.discard(request.rid)

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self.dies_after is not None and len(self.requests) > self.dies_after:
            raise EngineDied("the process ended with code -9; last line of its log: Killed")

    async def _decode(self, request: GenerateRequest) -> GenerateResult:
        result = GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="length")
        step, past = torch.tensor([list(request.input_ids)]), None
        for position in range(request.sampling.max_new_tokens):
            for _ in range(1 + self._delay(request, position)):
                await self._turn()
                if request.rid in self._aborted:
                    return dataclasses.replace(result, finish_reason="abort")
            with torch.no_grad():
                out = self._model(input_ids=step, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1].float()
            if request.sampling.temperature == 0:
                token = int(logits.argmax())
            else:
                probabilities = torch.softmax(logits / request.sampling.temperature, dim=-1)
                token = int(torch.multinomial(probabilities, 1, generator=self._random))
            scale = request.sampling.temperature or 1.0
            result.tokens.append(token)
            result.log_probs.append(float(torch.log_softmax(logits / scale, dim=-1)[token]))
            result.versions.append(self.version)
            ended = token == self._eos and not request.sampling.ignore_eos
            if ended or token in request.sampling.stop_token_ids:
                return dataclasses.replace(result, finish_reason="stop")
            step = torch.tensor([[token]])
        return result

    async def abort(self, rid: str | None = None) -> None:
        await asyncio.sleep(0)
        self._aborted |= self.running if rid is None else self.running & {rid}

    async def pause(self, mode: PauseMode = "abort") -> None:
        if mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        pass

    async def flush_cache(self) -> None:
        assert not self.running, "flush with requests running"

    async def weight_version(self) -> int:
        return self.version

    async def begin_update(self, version: int, mode: PauseMode = "abort") -> None:
        await self.pause(mode)

    async def load(self, bucket: Bucket, handles: Sequence[IpcHandle] | None = None) -> None:
        self._model.load_state_dict(dict(bucket.items()), strict=False)

    async def end_update(self, version: int, *, whole: bool = True) -> None:
        assert whole, "a push to this engine failed"
        self.version = version

    async def close(self) -> None:
        pass

    async def release_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        pass

    async def resume_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        pass


class ListSource:
    """Prompts of a list, epoch after epoch."""

    def __init__(self, rows: Sequence[Prompt], num_epoch: int | None = None) -> None:
        self._rows = list(rows)
        self._end = None if num_epoch is None else num_epoch * len(rows)
        self.position = 0
        self.drops = Drops()

    def next(self, n: int) -> list[Prompt]:
        stop = self.position + n if self._end is None else min(self.position + n, self._end)
        positions = range(self.position, stop)
        self.position = stop
        size = len(self._rows)
        return [dataclasses.replace(self._rows[i % size], prompt_id=i, epoch=i // size) for i in positions]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def restore(self, prompt: Prompt) -> None:
        assert not prompt.multimodal, "these prompts have no pictures"

    def __len__(self) -> int:
        return len(self._rows)


@pytest.fixture(scope="session")
def tiny(tiny_model: Path) -> Any:
    """The tiny model, loaded once."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32").eval()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def make_engine(tiny: Any) -> Callable[..., TransformersEngine]:
    return lambda **options: TransformersEngine(tiny, **options)


@pytest.fixture
def make_source(tokenizer: Any) -> Callable[..., ListSource]:
    """``make_source(5, num_epoch=1)``: five prompts ``"<i>+1="`` with label ``i + 1``, from ``data.jsonl``.

    ``make_source(texts=[...])``: prompts of other texts.
    """

    def make(n: int = 8, num_epoch: int | None = None, texts: Sequence[str] = ()) -> ListSource:
        rows = [
            Prompt(
                prompt_id=0,
                epoch=0,
                source=f"data.jsonl:{i + 1}",
                text=text,
                input_ids=tokenizer.encode(text, add_special_tokens=False),
                label=str(i + 1),
                metadata={"row": i},
            )
            for i, text in enumerate(texts or [f"{i}+1=" for i in range(n)])
        ]
        return ListSource(rows, num_epoch)

    return make


@pytest.fixture
def hooks(tmp_path: Path) -> Callable[[str, str], str]:
    """``hooks(name, code)`` writes a module and returns ``path.py`` for ``path.py:function``."""

    def write(name: str, code: str) -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        return str(file)

    return write


@pytest.fixture
def length_reward(hooks: Callable[[str, str], str]) -> Any:
    """A reward that depends on the response: its first token's share of the vocabulary."""
    path = hooks("first_token", "def score(sample):\n    return sample.tokens[0] / 128\n")
    return build_reward(RewardSettings(custom_rm_path=f"{path}:score"))
