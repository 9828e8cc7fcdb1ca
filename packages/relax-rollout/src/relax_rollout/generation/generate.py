"""The response of one sample: requests to the engines, the length budget, the end."""

import logging
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from relax_data.hooks import load_function
from relax_data.types import Prompt, Sample, SampleStatus, WeightVersion

from relax_rollout.concurrency import guarded
from relax_rollout.engines.base import EngineDied, GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.errors import describe
from relax_rollout.generation.pictures import can_go_on, engine_ids, pictures
from relax_rollout.generation.seam import cut_at_seam, ends_response
from relax_rollout.settings import EvalSettings, RolloutSettings

logger = logging.getLogger(__name__)

FinishReason = Literal["stop", "length", "abort"]
_CUSTOM_FLAG = "--custom-generate-function-path"


class GenerationError(ValueError):
    """A sample could not be generated; the message names it."""


def sampling_params(settings: RolloutSettings) -> SamplingParams:
    """Sampling parameters of a rollout; ``max_new_tokens`` is the whole response."""
    return SamplingParams(
        max_new_tokens=settings.rollout_max_response_len,
        temperature=settings.rollout_temperature,
        top_p=settings.rollout_top_p,
        top_k=settings.rollout_top_k,
        stop=settings.rollout_stop,
        stop_token_ids=settings.rollout_stop_token_ids,
    )


def eval_sampling_params(settings: EvalSettings, rollout: RolloutSettings) -> SamplingParams:
    """Sampling parameters of an evaluation: those of the rollout, where the user said nothing else."""
    base = sampling_params(rollout)
    return SamplingParams(
        max_new_tokens=settings.eval_max_response_len or base.max_new_tokens,
        temperature=base.temperature if settings.eval_temperature is None else settings.eval_temperature,
        top_p=base.top_p if settings.eval_top_p is None else settings.eval_top_p,
        top_k=base.top_k,
        stop=base.stop,
        stop_token_ids=base.stop_token_ids,
    )


