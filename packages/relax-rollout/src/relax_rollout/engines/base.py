"""Protocol of an inference engine, as the rollout loop and the controllers use it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from relax_data.types import WeightVersion
from relax_data.weights import Bucket

PauseMode = Literal["abort", "in_place", "retract"]
MemoryTag = Literal["kv_cache", "weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters by which the next token is drawn. ``temperature`` 0 is greedy; ``top_k`` -1 is all tokens."""

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
        cache_version: version of the weights under whose name its keys and values lie in an engine's prefix cache;
            None: that which the engine serves.
        engine: name of the engine that has them, which is taken if it has room; None: any.
    """

    rid: str
    input_ids: Sequence[int]
    sampling: SamplingParams
    multimodal: dict[str, Any] = dataclasses.field(default_factory=dict)
    cache_version: WeightVersion | None = None
    engine: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The tokens of one finished or aborted request.

    Attributes:
        tokens: new token ids.
        log_probs: natural log-probability of each.
        versions: policy version that sampled each.
        finish_reason: ``stop`` (end of sequence or stop string), ``length``, or ``abort`` (tokens may be partial).
            No engine answers ``held``: :class:`relax_rollout.engines.router.EngineRouter` calls an abort so that was
            for a push of weights alone, after which the sample goes on.
        cached_tokens: of the request's, whose keys and values the engine had already.
        engine: name of the one that answered.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[WeightVersion]
    finish_reason: Literal["stop", "length", "abort", "held"]
    cached_tokens: int = 0
    engine: str | None = None


@dataclasses.dataclass(frozen=True)
class EngineAddress:
    """Address of an engine: all that a client in another process needs.

    Attributes:
        name: ``engine0``, ``engine1``, ...: how messages call it.
        url: ``http://host:port``.
        log_path: its log, whose last lines end the message when it dies; None when it is not known.
        key: that each request has to carry; None when its server asks for none. No message shows it.
        keeps_cache: its prefix cache stays as it is when new weights come.
    """

    name: str
    url: str
    log_path: str | None = None
    key: str | None = dataclasses.field(default=None, repr=False)
    keeps_cache: bool = False


@dataclasses.dataclass(frozen=True)
class IpcHandle:
    """The bytes of a bucket's flat tensor in the memory of a GPU, for another process that uses the same GPU.

    Attributes:
        gpu: UUID of the GPU; its number differs between processes.
        rebuild: torch's function that makes the uint8 tensor there.
        arguments: of ``rebuild``.
    """

    gpu: str
    rebuild: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairGroupAddress:
    """What an engine needs to join a process group in which a rank of the trainer is rank 0.

    Attributes:
        name: of the group.
        host: where its members find each other.
        port: likewise.
        size: number of members: the trainer's rank, then the engine's ranks in tensor-parallel order.
        backend: ``nccl`` or ``gloo``.
    """

    name: str
    host: str
    port: int
    size: int
    backend: Literal["nccl", "gloo"]


class EngineDied(RuntimeError):
    """The engine's process is gone; the message holds the last lines of its log."""


class EngineSilent(EngineDied):
    """The engine has answered nothing for so long that it counts as dead, whether its process runs or not."""


class Engine(Protocol):
    """A running inference engine. Every call has a deadline; a dead engine raises :class:`EngineDied`."""

    @property
    def name(self) -> str:
        """``engine0``, ``engine1``, ...: how messages and file names call it."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generates one response, or the rest of one that was interrupted."""
        ...

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request, or all when ``rid`` is None; their ``generate`` returns what they have."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops generating, until :meth:`resume`."""
        ...

    async def resume(self) -> None:
        """Goes on after :meth:`pause`."""
        ...

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Only when no request is running."""
        ...

    async def weight_version(self) -> WeightVersion:
        """The version of the weights that it serves."""
        ...

    async def begin_update(self, version: WeightVersion, mode: PauseMode = "abort") -> None:
        """Pauses, and refuses to generate from now on until a whole set of weights has come; see :func:`updating`.

        Args:
            version: of the weights to come.
            mode: what happens to requests that are running; see :meth:`pause`.
        """
        ...

    async def load(self, bucket: Bucket, handles: Sequence[IpcHandle] | None = None) -> None:
        """Loads some of the weights; returns when it needs the bucket's memory no more.

        Args:
            bucket: their names and shapes, and the values when no handle is given.
            handles: where each of its tensor-parallel ranks, in order, finds a copy on its own GPU.
        """
        ...

    async def end_update(self, version: WeightVersion, *, whole: bool = True) -> None:
        """Serves the new version and goes on; or, when not all weights came, refuses until a whole set has come.

        Args:
            version: as :meth:`begin_update` was told.
            whole: all weights were loaded. False without effect when no update runs.
        """
        ...

    async def close(self) -> None:
        """Closes what this process holds of it; the engine itself goes on."""
        ...

    async def release_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        """Gives the GPU memory of ``tags`` back."""
        ...

    async def resume_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        """Takes the memory back. Released weights come back as garbage: push weights before the next token."""
        ...


@runtime_checkable
class GroupEngine(Engine, Protocol):
    """An engine that can take weights as a member of a process group."""

    async def tp_size(self) -> int:
        """Number of its tensor-parallel ranks."""
        ...

    async def launch(self) -> str:
        """A text that another start of the engine, at the same address too, does not have."""
        ...

    async def join_group(self, group: PairGroupAddress) -> None:
        """Returns when all members have met, so rank 0 has to come there at the same time."""
        ...

    async def load_from_group(self, bucket: Bucket, group: str) -> None:
        """Loads a bucket that rank 0 of the group broadcasts at the same time, as bytes.

        Args:
            bucket: names, shapes and dtype; its values are not read.
            group: name of the group.
        """
        ...

    async def leave_group(self, group: str) -> None:
        """Forgets a group that it joined."""
        ...


@runtime_checkable
class FolderEngine(Engine, Protocol):
    """An engine that can read weights from a folder."""

    async def load_folder(self, path: Path) -> None:
        """Loads all weights from the safetensors files of a Hugging Face folder."""
        ...


@contextlib.asynccontextmanager
async def updating(engine: Engine, version: WeightVersion, mode: PauseMode = "abort") -> AsyncIterator[None]:
    """Surrounds the loading of one version: afterwards the engine serves all of it, or refuses to generate."""
    try:
        await engine.begin_update(version, mode)
        yield
        await engine.end_update(version)
    except BaseException:
        with contextlib.suppress(Exception):
            await asyncio.shield(engine.end_update(version, whole=False))
        raise
