"""Analyses of a trace: where the time goes, why a device is idle, which rank the others wait for."""