class GenerationContext:
    """Argument of a generate function: all that it works with.

    Attributes:
        sampling: how tokens are drawn; ``max_new_tokens`` is the budget of the whole response.
        max_context_len: most tokens of prompt and response together, or None.
        tokenizer: the transformers tokenizer of the model.
        version: policy version that the engines serve now (the one to write for tokens that no engine sampled).
        kept_tokens: response tokens that interrupted samples brought along when they were continued.
        reprefilled_tokens: tokens of prompt and response whose keys and values were computed again for that.
        cut_at_pictures: names of the samples that ended as truncated because no engine can go on behind a mark of a
            picture that the model wrote.
    """

    def __init__(  # noqa: PLR0913  # all that a rollout knows of it, by name
        self,
        router: EngineRouter,
        *,
        sampling: SamplingParams,
        max_context_len: int | None,
        tokenizer: Any,
        version: WeightVersion,
        label: str,
        end_token_ids: frozenset[int] = frozenset(),
        keep_cache: bool = False,
    ) -> None:
        self._router, self._keep_cache = router, keep_cache
        self._label = label
        self._ends = end_token_ids
        self._seams: set[int] = set()
        self.kept_tokens = self.reprefilled_tokens = 0
        self.cut_at_pictures: set[str] = set()
        self.sampling = sampling
        self.max_context_len = max_context_len
        self.tokenizer = tokenizer
        self.version = version

    def room(self, prompt: Prompt) -> int:
        """Most tokens that a response to ``prompt`` may have, by both limits; below 1 the prompt is too long."""
        if self.max_context_len is None:
            return self.sampling.max_new_tokens
        return min(self.sampling.max_new_tokens, self.max_context_len - len(prompt.input_ids))

    def budget(self, sample: Sample) -> int:
        """Tokens that may still be added to ``sample``; none behind a mark of a picture that the model wrote."""
        if not can_go_on(sample, self._decode):
            return 0
        return self.room(sample.prompt) - len(sample.tokens)

    def continue_from(self, sample: Sample) -> None:
        """Notes that ``sample`` was interrupted: its next request goes on where another one was cut off."""
        if sample.tokens:
            self._seams.add(id(sample))

    async def extend(
        self,
        sample: Sample,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> FinishReason:
        """Lets an engine continue prompt + response of ``sample`` and appends what it sampled.

        A push of weights in between is not seen from outside: the tokens so far are appended, and another request asks
        for the rest when the push is over.

        Args:
            max_new_tokens: limit of this one request; the budget of the sample always holds.
            stop: strings that end this request, besides those of the settings.
            ignore_eos: go on behind the end of sequence, up to the limit.

        Returns:
            ``stop``, ``length`` (limit or budget reached, or no engine can go on behind a mark of a picture that the
            model wrote) or ``abort`` (the rollout interrupts the sample: return).
        """
        limit = self.budget(sample)
        if max_new_tokens is not None:
            limit = min(limit, max_new_tokens)
        if limit < 1:
            self._note_cut(sample)
            return "length"
        seam = id(sample) in self._seams  # still there after calls that asked for nothing
        self._seams.discard(id(sample))
        before = _sampled_last(sample) if seam else []
        engine = None
        while True:
            request = self._request(sample, limit, stop, ignore_eos=ignore_eos, engine=engine)
            result = await self._router.generate(request)
            if seam and result.tokens:
                self.kept_tokens += len(sample.tokens)
                prefix = len(sample.prompt.input_ids) + len(sample.tokens)
                self.reprefilled_tokens += max(0, prefix - result.cached_tokens)
            n, reason = self._end(before, result, request.sampling)
            sample.append(result.tokens[:n], result.log_probs[:n], result.versions[:n])
            if result.finish_reason != "held" or reason != "abort":
                return reason
            # A push of weights: the function that called is not told of it, and the next request waits for its end.
            engine = result.engine if self._keep_cache else None
            if sample.tokens:
                seam, before, limit = True, [*before, *result.tokens], limit - n
                sample.aborted_count += 1
                if self.budget(sample) < 1:
                    self._note_cut(sample)
                    return "length"

    def _note_cut(self, sample: Sample) -> None:
        """Counts a sample that ends here because of a picture's mark; a run must not end by what a model writes."""
        if can_go_on(sample, self._decode):
            return
        if not self.cut_at_pictures:
            logger.warning(
                "%s: its response ends after %d tokens, as one that is too long does: it has the mark of a picture or "
                "a video, and no engine can go on behind a mark that has no picture. The metric "
                "rollout/cut_at_pictures counts such responses; a model that writes many is far from its start weights",
                sample.name,
                len(sample.tokens),
            )
        self.cut_at_pictures.add(sample.name)
        self._seams.discard(id(sample))  # no request follows

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _request(
        self, sample: Sample, limit: int, stop: Sequence[str], *, ignore_eos: bool, engine: str | None
    ) -> GenerateRequest:
        s = self.sampling
        return GenerateRequest(
            rid=f"{self._label}-p{sample.prompt.prompt_id}-s{sample.index}-{uuid.uuid4().hex[:8]}",
            input_ids=[*engine_ids(sample.prompt), *sample.tokens],
            sampling=SamplingParams(
                max_new_tokens=limit,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                stop=(*s.stop, *stop),
                stop_token_ids=s.stop_token_ids,
                ignore_eos=ignore_eos,
            ),
            multimodal=pictures(sample.prompt),
            # Under that name its first request stored what it computed, and each further one goes on from there.
            cache_version=sample.versions[0] if self._keep_cache and sample.versions else None,
            engine=engine,
        )

    def _end(self, before: list[int], result: GenerateResult, sampling: SamplingParams) -> tuple[int, FinishReason]:
        """How many tokens of an answer belong to the response, and why it ended.

        Args:
            before: what the sample got from the request that was cut off, when this one goes on from there.
        """
        tokens, stops, decode = result.tokens, sampling.stop, self._decode
        # As for the engine, the last token of the budget ends a response by its length, whatever that token is.
        limit = sampling.max_new_tokens
        if (n := cut_at_seam(before, tokens, stops, decode)) is not None:
            return n, "stop" if n < limit else "length"
        if result.finish_reason in ("stop", "length"):
            return len(tokens), result.finish_reason
        # Below, the abort may have come when nothing was left to do.
        if len(tokens) >= limit:
            return len(tokens), "length"
        ends = () if sampling.ignore_eos else (*self._ends, *sampling.stop_token_ids)
        over = bool(tokens) and ends_response([*before, *tokens], ends, stops, decode)
        return len(tokens), "stop" if over else "abort"

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """Sets the status that ``reason`` means, and the decoded response."""
        statuses = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
        sample.status = statuses[reason]
        if sample.status.finished:
            sample.response = self.tokenizer.decode(sample.tokens, skip_special_tokens=True)


def _sampled_last(sample: Sample) -> list[int]:
    """The tokens of a response behind the last one that no engine sampled."""
    masked = [i for i, m in enumerate(sample.loss_mask) if not m]
    return sample.tokens[masked[-1] + 1 if masked else 0 :]


GenerateFunction = Callable[[Sample, GenerationContext], Awaitable[None]]
"""Extends the sample until it ends: afterwards its status is completed, truncated, or aborted.

With ``--partial-rollout`` it is called again for a sample that was interrupted, with the tokens that it has, and goes
on from there. A function that can do that says so by an attribute: ``generate.resumable = True``.
"""


async def generate_response(sample: Sample, context: GenerationContext) -> None:
    """The default: one request for all tokens of the response."""
    context.finish(sample, await context.extend(sample))


def load_generate_function(path: str | None, *, resumable: bool = False) -> GenerateFunction:
    """The function of ``--custom-generate-function-path``, or the default for None.

    Args:
        resumable: it has to go on from the tokens that a sample has.

    Raises:
        ValueError: it cannot be imported, or does not say that it is resumable.
    """
    if path is None:
        return generate_response
    function: GenerateFunction = load_function(_CUSTOM_FLAG, path)
    if resumable and getattr(function, "resumable", False) is not True:
        name = path.rpartition(":")[2]
        raise ValueError(
            f"{_CUSTOM_FLAG} {path}: with --partial-rollout the function is called again for an interrupted sample, "
            "with the tokens that it has, and has to go on from there. Make it do so and say it below its definition "
            f"with `{name}.resumable = True`, or remove --partial-rollout"
        )
    return function


async def run_generate_function(function: GenerateFunction, sample: Sample, context: GenerationContext) -> None:
    """Calls ``function`` and checks what it leaves.

    Raises:
        EngineDied: as it comes, with the engine's name.
        GenerationError: the function raised, or left a sample that is unfinished, empty, or has columns that do not fit
            together; the message names the sample.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        await guarded(function, sample, context)
    except EngineDied:
        raise
    except Exception as e:
        text = "".join(traceback.format_exception(e)).rstrip()
        raise GenerationError(f"{sample.name}: generation with {name} raised {describe(e)}\n{text}") from e
    if sample.status is SampleStatus.ABORTED:
        return
    if not sample.status.finished:
        raise GenerationError(
            f"{sample.name}: {name} left it {sample.status}"
            + (f" ({sample.error})" if sample.error else "")
            + f"; a function of {_CUSTOM_FLAG} must end with context.finish(sample, reason)"
        )
    if not sample.tokens:
        raise GenerationError(f"{sample.name}: {name} ended it without a single response token")
    try:
        sample.check_columns()
    except ValueError as e:
        raise GenerationError(f"{e} ({name} left it so)") from e
    if not sample.response:
        sample.response = context.tokenizer.decode(sample.tokens, skip_special_tokens=True)
