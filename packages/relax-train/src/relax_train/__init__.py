"""Megatron-core training for RL post-training: the model, algorithms, optimizer steps, checkpoints, export of weights.

Doors: :class:`relax_train.trainer.Trainer` and :class:`relax_train.settings.TrainSettings`.
"""
