"""Data of a run: the types between packages, prompts, packing, data planes. Importing it needs neither torch nor ray.

Doors: :mod:`relax_data.types`, :func:`relax_data.prompts.open.open_prompts`, :func:`relax_data.packing.pack.pack` and
:class:`relax_data.plane.base.DataPlane`.
"""
