"""A name that users import; the code is in :mod:`relax_data.serialization`."""

from relax_data.serialization import from_plain, to_plain

__all__ = ["from_plain", "to_plain"]
