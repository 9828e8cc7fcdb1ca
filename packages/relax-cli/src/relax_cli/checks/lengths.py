"""Longest sample of a run, and the context length that an engine needs for it."""

import dataclasses
import math

from relax_data.options import LARGEST_COUNT
from relax_train.batching import Split
from relax_train.models.architectures import model_shape
from relax_train.settings.model import read_hf_config

from relax_cli.config.run_config import RunConfig

ENGINE_MARGIN = 6
"""Tokens of its context length that SGLang never gives to a request: it refuses prompts of context length - 6 tokens
and more, and cuts responses two tokens earlier than asked."""
_OWN_GRAPHS = frozenset(
    {
        *("cuda_graph_bs", "cuda_graph_max_bs", "cuda_graph_config", "disable_cuda_graph", "disable_decode_cuda_graph"),
        *("cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "cuda_graph_backend_decode"),
    }
)
"""SGLang's arguments that say which batches have graphs when tokens are decoded."""
_GRAPHS_OF_SGLANG = 256
"""Largest batch that SGLang 0.5.17 captures graphs for on a GPU of 90 GiB and more, if no other is asked for."""


@dataclasses.dataclass(frozen=True)
class ContextLengths:
    """Tokens of prompt and response together.

    Attributes:
        sample: most of a sample. None: no limit is known.
        trained: the same for a sample that is trained, which must fit into a micro-batch; a prompt that leaves no room
            is dropped and counted.
        engine: context length that the engines are started with; None: the model's, or --sglang-context-length.
    """

    sample: int | None
    trained: int | None
    engine: int | None


def context_lengths(config: RunConfig) -> ContextLengths:
    """The limits of a run: ``--rollout-max-context-len``, and what the model and the engine can hold.

    An engine gets :data:`ENGINE_MARGIN` tokens more than a sample may have, where the model allows them; where it does
    not, samples are that much shorter.
    """
    asked = config.rollout.rollout_max_context_len
    # SGLang also takes 32k and the like; such a value is left to it.
    by_hand = str(config.sglang.sglang_extra.get("context_length", ""))
    model = model_shape(read_hf_config(config.train.model.hf_checkpoint)).max_positions
    holds = int(by_hand) if by_hand.isdecimal() else model
    engine = None
    sample = None if holds is None else holds - ENGINE_MARGIN
    if asked is not None:
        engine = asked + ENGINE_MARGIN if holds is None else min(asked + ENGINE_MARGIN, holds)
        sample = min(asked, engine - ENGINE_MARGIN)
    limits = [sample] if sample is not None else []
    if not config.debug.debug_rollout_only:
        limits += micro_batch_tokens(config).values()
    return ContextLengths(sample, min(limits, default=None), None if by_hand else engine)


def requests_at_once(config: RunConfig) -> int:
    """Most responses of a rollout that one engine generates at a time, if they are spread evenly."""
    rollout, limit = config.rollout, config.sglang.sglang_server_concurrency
    if rollout.rollout_function_path is not None:
        return limit  # how many it asks for, it alone knows
    engines = max(1, config.placement.engines if config.placement is not None else 1)
    return min(limit, math.ceil(rollout.submitted_prompts * rollout.n_samples_per_prompt / engines))


def decode_graphs(config: RunConfig) -> int | None:
    """Largest batch that an engine captures CUDA graphs for; None: as many as SGLang takes by itself.

    A larger batch starts its kernels one by one. A model of 4 B on an H200 made 7,400 tokens a second so with 320
    responses at once, and 12,000 with graphs for them.
    """
    chosen = config.sglang.sglang_extra
    if not chosen.keys().isdisjoint(_OWN_GRAPHS):
        return None
    most = min(requests_at_once(config), int(chosen.get("max_running_requests") or LARGEST_COUNT))
    return most if most > _GRAPHS_OF_SGLANG else None


def longest_sample(config: RunConfig) -> tuple[int | None, str, bool]:
    """(most tokens of a sample that is trained, what limits it, whether an option does).

    None: neither an option nor the model limits it.
    """
    limit, asked = context_lengths(config).trained, config.rollout.rollout_max_context_len
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    if prompt is not None and (limit is None or prompt + response < limit):
        return prompt + response, f"--rollout-max-prompt-len {prompt} + --rollout-max-response-len {response}", True
    if limit is None:
        return None, "nothing limits the length of a sample: give --rollout-max-context-len", False
    if asked is not None and asked >= limit:
        return limit, f"--rollout-max-context-len {asked}", True
    return limit, "what the model holds; --rollout-max-context-len sets less", False


def micro_batch_tokens(config: RunConfig) -> dict[str, int]:
    """Tokens of the longest sample that fits into a dynamic micro-batch, by the option that says so; empty without."""
    batch, parallel = config.train.batch, config.train.parallel
    if not batch.use_dynamic_batch_size:
        return {}
    cp = max(1, parallel.context_parallel_size)
    tp = max(1, parallel.tensor_model_parallel_size)
    split = Split(cp_size=cp, sequence_size=tp if parallel.sequence_parallel else 1)
    caps = {n: getattr(batch, n) for n in ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu")}
    # A micro-batch is padded to a multiple of what it is divided by, and so is each sample in it.
    step = split.total_multiple
    return {name: cap * cp // step * step for name, cap in caps.items() if cap is not None and cap >= 1}
