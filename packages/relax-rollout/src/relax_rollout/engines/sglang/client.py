"""Client of one SGLang server; implements :class:`relax_rollout.engines.base.Engine` over HTTP.

It needs the server's address only, so it works in any process that reaches it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import (
    EngineAddress,
    GenerateRequest,
    GenerateResult,
    IpcHandle,
    MemoryTag,
    PairGroupAddress,
    PauseMode,
    updating,
)
from relax_rollout.engines.sglang.inflight import InflightRequest, InflightRequests
from relax_rollout.engines.sglang.messages import (
    ResponseBuilder,
    generate_body,
    raise_error_event,
    raise_refusal,
    read_answer,
)
from relax_rollout.engines.sglang.transport import Transport
from relax_rollout.engines.sglang.waves import WaveRefused, Waves
from relax_rollout.engines.sglang.weight_status import WeightsIncomplete, WeightStatus
from relax_rollout.engines.sglang.weights import group_update_body, update_body

_PUSH_POLL_S = 0.1


class SGLangEngine:
    """A running SGLang server, over HTTP. One object serves one event loop at a time."""

    def __init__(  # noqa: PLR0913  # limits of one client, by name
        self,
        url: str,
        *,
        name: str,
        key: str | None = None,
        log_path: str | Path | None = None,
        alive: Callable[[], bool] | None = None,
        track_versions_in_flight: bool = False,
        keeps_cache: bool = False,
        generate_timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        update_timeout_s: float = 600.0,
        silence_deadline_s: float = 300.0,
    ) -> None:
        """Stores where the server is; nothing is sent yet.

        Args:
            url: ``http://host:port``.
            name: ``engine0``, ...: how messages call it.
            key: that its server asks for; None when it asks for none.
            log_path: the server's log, whose last lines end the message when it dies.
            alive: tells whether its process runs, where that is known.
            track_versions_in_flight: weights may change while requests run; each token then gets its version from the
                chunks of a stream. Otherwise a change during a request is an error.
            keeps_cache: leave the prefix cache as it is when new weights come.
            generate_timeout_s: longest time one response may take.
            control_timeout_s: longest time of pause, resume, flush, memory calls.
            update_timeout_s: longest time of one weight update call, of a push that others wait for, of writing traces.
            silence_deadline_s: how long the server may answer nothing at all while requests run.
        """
        self._name = name
        self._transport = Transport(url, name=name, key=key, log_path=log_path, alive=alive)
        self._track, self._keeps_cache = track_versions_in_flight, keeps_cache
        self._generate_timeout_s, self._control_timeout_s = generate_timeout_s, control_timeout_s
        self._update_timeout_s = update_timeout_s
        self._inflight = InflightRequests(self._transport, silence_deadline_s=silence_deadline_s)
        self._waves = Waves(self._transport, timeout_s=generate_timeout_s, abandon=self._inflight.abandon)
        self._version: WeightVersion | None = None
        self._asking: asyncio.Task[WeightVersion] | None = None
        self._released: set[MemoryTag] = set()
        self._updating: PauseMode | None = None
        self._begin_end: bool | None = None
        self._info: dict[str, Any] | None = None

    @classmethod
    def at(cls, address: EngineAddress) -> "SGLangEngine":
        """The client of a server that another process started."""
        return cls(
            address.url,
            name=address.name,
            key=address.key,
            log_path=address.log_path,
            keeps_cache=address.keeps_cache,
        )

    @property
    def name(self) -> str:
        """``engine0``, ...: how messages and file names call it."""
        return self._name

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return self._transport.url

    async def close(self) -> None:
        """Closes its connections; the server goes on."""
        self._inflight.close()
        self._waves.close()
        await self._transport.close()

    # ------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continues one sequence until it is finished or aborted.

        Raises:
            ValueError: the server refuses the request (too long, bad sampling parameters), or the id is in use.
            WeightsIncomplete: a push failed or the weights were released; push again.
            EngineDied: the server is gone.
            TimeoutError: the response took longer than ``generate_timeout_s``.
            RuntimeError: the weights changed meanwhile although versions are not tracked.
        """
        if request.sampling.max_new_tokens < 1:
            raise ValueError(f"request {request.rid}: max_new_tokens is {request.sampling.max_new_tokens}, need 1")
        if self._released:
            raise WeightsIncomplete(f"{self._name} does not generate: {sorted(self._released)} memory is released")
        if not self._inflight:
            self._version = None
        with self._inflight.entered(request.rid) as inflight:
            inflight.task = asyncio.ensure_future(self._answer(request, inflight))
            try:
                async with asyncio.timeout(self._generate_timeout_s):
                    return await inflight.task
            except asyncio.CancelledError:
                if inflight.failure is not None:
                    raise inflight.failure from None
                self._inflight.abandon(inflight.server_rid)
                raise
            except TimeoutError as error:
                if not inflight.task.cancelled():
                    raise
                self._inflight.abandon(inflight.server_rid)
                raise TimeoutError(
                    f"{self._name}: request {request.rid} was not finished after {self._generate_timeout_s:.0f} s"
                ) from error

    async def _answer(self, request: GenerateRequest, inflight: InflightRequest) -> GenerateResult:
        version = await self._version_at_start()
        if inflight.aborted:
            return GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="abort")
        body = generate_body(request, inflight.server_rid, version, stream=self._track)
        builder = ResponseBuilder(self._name, version)
        if self._track:
            await self._collect_stream(body, builder)
        else:
            for piece in await self._pieces(body, inflight, alone=bool(request.multimodal)):
                builder.add(piece)
        result = builder.result()
        now = builder.last_weights
        if not self._track and result.tokens and now.state == "whole" and now.version != version:
            raise RuntimeError(
                f"{self._name}: the weights changed from version {version} to {now.version} while request "
                f"{request.rid} was generating, so the version of its tokens is not known; make the engine with "
                "track_versions_in_flight=True, or push weights only when nothing is generating"
            )
        return result

    async def _pieces(self, body: dict[str, Any], inflight: InflightRequest, *, alone: bool) -> list[Mapping[str, Any]]:
        """The answer to one request, which may travel together with others."""
        if not alone:
            with contextlib.suppress(WaveRefused):
                return await self._waves.ask(body)
            body["rid"] = inflight.renew()  # each learns for itself what the server says
        return await self._waves.alone(body)

    async def _version_at_start(self) -> WeightVersion:
        """The version that is served now. It cannot change while requests run, unless it is tracked."""
        if self._track:
            return await self._ask_version()
        if self._version is None:
            # Hundreds of requests start together: one of them asks.
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask_version())
            self._version = await asyncio.shield(self._asking)
        return self._version

    async def _ask_version(self) -> WeightVersion:
        begin = time.monotonic()
        while True:
            weights = await self.weights()
            # The server is paused meanwhile; a pusher that was killed never ends the pause.
            if weights.state != "pushing" or time.monotonic() - begin > self._update_timeout_s:
                return weights.require_whole(self._name)
            await asyncio.sleep(_PUSH_POLL_S)

    async def _collect_stream(self, body: dict[str, Any], builder: ResponseBuilder) -> None:
        async with self._transport.stream("/generate", body, timeout_s=self._generate_timeout_s) as answer:
            if answer.status != 200:
                read_answer(answer.status, await answer.read(), self._name)
            async for chunk in answer.events():
                raise_error_event(chunk, self._name)
                builder.add(chunk)
                raise_refusal(chunk["meta_info"].get("finish_reason") or {}, self._name)

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request of this client, or every request at the server when ``rid`` is None."""
        await self._inflight.abort(rid)

    # ------------------------------------------------------------------ control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops generation until :meth:`resume`; requests that come meanwhile wait.

        ``abort`` ends what is running (with partial results), ``in_place`` keeps it with its KV cache, ``retract``
        keeps it and computes its KV cache anew.
        """
        if mode == "abort" and self._inflight:
            # SGLang's own pause looks only once a second whether all have ended.
            await self.abort()
            await self._inflight.drained(2.0)
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Goes on after :meth:`pause`.

        Raises:
            WeightsIncomplete: a push is running or failed; it has to finish first.
        """
        weights = await self.weights()
        if weights.state in ("pushing", "broken"):
            weights.require_whole(self._name)
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        """Empties the prefix cache; waits until no request runs.

        Raises:
            TimeoutError: requests were still running at the deadline.
        """
        deadline = time.monotonic() + self._control_timeout_s
        while True:
            response = await self._transport.call("POST", "/flush_cache", timeout_s=self._control_timeout_s)
            if response.status_code == 200:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._name}: requests were still running after {self._control_timeout_s:.0f} s of waiting to "
                    "empty its cache; abort or resume them first"
                )
            await asyncio.sleep(0.05)

    async def weights(self) -> WeightStatus:
        """State and version of the weights it holds."""
        return WeightStatus.parse((await self._get("/model_info"))["weight_version"])

    async def weight_version(self) -> WeightVersion:
        """The version it serves.

        Raises:
            WeightsIncomplete: its weights are not one whole version.
        """
        return (await self.weights()).require_whole(self._name)

    async def server_info(self) -> dict[str, Any]:
        """All settings and state that the server tells."""
        return await self._get("/server_info")

    async def release_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        """Gives GPU memory back, once no request runs. Without effect for what is released already."""
        new = [t for t in tags if t not in self._released]
        if not new:
            return
        await self.flush_cache()
        if "weights" in new:
            version = (await self.weights()).version
            await self._set_weights(WeightStatus("released", version))
        self._released.update(new)
        await self._post("/release_memory_occupation", {"tags": new})

    async def resume_memory(self, tags: Sequence[MemoryTag] = ("kv_cache", "weights")) -> None:
        """Takes the memory back; released weights need a push before the next token."""
        old = [t for t in tags if t in self._released]
        if old:
            await self._post("/resume_memory_occupation", {"tags": old})
            self._released.difference_update(old)

    async def start_profile(self, **options: Any) -> None:
        """Starts SGLang's profiler; options as of ``/start_profile`` (``output_dir``, ``num_steps``, ...)."""
        await self._post("/start_profile", options)

    async def stop_profile(self) -> None:
        """Stops it; returns when the traces are written."""
        await self._post("/stop_profile", None, timeout_s=self._update_timeout_s)

    # ------------------------------------------------------------------ weights

    async def begin_update(self, version: WeightVersion, mode: PauseMode = "abort") -> None:
        """Pauses and marks the weights: every client refuses to generate until a whole version has come.

        With ``in_place`` and ``retract`` requests stay in flight and the cache is not emptied. Later requests find
        nothing of it, since each names its version; one in flight goes on with what it had computed before.
        """
        await self.pause(mode)
        self._updating = mode
        await self._set_weights(WeightStatus("pushing", version))
        await self._optional("/begin_weight_update")
        await self._facts()  # what load() asks for, and nothing waits for it here

    async def load(self, bucket: Bucket, handles: Sequence[IpcHandle] | None = None) -> None:
        """Loads a bucket: by value, or from one handle for each tensor-parallel rank.

        Raises:
            ValueError: the number of handles (1 by value) is not the engine's number of ranks.
            RuntimeError: the server refused the bucket.
        """
        copies, ranks = 1 if handles is None else len(handles), await self.tp_size()
        if copies != ranks:
            raise ValueError(f"{self._name} has {ranks} tensor-parallel ranks but got {copies} buckets")
        path, body = "/update_weights_from_tensor", update_body(bucket, handles)
        try:
            await self._post(path, body, timeout_s=self._update_timeout_s, retry=False)
        finally:
            body.clear()

    async def end_update(self, version: WeightVersion, *, whole: bool = True) -> None:
        """Empties the cache, claims the version and goes on; or marks the weights as broken and stays paused."""
        if not whole:
            if self._updating is not None:
                self._updating = self._version = None
                await self._set_weights(WeightStatus("broken", version))
            return
        assert self._updating is not None, "an update begins before it ends"
        await self._optional("/end_weight_update")
        steps = [self._set_weights(WeightStatus("whole", version))]
        if self._updating == "abort" and not self._keeps_cache:
            steps.append(self.flush_cache())
        # It is paused until both are through; one that still ran when the other has failed could undo the mark of that.
        for outcome in await asyncio.gather(*steps, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        self._updating, self._version = None, version
        await self._post("/continue_generation", {})

    async def tp_size(self) -> int:
        """Number of its tensor-parallel ranks."""
        return int((await self._facts()).get("tp_size", 1))

    async def launch(self) -> str:
        """The times at which the server's parts were ready, which no other start has."""
        return str((await self._facts()).get("startup_time"))

    async def _facts(self) -> dict[str, Any]:
        if self._info is None:
            self._info = await self.server_info()
        return self._info

    async def join_group(self, group: PairGroupAddress) -> None:
        """Joins a process group as ranks 1 and up; returns when rank 0 has come too.

        Raises:
            RuntimeError: they did not meet.
        """
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s=self._update_timeout_s, retry=False)

    async def load_from_group(self, bucket: Bucket, group: str) -> None:
        """Loads a bucket that rank 0 of the group broadcasts at the same time.

        Raises:
            RuntimeError: the broadcast broke, or the server refused the bucket.
        """
        body = group_update_body(bucket, group)
        await self._post("/update_weights_from_distributed", body, timeout_s=self._update_timeout_s, retry=False)

    async def leave_group(self, group: str) -> None:
        """Forgets a group that it joined.

        Raises:
            RuntimeError: it is in no such group.
        """
        await self._post("/destroy_weights_update_group", {"group_name": group}, retry=False)

    async def load_folder(self, path: Path) -> None:
        """Loads a Hugging Face folder that the server can read.

        Raises:
            RuntimeError: the server could not load it.
        """
        body = {"model_path": str(path), "flush_cache": False}
        await self._post("/update_weights_from_disk", body, timeout_s=self._update_timeout_s, retry=False)

    async def update_weights_from_disk(
        self, path: str | Path, version: WeightVersion, *, mode: PauseMode = "abort"
    ) -> None:
        """Loads a Hugging Face folder that the server can read, as one whole push.

        Raises:
            RuntimeError: the server could not load it; the engine is marked broken then.
        """
        async with updating(self, version, mode):
            await self.load_folder(Path(path))

    async def _set_weights(self, weights: WeightStatus) -> None:
        await self._post("/update_weight_version", {"new_version": str(weights), "abort_all_requests": False})

    async def _optional(self, path: str) -> None:
        """A call that newer servers require and older ones do not know."""
        if self._begin_end is not False:
            response = await self._transport.call("POST", path, body={}, timeout_s=self._control_timeout_s)
            self._begin_end = response.status_code != 404
            if self._begin_end:
                self._check(path, response)

    # ------------------------------------------------------------------ plumbing

    async def _post(self, path: str, body: Any, *, timeout_s: float | None = None, retry: bool = True) -> Any:
        response = await self._transport.call(
            "POST", path, body=body, timeout_s=timeout_s or self._control_timeout_s, retry=retry
        )
        self._check(path, response)

    async def _get(self, path: str) -> dict[str, Any]:
        response = await self._transport.call("GET", path, timeout_s=self._control_timeout_s)
        self._check(path, response)
        answer: dict[str, Any] = response.json()
        return answer

    def _check(self, path: str, response: httpx.Response) -> None:
        if response.status_code != 200:
            raise RuntimeError(f"{self._name}: {path} failed ({response.status_code}): {response.text[:1000]}")
