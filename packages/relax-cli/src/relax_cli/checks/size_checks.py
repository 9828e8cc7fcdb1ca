"""Sizes that no machine holds, or that no run waits for: allowed, and most likely a slip of the keyboard."""

import os

from relax_train.models.architectures import model_shape
from relax_train.models.costs import Activations, Recompute
from relax_train.models.shape import ModelShape
from relax_train.settings.model import read_hf_config

from relax_cli.checks.lengths import context_lengths
from relax_cli.cluster.placement import Placement
from relax_cli.config.run_config import RunConfig

LARGEST_GPU = 288e9
"""Bytes of memory of the largest GPU that is sold (NVIDIA B300, AMD MI355X)."""
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
    return found


def bf16(config: RunConfig) -> bool:
    """Whether weights are bfloat16; by default they are on GPUs, known or planned."""
    chosen = config.train.model.bf16
    return config.placement is None or config.placement.device == "cuda" if chosen is None else chosen


def trainer_bytes(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer on the fullest rank: on its device, and on the host."""
    return shape.training_bytes(
        placement,
        bf16=bf16(config),
        offload=config.train.parallel.optimizer_cpu_offload,
        vision_trained=not config.train.model.freeze_vision_model,
    )


def activations(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[Activations, Recompute]:
    """Memory of a micro-batch on one rank, and what of it is computed again (``--recompute-granularity``)."""
    parallel, width = config.train.parallel, 2 if bf16(config) else 4
    memory = Activations(shape=shape, sizes=placement, sequence_parallel=parallel.sequence_parallel, width=width)
    method, layers = parallel.recompute_method, parallel.recompute_num_layers or 0
    return memory, Recompute(method=method, layers=layers, modules=parallel.recomputed_modules)


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
    size = shape.kv_cache_bytes(2 if bf16(config) else 4) * longest / placement.gpus_per_engine
    room, whose = _room(placement)
    if size <= room:
        return []
    return [
        f"the KV cache of one sequence of {longest:,} tokens takes {size / 1e9:,.0f} GB, and {whose} has "
        f"{room / 1e9:,.0f}: lower --rollout-max-context-len, or raise --rollout-num-gpus-per-engine"
    ]


def _trainer(config: RunConfig, shape: ModelShape, placement: Placement) -> list[str]:
    device, _ = trainer_bytes(config, shape, placement)
    tokens = config.train.batch.max_tokens_per_gpu or 0
    memory, chosen = activations(config, shape, placement)
    kept = memory.of(tokens, chosen)
    room, whose = _room(placement)
    if placement.device == "cpu":
        device, kept = device * placement.train_ranks, kept * placement.train_ranks
    found = []
    if device > room:
        fix = "raise the parallel sizes, or add --optimizer-cpu-offload" if placement.device == "cuda" else "use GPUs"
        found.append(
            f"weights, gradients and optimizer take {device / 1e9:,.0f} GB, and {whose} has {room / 1e9:,.0f}: {fix}"
        )
    if kept > room:
        found.append(
            f"the activations of a micro-batch of --max-tokens-per-gpu {tokens:,} take {kept / 1e9:,.0f} GB, and "
            f"{whose} has {room / 1e9:,.0f}: lower it, or set --recompute-granularity full"
        )
    return found


def _room(placement: Placement) -> tuple[float, str]:
    """Bytes that there can be, and what has them."""
    if placement.device == "cuda":
        return LARGEST_GPU, "the largest GPU that is sold"
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "this machine"
