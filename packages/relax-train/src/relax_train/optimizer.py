"""Adam with megatron-core's distributed optimizer (its state is cut over the data-parallel ranks) and its schedule."""

import dataclasses
import math
from typing import Any

import torch

from relax_train.device import DeviceContext
from relax_train.mcore import (
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    finalize_model_grads,
    get_megatron_optimizer,
)
from relax_train.model import Model
from relax_train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: gradient norm before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float


class Optimizer:
    """The optimizer of a model with its learning-rate schedule.

    Attributes:
        megatron: megatron-core's optimizer (a chained one for mixtures of experts).
        scheduler: sets the learning rate before each step.
    """

    def __init__(self, model: Model, megatron: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> None:
        self.model, self.megatron, self.scheduler = model, megatron, scheduler

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return max(float(group["lr"]) for group in self.megatron.param_groups)

    def zero_grad(self) -> None:
        """Clears all gradients; before the first micro-batch of a step."""
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> StepResult:
        """Clips, updates the weights on every rank and moves the schedule on by one.

        Raises:
            FloatingPointError: the gradient is not finite. The weights are spoilt then; the last checkpoint is not.
        """
        lr = self.lr
        with DeviceContext():
            _, norm, _ = self.megatron.step()
            norm = float(norm)
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"the gradient norm is {norm}: the loss or a log-probability is not finite. Resume from the last "
                    "checkpoint with a smaller --lr or --clip-grad, and check the rewards of this step"
                )
            self.scheduler.step(increment=1)
        return StepResult(grad_norm=norm, lr=lr)

    def reload_weights(self) -> None:
        """Takes the model's weights as the new master weights; after anything else than a step has changed them."""
        with DeviceContext(), torch.no_grad():
            self.megatron.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """State of the schedule; the rest is in the sharded checkpoint."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state


def build_optimizer(settings: TrainSettings, model: Model, *, total_steps: int | None = None) -> Optimizer:
    """Makes the optimizer of ``model`` and sets the schedule's hooks on ``model.config``.

    Weights should be loaded before; after a later change call :meth:`Optimizer.reload_weights`.

    Args:
        total_steps: optimizer steps of the run, the end of the decay unless ``--lr-decay-iters`` is given.

    Raises:
        ValueError: the learning rate decays but nothing says when it ends.
    """
    assert model.trainable, "an optimizer needs a model with gradient buffers"
    flags = settings.optimizer
    offload = settings.parallel.optimizer_cpu_offload
    with DeviceContext():
        config = OptimizerConfig(
            optimizer="adam",
            lr=flags.lr,
            min_lr=flags.min_lr,
            weight_decay=flags.weight_decay,
            adam_beta1=flags.adam_beta1,
            adam_beta2=flags.adam_beta2,
            adam_eps=flags.adam_eps,
            clip_grad=flags.clip_grad,
            bf16=model.dtype == torch.bfloat16,
            params_dtype=model.dtype,
            use_distributed_optimizer=True,
            optimizer_cpu_offload=offload,
            optimizer_offload_fraction=1.0 if offload else 0.0,
            use_torch_optimizer_for_cpu_offload=offload,
        )
        megatron = get_megatron_optimizer(config, model.chunks)
        scheduler = OptimizerParamScheduler(
            megatron,
            init_lr=0.0,
            max_lr=flags.lr,
            min_lr=flags.min_lr,
            lr_warmup_steps=flags.lr_warmup_iters,
            lr_decay_steps=_decay_steps(settings, total_steps),
            lr_decay_style=flags.lr_decay_style,
            start_wd=flags.weight_decay,
            end_wd=flags.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = megatron.scale_loss
    model.config.no_sync_func = model.chunks[0].no_sync
    return Optimizer(model, megatron, scheduler)


def _decay_steps(settings: TrainSettings, total_steps: int | None) -> int:
    flags = settings.optimizer
    steps = flags.lr_decay_iters or total_steps
    if steps is None and flags.lr_decay_style != "constant":
        raise ValueError(f"--lr-decay-style {flags.lr_decay_style} needs an end; add --lr-decay-iters or --num-rollout")
    # Megatron wants the decay to end after the warm-up, also where the rate stays constant.
    return max(steps or 1, flags.lr_warmup_iters + 1)
