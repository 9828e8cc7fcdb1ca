"""Options of the optimizer: Adam and its learning-rate schedule."""

import dataclasses
from typing import ClassVar, Literal

from relax_data.options import LARGEST_COEFFICIENT, LARGEST_COUNT, LARGEST_FLOAT, Settings, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Settings):
    """Flags of the optimizer."""

    TITLE: ClassVar[str] = "Optimizer"

    lr: float = option(1e-6, "Learning rate, the highest of the schedule.", ge=0, le=1)
    min_lr: float = option(0.0, "Learning rate that linear and cosine decay end at.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "How the learning rate falls after the warm-up."
    )
    lr_warmup_iters: int = option(
        0,
        "Optimizer steps over which the learning rate rises linearly to --lr: step i of N, counted from 1, has i/N of "
        "it, so that every step trains. Megatron counts from 0.",
        ge=0,
        le=LARGEST_COUNT,
    )
    lr_decay_iters: int | None = option(
        None,
        "Optimizer step at which the decay ends, warm-up included; default: the last one of the run.",
        le=LARGEST_COUNT,
    )
    weight_decay: float = option(
        0.01, "Decoupled weight decay of Adam (AdamW), per unit of learning rate.", ge=0, le=LARGEST_COEFFICIENT
    )
    adam_beta1: float = option(0.9, "Decay of Adam's mean of the gradient.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Decay of Adam's mean of the squared gradient.", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Adam's epsilon.", gt=0, le=LARGEST_COEFFICIENT)
    clip_grad: float = option(
        1.0, "Largest L2 norm of the gradient of an optimizer step; 0 does not clip.", ge=0, le=LARGEST_FLOAT
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        for name in ("min_lr", "lr_decay_iters"):
            if name in given and self.lr_decay_style == "constant":
                found.append(
                    f"--{name.replace('_', '-')} has no effect with --lr-decay-style constant: "
                    "choose linear or cosine, or drop it"
                )
        if self.min_lr > max(self.lr, 0):
            found.append(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        if self.lr_decay_iters is not None and self.lr_decay_iters <= self.lr_warmup_iters:
            found.append(
                f"--lr-decay-iters {self.lr_decay_iters} must be greater than --lr-warmup-iters {self.lr_warmup_iters}"
            )
        return found
