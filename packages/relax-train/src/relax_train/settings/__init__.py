"""Settings of the trainer: one field is one flag of ``relax train``. Importing them needs no torch.

Door: :class:`TrainSettings`, which has one field a file of this folder.
"""

import dataclasses

from relax_train.settings.algorithm import AlgorithmSettings
from relax_train.settings.batch import BatchSettings
from relax_train.settings.checkpoint import CheckpointSettings
from relax_train.settings.model import ModelSettings
from relax_train.settings.optimizer import OptimizerSettings
from relax_train.settings.parallel import ParallelSettings

SETTINGS: tuple[type, ...] = (
    ModelSettings,
    CheckpointSettings,
    ParallelSettings,
    BatchSettings,
    AlgorithmSettings,
    OptimizerSettings,
)
"""All settings classes of this package, in the order of ``--help``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything the trainer is told, composed of one object a topic."""

    model: ModelSettings
    parallel: ParallelSettings = dataclasses.field(default_factory=ParallelSettings)
    checkpoint: CheckpointSettings = dataclasses.field(default_factory=CheckpointSettings)
    algorithm: AlgorithmSettings = dataclasses.field(default_factory=AlgorithmSettings)
    optimizer: OptimizerSettings = dataclasses.field(default_factory=OptimizerSettings)
    batch: BatchSettings = dataclasses.field(default_factory=BatchSettings)


__all__ = [
    "SETTINGS",
    "AlgorithmSettings",
    "BatchSettings",
    "CheckpointSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "TrainSettings",
]
