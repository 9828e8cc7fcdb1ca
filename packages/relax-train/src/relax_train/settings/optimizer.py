"""How the weights move: Adam and its learning-rate schedule."""

import dataclasses
from typing import ClassVar, Literal

from relax_data.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Flags of the optimizer."""

    TITLE: ClassVar[str] = "Optimizer"

    lr: float = option(1e-6, "Learning rate, the highest of the schedule.")
    min_lr: float = option(0.0, "Learning rate that linear and cosine decay end at.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "How the learning rate falls after the warm-up."
    )
    lr_warmup_iters: int = option(
        0,
        "Optimizer steps over which the learning rate rises linearly from 0 to --lr, as in Megatron: step i of N (from "
        "0) has i/N of it, so the first step moves no weight.",
    )
    lr_decay_iters: int | None = option(
        None, "Optimizer step at which the decay ends, warm-up included; default: the last one of the run."
    )
    weight_decay: float = option(0.01, "Decoupled weight decay of Adam (AdamW), per unit of learning rate.")
    adam_beta1: float = option(0.9, "Decay of Adam's mean of the gradient.")
    adam_beta2: float = option(0.999, "Decay of Adam's mean of the squared gradient.")
    adam_eps: float = option(1e-8, "Adam's epsilon.")
    clip_grad: float = option(1.0, "Largest L2 norm of the gradient of an optimizer step; 0 does not clip.")

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """Everything wrong with these values; ``given`` holds the fields that the user set."""
        found = []
        if self.lr < 0:
            found.append(f"--lr {self.lr} must not be negative")
        for name in ("min_lr", "lr_decay_iters"):
            if name in given and self.lr_decay_style == "constant":
                found.append(
                    f"--{name.replace('_', '-')} has no effect with --lr-decay-style constant: "
                    "choose linear or cosine, or drop it"
                )
        if not 0 <= self.min_lr <= max(self.lr, 0):
            found.append(f"--min-lr {self.min_lr} must lie between 0 and --lr {self.lr}")
        if self.lr_warmup_iters < 0:
            found.append(f"--lr-warmup-iters {self.lr_warmup_iters} must not be negative")
        if self.lr_decay_iters is not None and self.lr_decay_iters <= self.lr_warmup_iters:
            found.append(
                f"--lr-decay-iters {self.lr_decay_iters} must be greater than --lr-warmup-iters {self.lr_warmup_iters}"
            )
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)} must lie in [0, 1)")
        if self.adam_eps <= 0:
            found.append(f"--adam-eps {self.adam_eps} must be positive, for example 1e-8")
        for name in ("weight_decay", "clip_grad"):
            if getattr(self, name) < 0:
                found.append(f"--{name.replace('_', '-')} {getattr(self, name)} must not be negative")
        return found
