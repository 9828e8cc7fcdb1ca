"""A name that users import; the code is in :mod:`relax_profiling.recorders.training`."""

from relax_profiling.recorders.training import TrainingObserver, build_observer

__all__ = ["TrainingObserver", "build_observer"]
