"""Responses with long-tailed lengths: an answer of the model, and then as many tokens as a hash of the prompt says.

A small model answers arithmetic in five tokens, so all its responses are about equally long. Here the engine goes on
behind the answer, as a model does that thinks for a few tokens or for very many. What follows the answer is sampled,
scored by the trainer and pushed through its layers like all else, but has loss mask 0, and the reward does not see it.
So the task and what is learnt are those of the example, and only the lengths differ.
"""

import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_data.types import Sample
    from relax_rollout.generation.generate import GenerateFunction, GenerationContext


def response_length(prompt_id: int, index: int, *, mean: float, spread: float) -> int:
    """Tokens of one response: log-normal, and the same in every run.

    Half of the variance belongs to the prompt, so that some problems are long for all their responses.

    Args:
        prompt_id: of the prompt.
        index: number of the response among those to the prompt.
        mean: of the distribution, in tokens.
        spread: standard deviation of the logarithm; 0: all are equally long.
    """
    of_prompt = random.Random(f"prompt {prompt_id}").gauss(0, 1)
    of_sample = random.Random(f"prompt {prompt_id} response {index}").gauss(0, 1)
    return round(math.exp(math.log(mean) - spread**2 / 2 + spread * (of_prompt + of_sample) / math.sqrt(2)))


def long_tailed(*, mean: float, spread: float = 2.0, answer_tokens: int = 8) -> "GenerateFunction":
    """A generate function for responses of :func:`response_length`, of which the first tokens are the answer.

    ``--rollout-max-response-len`` caps the length; an evaluation that allows ``answer_tokens`` gets the answer alone.
    The function has no state but the tokens. Called again for a sample that was interrupted, it goes on there.

    Args:
        mean: see :func:`response_length`.
        spread: likewise.
        answer_tokens: most tokens of an answer, which the end of sequence ends earlier; no response is shorter.
    """

    async def generate(sample: "Sample", context: "GenerationContext") -> None:
        length = response_length(sample.prompt.prompt_id, sample.index, mean=mean, spread=spread)
        more = max(length, answer_tokens) - len(sample.tokens)
        reason = await context.extend(sample, max_new_tokens=more, ignore_eos=True)
        answer, end = sample.tokens[:answer_tokens], context.tokenizer.eos_token_id
        ended = end in answer
        if ended:
            del answer[answer.index(end) + 1 :]
        sample.loss_mask[len(answer) :] = [0] * (len(sample.tokens) - len(answer))
        if reason == "abort":
            context.finish(sample, reason)
            return
        context.finish(sample, "stop" if ended else "length")
        # A response that is left empty would be filled with the text of all tokens.
        sample.response = context.tokenizer.decode(answer, skip_special_tokens=True) or " "

    generate.resumable = True  # type: ignore[attr-defined]
    return generate


generate = long_tailed(mean=64)
