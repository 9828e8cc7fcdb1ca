"""A name that users import; the code is in :mod:`relax_data.plane.transferqueue`."""

from relax_data.plane.transferqueue import TransferQueuePlane

__all__ = ["TransferQueuePlane"]
