"""Options of the SGLang engines. Imports neither torch nor SGLang."""

import dataclasses
from typing import Any, ClassVar

from relax_data.options import option

from relax_rollout.engines.sglang import arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """How the inference engines run."""

    TITLE: ClassVar[str] = "Rollout engine (SGLang)"

    rollout_num_gpus_per_engine: int = option(1, "GPUs of one engine: its tensor-parallel size.")
    sglang_server_concurrency: int = option(512, "Requests that are in flight at one engine at a time.")
    sglang_mem_fraction_static: float = option(
        0.8, "Share of a GPU's memory for the engine's weights and KV cache, between 0 and 1."
    )
    sglang_extra: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "Every other argument of SGLang's server by its own name; as a flag --sglang-<name> VALUE.",
            "metavar": None,
        },
    )

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """Validation messages; each names the flag and the fix."""
        found = []
        if self.rollout_num_gpus_per_engine < 1:
            found.append(f"--rollout-num-gpus-per-engine is {self.rollout_num_gpus_per_engine}; it must be at least 1")
        if self.sglang_server_concurrency < 1:
            found.append(f"--sglang-server-concurrency is {self.sglang_server_concurrency}; it must be at least 1")
        if not 0 < self.sglang_mem_fraction_static < 1:
            found.append(
                f"--sglang-mem-fraction-static is {self.sglang_mem_fraction_static}; it must lie between 0 and 1, "
                "for example 0.8, or 0.6 when training shares the GPU"
            )
        return found + arguments.problems(self.sglang_extra)
