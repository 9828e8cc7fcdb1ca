"""Rollouts for RL post-training: engines, the rollout loop, rewards, filters."""
