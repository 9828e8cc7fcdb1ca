"""Reads memory recordings: torch's snapshots without running any of their code, memray's through memray."""
