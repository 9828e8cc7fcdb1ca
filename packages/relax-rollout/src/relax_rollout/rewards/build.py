"""From the settings to the reward.

A new reward type is a builder here and one line in :data:`REWARDS`: ``--rm-type`` then takes its name, and the first
line of the builder's docstring is its help. What a builder needs is imported when it is called, so that the settings
can read the table without any of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_rollout.rewards.base import Reward
    from relax_rollout.settings import RewardSettings

RewardBuilder = Callable[["RewardSettings"], "Reward"]


def exact_match(settings: "RewardSettings") -> "Reward":
    """1 when the response is the label, blanks at both ends aside."""
    from relax_rollout.rewards.exact_match import ExactMatch

    return ExactMatch()


def math(settings: "RewardSettings") -> "Reward":
    """1 when math-verify finds the answer equal to the label; in worker processes, with a time limit."""
    from relax_rollout.rewards.math import MathReward

    return MathReward(max_workers=settings.reward_max_concurrency)


REWARDS: dict[str, RewardBuilder] = {"exact-match": exact_match, "math": math}
"""By the name for ``--rm-type``: what builds the reward."""


def rewards_help() -> str:
    """Name and first line of the docstring of every reward type, for ``--help``."""
    lines = ((name, (builder.__doc__ or "").strip().partition("\n")[0]) for name, builder in REWARDS.items())
    return " ".join(f"{name}: {line}" for name, line in lines)


def build_reward(settings: "RewardSettings") -> "Reward":
    """The reward that ``settings`` ask for.

    Raises:
        ValueError: none was chosen, the settings contradict each other, or the custom function cannot be imported.
    """
    problems = settings.problems()
    if problems:
        raise ValueError("\n".join(problems))
    if settings.custom_rm_path is not None:
        from relax_rollout.rewards.custom import CustomReward

        return CustomReward(
            settings.custom_rm_path,
            max_concurrency=settings.reward_max_concurrency,
            reward_key=settings.reward_key,
            per_group=settings.group_rm,
        )
    if settings.rm_url is not None:
        from relax_rollout.rewards.remote import RemoteReward

        return RemoteReward(
            settings.rm_url,
            max_concurrency=settings.reward_max_concurrency,
            reward_key=settings.reward_key,
            per_group=settings.group_rm,
        )
    if settings.rm_type is not None:
        return REWARDS[settings.rm_type](settings)
    raise ValueError(
        f"no reward was chosen: give --rm-type {' or '.join(REWARDS)}, --custom-rm-path module:function, or --rm-url "
        "URL"
    )
