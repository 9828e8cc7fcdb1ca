"""Inference engines: the protocol, the router over several of them, and SGLang.

Doors: :class:`relax_rollout.engines.base.Engine` and :class:`relax_rollout.engines.sglang.client.SGLangEngine`.
"""
