"""Rollouts for RL post-training: engines, the rollout loop, rewards, filters, new weights for the engines.

Doors: :class:`relax_rollout.loop.rollout_loop.RolloutLoop` and its options in :mod:`relax_rollout.settings`.
"""
