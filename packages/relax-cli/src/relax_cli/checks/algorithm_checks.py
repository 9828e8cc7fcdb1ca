"""The algorithm against the rollout: groups to compare, ratios to clip."""

from relax_cli.config.run_config import RunConfig


def algorithm_problems(config: RunConfig) -> list[str]:
    """An estimator that compares the responses to one prompt, asked for where there is only one."""
    algorithm, rollout, debug = config.train.algorithm, config.rollout, config.debug
    if rollout.n_samples_per_prompt != 1 or not (algorithm.compares_group and "advantage_estimator" in config.given):
        return []
    if debug.debug_rollout_only or debug.debug_train_only or rollout.rollout_function_path is not None:
        return []  # nothing is trained, or the groups come from elsewhere
    return [
        f"--advantage-estimator {algorithm.advantage_estimator} compares the responses to one prompt, and with "
        "--n-samples-per-prompt 1 there is none to compare with, so that every advantage is 0: raise it, for example "
        "to 8, or use --advantage-estimator reinforce_plus_plus, which needs no groups"
    ]


def algorithm_warnings(config: RunConfig, *, steps: int) -> list[str]:
    """Warns where the algorithm learns nothing from the rollouts it gets, or is not what its name says.

    Args:
        steps: optimizer steps a rollout.
    """
    if config.debug.debug_rollout_only:
        return []
    algorithm, found = config.train.algorithm, _ratio_warnings(config, steps)
    if config.rollout.n_samples_per_prompt == 1 and algorithm.compares_group:
        rest = ": only --entropy-coef moves the weights" if algorithm.entropy_coef else ", and nothing is learned"
        found.append(
            f"--n-samples-per-prompt 1: {algorithm.advantage_estimator.upper()} compares the responses to one prompt, "
            f"so the advantage of a single one is always 0{rest}; use 2 or more, for example 8"
        )
    return found


def _ratio_warnings(config: RunConfig, steps: int) -> list[str]:
    """Warns where the probability ratio, which some algorithms are about, is 1 or is never clipped.

    Args:
        steps: optimizer steps a rollout.
    """
    algorithm, found = config.train.algorithm, []
    chosen, same_as = f"--loss-type {algorithm.loss_type}", "--loss-type clip"
    if algorithm.sequence_ratio:
        chosen, same_as = f"--advantage-estimator {algorithm.advantage_estimator}", "--advantage-estimator grpo"
        if "eps_clip" not in config.given:
            found.append(
                f"{chosen}: the ratio of a whole response hardly ever leaves the range of the default --eps-clip "
                f"{algorithm.eps_clip}, so nothing is clipped; its paper has --eps-clip 3e-4 --eps-clip-high 4e-4"
            )
    if steps == 1 and (algorithm.sequence_ratio or algorithm.loss_type == "cispo"):
        found.append(
            f"{chosen}: with one optimizer step a rollout every probability ratio is 1, so it trains as {same_as} "
            "does; for more steps lower --global-batch-size"
        )
    return found
