"""What the rollout loop and the controllers ask of an inference engine."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from relax_data.types import WeightVersion

PauseMode = Literal["abort", "in_place", "retract"]
MemoryTag = Literal["kv_cache", "weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. ``temperature`` 0 is greedy; ``top_k`` -1 is all tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sequence to continue.

    Attributes:
        rid: unique id of the request, the handle for :meth:`Engine.abort`.
        input_ids: prompt tokens, and the tokens already generated when a sample is continued.
        multimodal: engine-specific inputs beside the text (images); empty for text.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    multimodal: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The tokens of one finished or aborted request.

    Attributes:
        tokens: new token ids.
        log_probs: natural log-probability of each.
        versions: policy version that sampled each.
        finish_reason: ``stop`` (end of sequence or stop string), ``length``, or ``abort`` (tokens may be partial).
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[WeightVersion]
    finish_reason: Literal["stop", "length", "abort"]
    cached_tokens: int = 0


class EngineDied(RuntimeError):
    """The engine's process is gone; the message holds the last lines of its log."""


class Engine(Protocol):
    """A running inference engine. Every call has a deadline; a dead engine raises :class:`EngineDied`."""

    @property
    def name(self) -> str:
        """``engine0``, ``engine1``, ...: how messages and file names call it."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all when ``rid`` is None; their ``generate`` returns what they have."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None: ...

    async def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        ...

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Only when no request is running."""
        ...

    async def weight_version(self) -> WeightVersion:
        """The version of the weights that it serves."""
        ...

    async def release_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None: ...

    async def resume_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        """Takes the memory back. Released weights come back as garbage: push weights before the next token."""
        ...
