"""Sizes that no machine holds, or that no run waits for: allowed, and most likely a slip of the keyboard."""

from relax_train.models.architectures import model_shape
from relax_train.settings.model import read_hf_config

from relax_cli.checks.memory import Moment, moments
from relax_cli.config.run_config import RunConfig

TOKENS_PER_S = {"cuda": 50_000, "cpu": 5_000}
"""More than any model was seen to generate in an engine of one GPU, or on the cores of a laptop."""
DAY_S = 24 * 3600
"""After which the driver gives a rollout up (:data:`relax_cli.cluster.waits.CALL_DEADLINE_S`)."""


def size_warnings(config: RunConfig) -> list[str]:
    """Lists sizes that cannot work out on any machine, with the arithmetic."""
    return [*_endless(config), *_sums(config)]


def _endless(config: RunConfig) -> list[str]:
    rollout, placement = config.rollout, config.placement
    if placement is None or config.debug.debug_train_only:
        return []
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
