"""The response of one sample: requests to the engines, the length budget, the end."""

import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from relax_data.hooks import load_function
from relax_data.types import Prompt, Sample, SampleStatus, WeightVersion

from relax_rollout.concurrency import guarded
from relax_rollout.engines.base import EngineDied, GenerateRequest, SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.errors import describe
from relax_rollout.settings import EvalSettings, RolloutSettings

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
        version: policy version of this rollout (the one to write for tokens that no engine sampled).
    """

    def __init__(
        self,
        router: EngineRouter,
        *,
        sampling: SamplingParams,
        max_context_len: int | None,
        tokenizer: Any,
        version: WeightVersion,
        label: str,
    ) -> None:
        self._router = router
        self._label = label
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
        """Tokens that may still be added to ``sample``."""
        return self.room(sample.prompt) - len(sample.tokens)

    async def extend(
        self, sample: Sample, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> FinishReason:
        """Lets an engine continue prompt + response of ``sample`` and appends what it sampled.

        Args:
            max_new_tokens: limit of this one request; the budget of the sample always holds.
            stop: strings that end this request, besides those of the settings.

        Returns:
            ``stop``, ``length`` (limit or budget reached) or ``abort`` (the rollout interrupts the sample: return).
        """
        limit = self.budget(sample)
        if max_new_tokens is not None:
            limit = min(limit, max_new_tokens)
        if limit < 1:
            return "length"
        s = self.sampling
        request = GenerateRequest(
            rid=f"{self._label}-p{sample.prompt.prompt_id}-s{sample.index}-{uuid.uuid4().hex[:8]}",
            input_ids=[*sample.prompt.input_ids, *sample.tokens],
            sampling=SamplingParams(
                max_new_tokens=limit,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                stop=(*s.stop, *stop),
                stop_token_ids=s.stop_token_ids,
            ),
            multimodal=sample.prompt.multimodal,
        )
        result = await self._router.generate(request)
        sample.append(result.tokens, result.log_probs, result.versions)
        if result.finish_reason == "abort" and len(result.tokens) >= limit:
            return "length"  # the abort came when nothing was left to do
        return result.finish_reason

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """Sets the status that ``reason`` means, and the decoded response."""
        statuses = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
        sample.status = statuses[reason]
        if sample.status.finished:
            sample.response = self.tokenizer.decode(sample.tokens, skip_special_tokens=True)


GenerateFunction = Callable[[Sample, GenerationContext], Awaitable[None]]
"""Extends the sample until it ends: afterwards its status is completed, truncated, or aborted."""


async def generate_response(sample: Sample, context: GenerationContext) -> None:
    """The default: one request for all tokens of the response."""
    context.finish(sample, await context.extend(sample))


def load_generate_function(path: str | None) -> GenerateFunction:
    """The function of ``--custom-generate-function-path``, or the default for None.

    Raises:
        ValueError: it cannot be imported.
    """
    return generate_response if path is None else load_function(_CUSTOM_FLAG, path)


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
