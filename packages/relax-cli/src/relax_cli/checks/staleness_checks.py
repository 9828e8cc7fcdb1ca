"""Checks of how old samples may become: over-sampling, partial rollout, and the staleness that bounds both."""

from relax_data.options import flag

from relax_cli.config.run_config import RunConfig


def staleness_problems(config: RunConfig) -> list[str]:
    """Lists what these options would leave without effect, or what the bound of the staleness cannot hold."""
    return [*_no_staleness(config), *(_depth(config) or _never_interrupted(config)), *_kept_cache(config)]


def staleness_warnings(config: RunConfig) -> list[str]:
    """Lists what is allowed and probably not meant."""
    if not config.cluster.fully_async:
        return []
    found = []
    if not config.rollout.partial_rollout:
        found.append(
            "--no-partial-rollout with --fully-async: each push of weights waits until every response that runs has "
            "ended, and no other starts meanwhile, which takes most of what the mode gains; remove --no-partial-rollout"
        )
    if config.cluster.max_staleness > 0 and not config.train.algorithm.use_tis:
        found.append(
            f"--fully-async with --max-staleness {config.cluster.max_staleness} trains on tokens of older weights as "
            "if the current ones had sampled them; --use-tis weights them by how likely the current ones are to do so"
        )
    steps = config.train.batch.num_steps_per_rollout or 1
    if steps > 1:
        found.append(
            f"--fully-async with {steps} optimizer steps a rollout: --max-staleness counts pushes of weights, of which "
            f"there is one a rollout, so a token may be up to {steps} times as many optimizer steps old; for one step "
            "leave --global-batch-size and --num-steps-per-rollout out"
        )
    return found


def most_open(config: RunConfig) -> int:
    """Most groups that can be open at once so that none becomes too old (:mod:`relax_rollout.staleness`)."""
    return config.rollout.rollout_batch_size * (config.cluster.max_staleness + 1)


def _no_staleness(config: RunConfig) -> list[str]:
    cluster, rollout = config.cluster, config.rollout
    surplus = rollout.submitted_prompts > rollout.rollout_batch_size or rollout.rollout_function_path is not None
    if cluster.fully_async or rollout.partial_rollout or surplus or "max_staleness" not in config.given:
        return []
    return [
        "--max-staleness has no effect without --fully-async or over-sampling: every sample is then on-policy; "
        "remove it, or add --fully-async, or an --over-sampling-batch-size above --rollout-batch-size"
    ]


def _never_interrupted(config: RunConfig) -> list[str]:
    """Options of interrupted samples where every sample ends before the next weights come."""
    cluster, rollout = config.cluster, config.rollout
    if not rollout.partial_rollout or cluster.max_staleness != 0 or config.debug.debug_train_only:
        return []
    names = ("mask_offpolicy_in_partial_rollout", "partial_rollout_max_aborted_count")
    chosen = {"mask_offpolicy_in_partial_rollout": rollout.mask_offpolicy_in_partial_rollout}
    chosen["partial_rollout_max_aborted_count"] = rollout.partial_rollout_max_aborted_count is not None
    return [
        f"{flag(name)} has no effect with --max-staleness 0: no sample has tokens of older weights, none is "
        "interrupted by new ones; remove it, or raise --max-staleness to 1 or more"
        for name in names
        if chosen[name]
    ]


def _kept_cache(config: RunConfig) -> list[str]:
    """Why keys and values cannot outlive a push of weights, if they are to."""
    if config.rollout.recompute_kv_cache_after_weight_updates or config.debug.debug_train_only:
        return []
    asked = "--no-recompute-kv-cache-after-weight-updates has no effect"
    if not config.cluster.fully_async:
        return [f"{asked} with --colocate, where the engines give the memory of keys and values away: remove it"]
    if not config.rollout.partial_rollout or config.cluster.max_staleness == 0:
        return [f"{asked} without --partial-rollout and a --max-staleness of 1 or more: no response is interrupted"]
    if config.sglang.sglang_extra.get("disable_radix_cache"):
        return [f"{asked} with --sglang-disable-radix-cache, which forgets each response that ends: remove one of both"]
    return []


def _depth(config: RunConfig) -> list[str]:
    """What may be open at once, where tokens of several versions meet in a sample; the numbers are in the message."""
    cluster, rollout = config.cluster, config.rollout
    batch, depth, staleness = rollout.rollout_batch_size, rollout.submitted_prompts, cluster.max_staleness
    keeps = cluster.fully_async or rollout.partial_rollout
    if not keeps or config.debug.debug_train_only or rollout.rollout_function_path is not None:
        return []
    if batch < 1 or staleness < 0:
        return []  # said already
    product = f"--rollout-batch-size {batch} x (--max-staleness {staleness} + 1) = {most_open(config)}"
    if depth > most_open(config):
        # Lowered to one batch, partial rollout would have no effect.
        lower = f"lower it to {most_open(config)}, or " if staleness > 0 or cluster.fully_async else ""
        return [
            f"--over-sampling-batch-size {depth} is more than {product} groups, the most that can be open at once so "
            f"that no token becomes older than --max-staleness allows: {lower}raise --max-staleness to "
            f"{-(-depth // batch) - 1}"
        ]
    if cluster.fully_async or depth > batch:
        return []
    if staleness == 0:
        return [
            f"--partial-rollout has no effect with --max-staleness 0: at most {product} groups can be open at once, so "
            "every rollout waits for all its prompts and interrupts none; raise --max-staleness to 1 or more and add "
            "--over-sampling-batch-size, or remove --partial-rollout"
        ]
    return [
        "--partial-rollout has no effect without over-sampling: every rollout waits for all its prompts and interrupts "
        f"none; add --over-sampling-batch-size, at most {product}, or remove --partial-rollout"
    ]
