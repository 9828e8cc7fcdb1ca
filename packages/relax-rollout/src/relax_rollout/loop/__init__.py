"""The rollout loop: groups of samples from prompts, scored and filtered, with no prompt lost.

Door: :class:`RolloutLoop`.
"""

from relax_rollout.loop.rollout_loop import RolloutLoop, RolloutResult

__all__ = ["RolloutLoop", "RolloutResult"]
