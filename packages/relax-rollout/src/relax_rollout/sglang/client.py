"""A name that users import; the code is in :mod:`relax_rollout.engines.sglang.client`."""

from relax_rollout.engines.sglang.client import SGLangEngine

__all__ = ["SGLangEngine"]
