"""Sizes that no machine holds, or that no run waits for: allowed, and most likely a slip of the keyboard."""

from relax_train.models.architectures import model_shape
from relax_train.models.shape import ModelShape
from relax_train.settings.model import read_hf_config

from relax_cli.checks.lengths import context_lengths
from relax_cli.checks.memory import Moment, activations, device_room, moments, weight_width
from relax_cli.cluster.placement import Placement
from relax_cli.config.run_config import RunConfig

TOKENS_PER_S = {"cuda": 50_000, "cpu": 5_000}
"""More than any model was seen to generate in an engine of one GPU, or on the cores of a laptop."""
DAY_S = 24 * 3600
"""After which the driver gives a rollout up (:data:`relax_cli.cluster.waits.CALL_DEADLINE_S`)."""


def size_warnings(config: RunConfig) -> list[str]:
    """Lists sizes that cannot work out on any machine, with the arithmetic."""
    placement = config.placement
    try:
        shape = model_shape(read_hf_config(config.train.model.hf_checkpoint))
    except ValueError:  # that is said elsewhere
        return []
    if placement is None:
        return []
    found = []
    if not config.debug.debug_train_only:
        found += _endless(config, placement)
        found += _cache(config, shape, placement)
    if not config.debug.debug_rollout_only:
        found += _trainer(config, shape, placement)
    return found or _sums(config)


def _endless(config: RunConfig, placement: Placement) -> list[str]:
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    engines = placement.engines * placement.gpus_per_engine
    tokens = samples * rollout.rollout_max_response_len
    seconds = tokens / (TOKENS_PER_S[placement.device] * engines)
    if seconds <= DAY_S:
        return []
    of = "GPU" if placement.device == "cuda" else "engine"
    return [
        f"a rollout has {samples:,} samples of up to --rollout-max-response-len {rollout.rollout_max_response_len:,} "
        f"tokens: at {TOKENS_PER_S[placement.device]:,} tokens a second and {of} this takes {seconds / DAY_S:,.0f} "
        "days, and a run gives a rollout up after one; lower --rollout-batch-size, --n-samples-per-prompt or the length"
    ]


def _cache(config: RunConfig, shape: ModelShape, placement: Placement) -> list[str]:
    longest = context_lengths(config).sample
    if longest is None:
        return []
    size = shape.kv_cache_bytes(weight_width(config)) * longest / placement.gpus_per_engine
    room = device_room(config, placement)
    if size <= room.size:
        return []
    return [
        f"the KV cache of one sequence of {longest:,} tokens takes {size / 1e9:,.0f} GB, and {room.owner} has "
        f"{room.size / 1e9:,.0f}: lower --rollout-max-context-len, or raise --rollout-num-gpus-per-engine"
    ]


def _trainer(config: RunConfig, shape: ModelShape, placement: Placement) -> list[str]:
    room, tokens = device_room(config, placement), config.train.batch.max_tokens_per_gpu or 0
    memory, chosen = activations(config, shape, placement)
    kept = memory.of(tokens, chosen) * (placement.train_ranks if placement.device == "cpu" else 1)
    if kept <= room.size:
        return []
    return [
        f"the activations of a micro-batch of --max-tokens-per-gpu {tokens:,} take {kept / 1e9:,.0f} GB, and "
        f"{room.owner} has {room.size / 1e9:,.0f}: lower it, or set --recompute-granularity full"
    ]


def memory_needs(config: RunConfig) -> list[str]:
    """GPUs and hosts of this machine that are too small for what is certain to be in their memory."""
    return [moment.excess for moment in _moments(config) if _cannot_fit(moment)]


def _sums(config: RunConfig) -> list[str]:
    """The moment at which each memory has the most too much, as far as :func:`memory_needs` does not tell of it."""
    most: dict[str, Moment] = {}
    for moment in _moments(config):
        if moment.over > 0 and not _cannot_fit(moment):
            before = most.setdefault(moment.room.owner, moment)
            most[moment.room.owner] = max(before, moment, key=lambda m: m.over)
    return [moment.excess for moment in most.values()]


def _cannot_fit(moment: Moment) -> bool:
    return moment.room.known and not moment.room.swaps and moment.certain > moment.room.size


def _moments(config: RunConfig) -> list[Moment]:
    try:
        shape = model_shape(read_hf_config(config.train.model.hf_checkpoint))
    except ValueError:  # that is said elsewhere
        return []
    return [] if config.placement is None else moments(config, shape, config.placement)
