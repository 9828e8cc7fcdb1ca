"""Recorders of an SGLang server over HTTP, a torch training loop and memory, and the names of the files.

Doors: :class:`relax_profiling.recorders.sglang.RolloutProfiler` and
:func:`relax_profiling.recorders.training.build_observer`.
"""
