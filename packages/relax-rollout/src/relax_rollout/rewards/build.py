"""From the settings to the reward."""

from relax_rollout.rewards.base import Reward
from relax_rollout.rewards.registry import REWARDS
from relax_rollout.settings import RewardSettings


def build_reward(settings: RewardSettings) -> Reward:
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
