"""The SGLang engine: server process, HTTP client, weight update. Nothing heavy is imported here.

Doors: :class:`relax_rollout.engines.sglang.server.SGLangServer` and
:class:`relax_rollout.engines.sglang.client.SGLangEngine`.
"""
