"""Reinforcement learning itself: advantages, losses, log-probabilities, the reference model.

Doors: :func:`relax_train.algorithms.advantages.compute_advantages` and
:func:`relax_train.algorithms.losses.policy_loss`.
"""
