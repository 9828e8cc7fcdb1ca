"""Rewards: what scores a response. :func:`build_reward` makes the one that the settings ask for."""

from relax_rollout.rewards.base import RewardError, RewardFunction
from relax_rollout.rewards.build import build_reward

__all__ = ["RewardError", "RewardFunction", "build_reward"]
