"""Analyses of a trace: where the time goes, why a device is idle, which rank the others wait for.

Doors: the public functions of its modules; each is a pure function of a trace or of several.
"""
