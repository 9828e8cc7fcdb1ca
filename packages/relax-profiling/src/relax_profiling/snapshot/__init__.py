"""Reads memory recordings: torch's snapshots without running any of their code, memray's through memray.

Doors: :func:`relax_profiling.snapshot.analyse.analyse_snapshot` and
:func:`relax_profiling.snapshot.memray_file.read_memray`.
"""
