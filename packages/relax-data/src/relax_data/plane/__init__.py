"""Rows between the processes that make and consume them: one protocol, two planes.

Door: :class:`DataPlane`, :class:`LocalPlane`; between processes
:class:`relax_data.plane.transferqueue.TransferQueuePlane`.
"""

from relax_data.plane.base import Columns, DataPlane, PlaneClosed, PlaneError, PlaneFailed, Rows
from relax_data.plane.local import LocalPlane

__all__ = ["Columns", "DataPlane", "LocalPlane", "PlaneClosed", "PlaneError", "PlaneFailed", "Rows"]
