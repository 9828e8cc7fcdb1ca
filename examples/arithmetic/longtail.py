"""Responses with long-tailed lengths: an answer of the model, then as many more tokens as a hash of the prompt says.

A small model answers arithmetic in five tokens, so all its responses are about equally long. Here the engine goes on
behind the answer, as a model does that thinks for a few tokens or for very many. The tokens of the tail are sampled,
weighed and trained like all others but for their loss mask, which is 0; the reward sees the answer alone. So the task
and what is learnt are those of the example, and only the lengths differ.
"""

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_data.types import Sample
    from relax_rollout.generation.generate import GenerateFunction, GenerationContext


def tail_length(prompt_id: int, index: int, *, mean: float, spread: float) -> int:
    """Tokens behind the answer of one sample: log-normal, and the same in every run.

    Half of the variance belongs to the prompt, which makes some problems long for all their responses.

    Args:
        prompt_id: of the prompt.
        index: number of the response among those to the prompt.
        mean: of the distribution, in tokens.
        spread: standard deviation of the logarithm; 0: all are equally long.
    """
    of_prompt = random.Random(f"prompt {prompt_id}").gauss(0, 1)
    of_sample = random.Random(f"prompt {prompt_id} response {index}").gauss(0, 1)
    return round(math.exp(math.log(mean) - spread**2 / 2 + spread * (of_prompt + of_sample) / math.sqrt(2)))


def long_tailed(*, mean: float, spread: float = 1.0, answer_tokens: int = 8) -> "GenerateFunction":
    """A generate function whose responses are ``answer_tokens`` at most, and a tail of :func:`tail_length`.

    ``--rollout-max-response-len`` caps both together. Where the cap is ``answer_tokens``, as an evaluation may set it,
    there is no tail. The function has no state but the tokens: called again for a sample that was interrupted, in the
    answer or in the tail, it goes on there.
    """

    async def generate(sample: "Sample", context: "GenerationContext") -> None:
        end = context.tokenizer.eos_token_id
        if end not in sample.tokens[:answer_tokens]:
            reason = await context.extend(sample, max_new_tokens=answer_tokens - len(sample.tokens))
            if reason == "abort":
                context.finish(sample, reason)
                return
        answer = sample.tokens[:answer_tokens]
        ended = end in answer
        if ended:
            answer = answer[: answer.index(end) + 1]
        wanted = len(answer) + tail_length(sample.prompt.prompt_id, sample.index, mean=mean, spread=spread)
        reason = await context.extend(sample, max_new_tokens=wanted - len(sample.tokens), ignore_eos=True)
        sample.loss_mask[len(answer) :] = [0] * (len(sample.tokens) - len(answer))
        if reason == "abort":
            context.finish(sample, "abort")
            return
        context.finish(sample, "stop" if ended else "length")
        # Of a response that is left empty, the text of all tokens would be put in its place.
        sample.response = context.tokenizer.decode(answer, skip_special_tokens=True) or " "

    generate.resumable = True  # type: ignore[attr-defined]
    return generate


generate = long_tailed(mean=64)
