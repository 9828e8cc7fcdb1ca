"""The JSON of ``/generate``: requests to it, and its answers as :class:`relax_rollout.engines.base.GenerateResult`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from relax_data.types import WeightVersion

from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.sglang.weight_status import WeightStatus

_MODALITIES = {"image": "image_data", "video": "video_data", "audio": "audio_data"}


class ResponseBuilder:
    """Collects the tokens of one request from one answer, or from the chunks of a stream.

    Token ids are taken from the log-probability entries ``[log_prob, token_id, text]``, so the two cannot disagree.
    A chunk may hold all tokens so far, or only the new ones; ``completion_tokens`` tells which.
    """

    def __init__(self, engine: str, version: WeightVersion) -> None:
        """Starts with no token.

        Args:
            engine: its name, for messages.
            version: what the engine served when the request began.
        """
        self._engine, self._version = engine, version
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._versions: list[WeightVersion] = []
        self._finish: dict[str, Any] | None = None
        self._cached = 0
        self._last = WeightStatus("whole", version)

    @property
    def last_weights(self) -> WeightStatus:
        """State of the weights that the latest answer names."""
        return self._last

    def add(self, answer: Mapping[str, Any]) -> None:
        """Takes one answer or chunk.

        Raises:
            RuntimeError: its columns do not fit together.
        """
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        total = int(meta.get("completion_tokens", len(answer.get("output_ids") or [])))
        seen = len(self._tokens)
        new = entries[seen:] if len(entries) == total else entries
        if seen + len(new) != total:
            raise RuntimeError(
                f"{self._engine} returned {total} tokens but log-probabilities of {seen + len(new)}; "
                "it must be asked with return_logprob"
            )
        if "weight_version" in meta:
            self._last = WeightStatus.parse(meta["weight_version"])
        # A marker means that the tokens were sampled before the push that it announces.
        if self._last.state == "whole":
            self._version = self._last.version
        self._tokens.extend(int(e[1]) for e in new)
        self._log_probs.extend(float(e[0]) for e in new)
        self._versions.extend([self._version] * len(new))
        if (spans := meta.get("weight_versions")) is not None:
            self._apply(spans)
        self._cached = int(meta.get("cached_tokens") or self._cached)
        self._finish = meta.get("finish_reason") or self._finish

    def _apply(self, spans: list[Mapping[str, Any]]) -> None:
        """Versions from ``{version, start, end}`` spans over the response, which newer servers return."""
        for span in spans:
            weights = WeightStatus.parse(span["version"])
            if weights.state == "whole":
                for i in range(max(0, span["start"]), min(span["end"], len(self._versions))):
                    self._versions[i] = weights.version

    def result(self) -> GenerateResult:
        """The finished response.

        Raises:
            RuntimeError: no answer said that it is finished.
        """
        kind = (self._finish or {}).get("type")
        if kind not in ("stop", "length", "abort"):
            raise RuntimeError(f"{self._engine} ended a response with finish_reason {self._finish}")
        return GenerateResult(
            tokens=self._tokens,
            log_probs=self._log_probs,
            versions=self._versions,
            finish_reason=kind,
            cached_tokens=self._cached,
            engine=self._engine,
        )


def generate_body(request: GenerateRequest, rid: str, version: WeightVersion, *, stream: bool) -> dict[str, Any]:
    """The JSON of one request.

    Its ``extra_key`` divides the server's prefix cache by version, so that a prompt never continues from what other
    weights have computed, also when the cache was not emptied in between: unless the request names older weights.
    """
    unknown = set(request.multimodal) - set(_MODALITIES)
    if unknown:
        raise ValueError(f"request {request.rid}: unknown inputs {sorted(unknown)}; known: {sorted(_MODALITIES)}")
    return {
        "rid": rid,
        "input_ids": list(request.input_ids),
        "sampling_params": _sampling(request.sampling),
        "return_logprob": True,
        "stream": stream,
        "extra_key": f"v{version if request.cache_version is None else request.cache_version}",
        **{_MODALITIES[k]: v for k, v in request.multimodal.items()},
    }


_ONE_PIECE = -(1 << 30)
"""Interval of a stream that gives each response in one piece. SGLang sends a piece before the end when the number of
tokens is a multiple of it; of an interval above 1, when it is one more, which the first token would be."""
_PIECE = 256
"""Interval for long responses. Hundreds that end at once, as for a push of weights, are then there but for the last
piece of each: both sides have read and written the others while the engine computed."""


def list_body(bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON of one streamed call for several requests of :func:`generate_body`, none of them with other inputs."""
    return {
        **{name: [body[name] for body in bodies] for name in ("rid", "input_ids", "extra_key")},
        "sampling_params": [_in_pieces(body["sampling_params"]) for body in bodies],
        "return_logprob": True,
        "stream": True,
    }


def _in_pieces(sampling: Mapping[str, Any]) -> dict[str, Any]:
    interval = _PIECE if sampling["max_new_tokens"] > 2 * _PIECE else _ONE_PIECE
    return {**sampling, "stream_interval": interval}


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


def read_answer(status: int, content: bytes, engine: str) -> Mapping[str, Any]:
    """The JSON of a successful answer.

    Raises:
        ValueError: the server refuses the request as invalid.
        RuntimeError: any other failure.
    """
    if status == 200:
        answer: dict[str, Any] = json.loads(content)
        return answer
    try:
        error = json.loads(content).get("error", {})
        message = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        message = None
    raise _refusal(status, message or content.decode(errors="replace")[:500], engine)


def raise_refusal(finish_reason: Mapping[str, Any], engine: str) -> None:
    """Raises what :func:`read_answer` would, when a streamed response ended because the server refuses the request."""
    if (status := finish_reason.get("status_code")) is not None:
        raise _refusal(int(status), str(finish_reason.get("message")), engine)


def raise_error_event(event: Mapping[str, Any], engine: str) -> None:
    """Raises what :func:`read_answer` would, when an event of a stream says that the whole call failed."""
    if (error := event.get("error")) is not None:
        raise _refusal(int(error.get("code", 400)), error.get("message") or json.dumps(event)[:500], engine)


def _refusal(status: int, message: str, engine: str) -> ValueError | RuntimeError:
    text = f"{engine} refused a request ({status}): {message}"
    return ValueError(text) if status in (400, 422) else RuntimeError(text)
