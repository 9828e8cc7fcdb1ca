"""The timeline of a run: what trainer and engines did in each step, read from ``timeline.jsonl`` of its folder.

Doors: :func:`relax_profiling.timeline.read.read_timeline`, :class:`relax_profiling.timeline.shares.Timeline`.
"""
