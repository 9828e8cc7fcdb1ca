"""A name that users import; the code is in :mod:`relax_rollout.engines.base`."""

from relax_rollout.engines.base import Engine, EngineDied, GenerateRequest, GenerateResult, SamplingParams

__all__ = ["Engine", "EngineDied", "GenerateRequest", "GenerateResult", "SamplingParams"]
