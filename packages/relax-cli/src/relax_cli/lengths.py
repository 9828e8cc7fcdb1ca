"""How long a sample may be, and what context length an engine needs for that."""

import dataclasses

from relax_train.settings.model import read_hf_config

from relax_cli.config import RunConfig
from relax_cli.model_facts import ModelFacts

ENGINE_MARGIN = 6
"""Tokens of its context length that SGLang never gives to a request: it refuses prompts of context length - 6 tokens
and more, and cuts responses two tokens earlier than asked."""


@dataclasses.dataclass(frozen=True)
class ContextLengths:
    """Tokens of prompt and response together.

    Attributes:
        sample: most of a sample; a prompt that leaves no room is dropped. None: no limit is known.
        engine: context length that the engines are started with; None: the model's, or --sglang-context-length.
    """

    sample: int | None
    engine: int | None


def context_lengths(config: RunConfig) -> ContextLengths:
    """The limits of a run: ``--rollout-max-context-len``, and what the model and the engine can hold.

    An engine gets :data:`ENGINE_MARGIN` tokens more than a sample may have, where the model allows them; where it does
    not, samples are that much shorter.
    """
    asked = config.rollout.rollout_max_context_len
    # SGLang also takes 32k and the like; such a value is left to it.
    by_hand = str(config.sglang.sglang_extra.get("context_length", ""))
    model = ModelFacts.from_config(read_hf_config(config.train.model.hf_checkpoint)).max_positions
    holds = int(by_hand) if by_hand.isdigit() else model
    if asked is None:
        return ContextLengths(None if holds is None else holds - ENGINE_MARGIN, None)
    engine = asked + ENGINE_MARGIN if holds is None else min(asked + ENGINE_MARGIN, holds)
    return ContextLengths(min(asked, engine - ENGINE_MARGIN), None if by_hand else engine)
