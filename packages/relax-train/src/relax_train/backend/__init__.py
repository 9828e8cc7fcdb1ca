"""megatron-core and the device below it: ranks and groups, the optimizer, sleep and wake.

Door: :mod:`relax_train.backend.mcore`, the one module that imports megatron.
"""
