"""Client of one SGLang server; implements :class:`relax_rollout.engine.Engine` over HTTP.

It needs the server's address only, so it works in any process that reaches it.
"""

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from relax_data.types import WeightVersion
from relax_rollout.engine import GenerateRequest, GenerateResult, MemoryTag, PauseMode, SamplingParams
from relax_rollout.sglang.responses import ResponseBuilder
from relax_rollout.sglang.transport import Transport
from relax_rollout.sglang.versions import Weights, WeightsIncomplete

_ABORT_AGAIN_S = 0.5
_PROBE_EVERY_S = 5.0
_PUSH_POLL_S = 0.1
_MODALITIES = {"image": "image_data", "video": "video_data", "audio": "audio_data"}


@dataclasses.dataclass(eq=False)
class _Flight:
    """One request that is at the server."""

    server_rid: str
    task: asyncio.Task[GenerateResult] | None = None
    aborted: bool = False
    failure: Exception | None = None


class SGLangEngine:
    """A running SGLang server, over HTTP. One object serves one event loop at a time."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        log_path: str | Path | None = None,
        alive: Callable[[], bool] | None = None,
        track_versions_in_flight: bool = False,
        generate_timeout_s: float = 3600.0,
        control_timeout_s: float = 120.0,
        update_timeout_s: float = 600.0,
        silence_deadline_s: float = 300.0,
    ) -> None:
        """Stores where the server is; nothing is sent yet.

        Args:
            url: ``http://host:port``.
            name: ``engine0``, ...: how messages call it.
            log_path: the server's log, whose last lines end the message when it dies.
            alive: tells whether its process runs, where that is known.
            track_versions_in_flight: weights may change while requests run; each token then gets its version from the
                chunks of a stream. Otherwise a change during a request is an error.
            generate_timeout_s: longest time one response may take.
            control_timeout_s: longest time of pause, resume, flush, memory calls.
            update_timeout_s: longest time of one weight update call, of a push that others wait for, of writing traces.
            silence_deadline_s: how long the server may answer nothing at all while requests run.
        """
        self._name = name
        self._transport = Transport(url, name=name, log_path=log_path, alive=alive)
        self._track = track_versions_in_flight
        self._generate_timeout_s, self._control_timeout_s = generate_timeout_s, control_timeout_s
        self._update_timeout_s, self._silence_deadline_s = update_timeout_s, silence_deadline_s
        self._flights: dict[str, _Flight] = {}
        self._version: WeightVersion | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._released: set[MemoryTag] = set()
        self._begin_end: bool | None = None
        self._tp_size: int | None = None

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
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
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
        if request.rid in self._flights:
            raise ValueError(f"request id {request.rid} is in use at {self._name}")
        if self._released:
            raise WeightsIncomplete(f"{self._name} does not generate: {sorted(self._released)} memory is released")
        # SGLang aborts by prefix of the id: a random part of fixed length in front keeps "s1" from ending "s10".
        flight = _Flight(f"{uuid.uuid4().hex[:16]}-{request.rid}")
        first = not self._flights
        self._flights[request.rid] = flight
        try:
            flight.task = asyncio.ensure_future(self._fly(request, flight, first))
            self._watch()
            async with asyncio.timeout(self._generate_timeout_s):
                return await flight.task
        except asyncio.CancelledError:
            if flight.failure is not None:
                raise flight.failure from None
            raise
        except TimeoutError:
            if (died := await self._transport.verdict()) is not None:
                raise died from None
            raise TimeoutError(
                f"{self._name}: request {request.rid} was not finished after {self._generate_timeout_s:.0f} s"
            ) from None
        finally:
            del self._flights[request.rid]

    async def _fly(self, request: GenerateRequest, flight: _Flight, first: bool) -> GenerateResult:
        version = await self._version_at_start(first)
        if flight.aborted:
            return GenerateResult(tokens=[], log_probs=[], versions=[], finish_reason="abort")
        body = _generate_body(request, flight.server_rid, stream=self._track)
        builder = ResponseBuilder(self._name, version)
        if self._track:
            await self._collect_stream(body, builder)
        else:
            response = await self._transport.call(
                "POST", "/generate", body=body, timeout_s=self._generate_timeout_s, retry=False
            )
            builder.add(_answer(response.status_code, response.content, self._name))
        result = builder.result()
        now = builder.last_weights
        if not self._track and result.tokens and now.state == "whole" and now.version != version:
            raise RuntimeError(
                f"{self._name}: the weights changed from version {version} to {now.version} while request "
                f"{request.rid} was generating, so the version of its tokens is not known; make the engine with "
                "track_versions_in_flight=True, or push weights only when nothing is generating"
            )
        return result

    async def _version_at_start(self, first: bool) -> WeightVersion:
        """The version that is served now: asked of the server whenever nothing else was running."""
        if first or self._version is None or self._track:
            begin = time.monotonic()
            while True:
                weights = await self.weights()
                if weights.state != "pushing":
                    break
                # The server is paused meanwhile; a pusher that was killed never ends the pause.
                if time.monotonic() - begin > self._update_timeout_s:
                    weights.require_whole(self._name)
                await asyncio.sleep(_PUSH_POLL_S)
            self._version = weights.require_whole(self._name)
        return self._version

    async def _collect_stream(self, body: dict[str, Any], builder: ResponseBuilder) -> None:
        async with self._transport.stream("/generate", body, timeout_s=self._generate_timeout_s) as response:
            if response.status_code != 200:
                _answer(response.status_code, await response.aread(), self._name)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    _answer(int(chunk["error"].get("code", 400)), data.encode(), self._name)
                builder.add(chunk)

    def _watch(self) -> None:
        """Keeps one task that looks after the requests at the server, as long as there are any."""
        loop = asyncio.get_running_loop()
        if self._watcher is None or self._watcher.done() or self._watcher.get_loop() is not loop:
            self._watcher = loop.create_task(self._look_after_flights())

    async def _look_after_flights(self) -> None:
        last_answer = last_probe = time.monotonic()
        while self._flights:
            await asyncio.sleep(_ABORT_AGAIN_S)
            # An abort that overtakes its request is lost at the server, so it is repeated until the request ends.
            for flight in [f for f in self._flights.values() if f.aborted]:
                with contextlib.suppress(Exception):
                    await self._post("/abort_request", {"rid": flight.server_rid})
            if time.monotonic() - last_probe < _PROBE_EVERY_S:
                continue
            last_probe = time.monotonic()
            failure: Exception | None = None
            try:
                info = await self._transport.probe()
            except httpx.ConnectError:
                info, failure = None, await self._transport.verdict()
            if info is not None:
                last_answer = time.monotonic()
                weights = Weights.parse(info["weight_version"])
                if weights.state == "broken":
                    failure = _incomplete(weights, self._name)
            elif failure is None and time.monotonic() - last_answer > self._silence_deadline_s:
                failure = TimeoutError(f"{self._name} has answered nothing for {self._silence_deadline_s:.0f} s")
            if failure is not None:
                self._fail_flights(failure)

    def _fail_flights(self, failure: Exception) -> None:
        for flight in self._flights.values():
            if flight.task is not None and not flight.task.done():
                flight.failure = failure
                flight.task.cancel()

    async def abort(self, rid: str | None = None) -> None:
        """Ends one request of this client, or every request at the server when ``rid`` is None."""
        if rid is None:
            for flight in self._flights.values():
                flight.aborted = True
            await self._post("/abort_request", {"abort_all": True})
        elif (found := self._flights.get(rid)) is not None:
            found.aborted = True
            await self._post("/abort_request", {"rid": found.server_rid})

    # ------------------------------------------------------------------ control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops generation until :meth:`resume`; requests that come meanwhile wait.

        ``abort`` ends what is running (with partial results), ``in_place`` keeps it with its KV cache, ``retract`` keeps
        it and computes its KV cache anew.
        """
        if mode == "abort" and self._flights:
            # SGLang's own pause looks only once a second whether all have ended.
            await self.abort()
            await self._until(lambda: not self._flights, 2.0)
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

    async def weights(self) -> Weights:
        """State and version of the weights it holds."""
        return Weights.parse((await self._get("/model_info"))["weight_version"])

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
            await self._set_weights(Weights("released", version))
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

    @contextlib.asynccontextmanager
    async def pushing(self, version: WeightVersion, mode: PauseMode = "abort") -> AsyncIterator[None]:
        """Surrounds all updates of one push: pause, mark, (updates), flush, version, resume.

        If anything fails, the engine stays paused and is marked broken: every client refuses to generate until a
        whole push succeeded. With ``in_place`` and ``retract`` requests stay in flight and the cache is not emptied, so
        the server has to run with ``--sglang-disable-radix-cache``.
        """
        await self.pause(mode)
        try:
            await self._set_weights(Weights("pushing", version))
            await self._optional("/begin_weight_update")
            yield
            await self._optional("/end_weight_update")
            if mode == "abort":
                await self.flush_cache()
            await self._set_weights(Weights("whole", version))
        except BaseException:
            self._version = None
            with contextlib.suppress(Exception):
                await asyncio.shield(self._set_weights(Weights("broken", version)))
            raise
        self._version = version
        await self._post("/continue_generation", {})

    async def update_weights_from_tensors(
        self,
        serialized_per_tp_rank: Sequence[str],
        *,
        version: WeightVersion | None = None,
        load_format: str | None = None,
        flush: bool = False,
    ) -> None:
        """Loads one bucket; see :mod:`relax_rollout.sglang.weights`, which makes the strings and the whole protocol.

        Args:
            serialized_per_tp_rank: one string for each tensor-parallel rank of the engine.
            version: version to claim when it is loaded; a push claims it once, at its end.
            load_format: ``flattened_bucket``, or None for named tensors.
            flush: empty the cache afterwards; kills the server if a request is running.

        Raises:
            ValueError: the number of strings is not the engine's number of ranks.
            RuntimeError: the server refused the bucket.
        """
        if self._tp_size is None:
            self._tp_size = int((await self.server_info()).get("tp_size", 1))
        if len(serialized_per_tp_rank) != self._tp_size:
            raise ValueError(
                f"{self._name} has {self._tp_size} tensor-parallel ranks but got {len(serialized_per_tp_rank)} buckets"
            )
        body = {
            "serialized_named_tensors": list(serialized_per_tp_rank),
            "load_format": load_format,
            "flush_cache": flush,
            "weight_version": None if version is None else str(version),
        }
        await self._post("/update_weights_from_tensor", body, timeout_s=self._update_timeout_s, retry=False)

    async def update_weights_from_disk(
        self, path: str | Path, version: WeightVersion, *, mode: PauseMode = "abort"
    ) -> None:
        """Loads a Hugging Face folder that the server can read, as one whole push.

        Raises:
            RuntimeError: the server could not load it; the engine is marked broken then.
        """
        async with self.pushing(version, mode):
            body = {"model_path": str(path), "flush_cache": False}
            await self._post("/update_weights_from_disk", body, timeout_s=self._update_timeout_s, retry=False)

    async def _set_weights(self, weights: Weights) -> None:
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
        return response.json()

    def _check(self, path: str, response: httpx.Response) -> None:
        if response.status_code != 200:
            raise RuntimeError(f"{self._name}: {path} failed ({response.status_code}): {response.text[:1000]}")

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits until the condition holds, or the time is over."""
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def _incomplete(weights: Weights, engine: str) -> WeightsIncomplete:
    try:
        weights.require_whole(engine)
    except WeightsIncomplete as error:
        return error
    raise AssertionError("only called for weights that are not whole")


def _generate_body(request: GenerateRequest, rid: str, *, stream: bool) -> dict[str, Any]:
    """The JSON of one request."""
    unknown = set(request.multimodal) - set(_MODALITIES)
    if unknown:
        raise ValueError(f"request {request.rid}: unknown inputs {sorted(unknown)}; known: {sorted(_MODALITIES)}")
    return {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request.sampling),
        "return_logprob": True,
        "stream": stream,
        **{_MODALITIES[k]: v for k, v in request.multimodal.items()},
    }


def _sampling(params: SamplingParams) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "ignore_eos": params.ignore_eos,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    return sampling


def _answer(status: int, content: bytes, engine: str) -> Mapping[str, Any]:
    """The JSON of a successful answer.

    Raises:
        ValueError: the server refuses the request as invalid.
        RuntimeError: any other failure.
    """
    if status == 200:
        return json.loads(content)
    try:
        error = json.loads(content).get("error", {})
        message = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = None
    text = f"{engine} refused a request ({status}): {message or content.decode(errors='replace')[:500]}"
    raise ValueError(text) if status in (400, 422) else RuntimeError(text)
