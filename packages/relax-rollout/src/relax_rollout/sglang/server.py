"""A name that users import; the code is in :mod:`relax_rollout.engines.sglang.server`."""

from relax_rollout.engines.sglang.server import SGLangServer

__all__ = ["SGLangServer"]
