"""The model: built of megatron-core layers, loaded from and exported to Hugging Face names.

Doors: :func:`relax_train.models.build.build_model` and :func:`relax_train.models.export.weight_buckets`.
"""
