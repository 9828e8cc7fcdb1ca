"""Reads traces in the Chrome format of torch.profiler, also damaged ones, without holding a whole trace in memory.

Doors: :func:`relax_profiling.trace.load.load_trace` and :func:`relax_profiling.trace.merge.merge_traces`.
"""
