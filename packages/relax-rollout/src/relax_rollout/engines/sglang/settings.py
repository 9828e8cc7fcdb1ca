"""Options of the SGLang engines. Imports neither torch nor SGLang."""

import dataclasses
from typing import Any, ClassVar

from relax_data.options import LARGEST_COUNT, Settings, option

from relax_rollout.engines.sglang import arguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangSettings(Settings):
    """Options of the inference engines."""

    TITLE: ClassVar[str] = "Rollout engine (SGLang)"

    rollout_num_gpus_per_engine: int = option(
        1, "GPUs of one engine: its tensor-parallel size.", ge=1, le=LARGEST_COUNT
    )
    sglang_server_concurrency: int = option(
        512, "Requests that are in flight at one engine at a time.", ge=1, le=LARGEST_COUNT
    )
    sglang_mem_fraction_static: float = option(
        0.8,
        "Share of a GPU's memory for the engine's weights and KV cache; for example 0.6 when training shares the GPU.",
        gt=0,
        lt=1,
    )
    sglang_extra: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={
            "help": "Every other argument of SGLang's server by its own name; as a flag --sglang-<name> VALUE.",
            "metavar": None,
        },
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        return arguments.problems(self.sglang_extra)
