"""A name that users import; the code is in :mod:`relax_profiling.recorders.sglang`."""

from relax_profiling.recorders.sglang import Deadlines, EngineTraces, ProfiledRollout, RolloutProfiler

__all__ = ["Deadlines", "EngineTraces", "ProfiledRollout", "RolloutProfiler"]
