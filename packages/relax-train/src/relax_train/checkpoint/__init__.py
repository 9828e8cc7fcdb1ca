"""Checkpoints: written whole or not at all, found, checked and loaded.

Doors: :func:`relax_train.checkpoint.save_load.save_checkpoint` and
:func:`~relax_train.checkpoint.save_load.load_checkpoint`.
"""
