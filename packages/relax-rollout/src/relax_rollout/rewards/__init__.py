"""Rewards: what scores a response.

Door: :func:`build_reward` makes the one that the settings ask for; :mod:`relax_rollout.rewards.registry` has the table.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_rollout.rewards.base import RewardError, RewardFunction
    from relax_rollout.rewards.build import build_reward

__all__ = ["RewardError", "RewardFunction", "build_reward"]


def __getattr__(name: str) -> Any:
    """Import the door when it is used: the settings read the table of this folder, and the door needs the settings."""
    if name == "build_reward":
        from relax_rollout.rewards.build import build_reward

        return build_reward
    if name in __all__:
        from relax_rollout.rewards import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
