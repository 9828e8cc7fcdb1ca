"""Megatron-core training for RL post-training."""
