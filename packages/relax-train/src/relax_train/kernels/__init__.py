"""Fused kernels in Triton, for CUDA: each stands beside the plain torch that it must agree with.

Nothing here is imported on a CPU. A caller asks :func:`relax_train.backend.device.fuses` whether a tensor is one that
the kernels take; for all others (float64, the CPU) it computes in torch.

Door: :mod:`relax_train.models.fused`, which gives the kernels their gradients.
"""
