"""Names that users import; the code is in :mod:`relax_rollout.engines.sglang`."""
