"""All settings of one run, and what is wrong with them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_data.settings import DataSettings
from relax_profiling.settings import MemoryProfileSettings, SGLangProfileSettings, TrainProfileSettings
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.settings import EvalSettings, RewardSettings, RolloutSettings
from relax_train.settings import TrainSettings

from relax_cli.cluster.placement import Placement
from relax_cli.config.settings import ClusterSettings, DebugSettings, LoggingSettings, RunSettings


class ConfigError(ValueError):
    """Everything that is wrong with one start.

    Attributes:
        problems: one message each, with the option, where it was given, and the fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, resolved and checked. Picklable; needs no torch.

    Attributes:
        name: ``--tb-experiment-name``, or the one that was made for this run.
        run_dir: absolute ``runs/NAME``: logs, metrics, summary.
        trace_dir: absolute ``traces/NAME``: what the profilers write.
        placement: processes of the run; None when the run takes all GPUs of a Ray cluster it has not joined yet.
        given: names of the options that the user set, in snake_case. An SGLang server argument that was passed through
            stands there under its own name, and so does ``sglang_extra``.
        warnings: what is allowed but probably not meant.
        notes: what a real start would still need; only a plan (``--dry-run``, ``--print-config``) may have some.
    """

    data: DataSettings
    rollout: RolloutSettings
    reward: RewardSettings
    eval: EvalSettings
    sglang: SGLangSettings
    train: TrainSettings
    sglang_profile: SGLangProfileSettings
    train_profile: TrainProfileSettings
    memory_profile: MemoryProfileSettings
    cluster: ClusterSettings
    run: RunSettings
    logging: LoggingSettings
    debug: DebugSettings
    name: str
    run_dir: Path
    trace_dir: Path
    placement: Placement | None
    given: frozenset[str]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The driver's current directory, which relative paths are relative to."""
        return self.run_dir.parent.parent

    def parts(self) -> list[Any]:
        """All settings objects, the trainer's one by one."""
        found: list[Any] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TrainSettings):
                found += [getattr(value, f.name) for f in dataclasses.fields(value)]
            elif hasattr(type(value), "TITLE"):
                found.append(value)
        return found

    def rank_tag(self, rank: int) -> dict[str, int]:
        """``{"rank", "dp", "tp", "pp"}`` of a trainer rank, for the names of its files."""
        assert self.placement is not None, "the number of GPUs must be known before ranks have places"
        return self.placement.rank_tag(rank)
