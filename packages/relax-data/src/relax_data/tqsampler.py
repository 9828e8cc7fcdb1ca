"""A name that users import; the code is in :mod:`relax_data.plane.sampler`."""

from relax_data.plane.sampler import OldestFirst

__all__ = ["OldestFirst"]
