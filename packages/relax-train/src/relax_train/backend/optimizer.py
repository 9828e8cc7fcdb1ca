"""Adam with megatron-core's distributed optimizer (its state is cut over the data-parallel ranks) and its schedule."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import (
    MegatronOptimizer,
    OptimizerConfig,
    OptimizerParamScheduler,
    finalize_model_grads,
    get_megatron_optimizer,
)
from relax_train.models.build import Model
from relax_train.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step: gradient norm before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float


@dataclasses.dataclass(frozen=True)
class StateShard:
    """What this rank holds of the optimizer state of one parameter.

    Attributes:
        param: the parameter, as the model of this rank has it.
        start: where the shard begins in the flattened parameter; its elements follow each other there.
        tensors: ``exp_avg`` and ``exp_avg_sq``, Adam's moments, float32 ``[elements of the shard]``; and ``master``,
            the float32 weights, where the model's own are not. They are the state itself, not copies.
    """

    param: torch.Tensor
    start: int
    tensors: dict[str, torch.Tensor]


class Optimizer:
    """The optimizer of a model with its learning-rate schedule.

    Attributes:
        megatron: megatron-core's optimizer (a chained one for mixtures of experts).
        scheduler: sets the learning rate before each step.
    """

    scheduler: "Schedule"

    def __init__(self, model: Model, megatron: MegatronOptimizer) -> None:
        self.model, self.megatron = model, megatron

    @property
    def parts(self) -> list[Any]:
        """The distributed optimizers of megatron-core: one, and with experts another one for these."""
        chained = getattr(self.megatron, "chained_optimizers", None)
        parts = [self.megatron] if chained is None else list(chained)
        return [part for part in parts if part.optimizer is not None]

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

    def shards(self) -> Iterator[StateShard]:
        """The optimizer state of this rank; data-parallel ranks have other parts of the same parameters."""
        for part in self.parts:
            groups = part.optimizer.param_groups
            for param, (group, place) in part.model_param_group_index_map.items():
                main = groups[group]["params"][place]
                state = part.optimizer.state[main]
                held = part.model_param_gbuf_map[param]
                span = part.gbuf_ranges[held[0]][held[1]][held[2]]["param_map"][param]["param"]
                tensors = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
                # Of float32 weights the master weights are a view: they come and go with the model.
                if param.dtype != torch.float32:
                    tensors["master"] = main.detach()
                assert all(tensor.shape == (span.end - span.start,) for tensor in tensors.values())
                yield StateShard(param, span.start, tensors)

    @property
    def steps(self) -> int:
        """Steps that Adam has taken, for the correction of its moments; a step that was skipped is none."""
        taken = (int(state["step"]) for part in self.parts for state in part.optimizer.state.values())
        return max(taken, default=0)  # a rank of a tiny model may hold nothing

    def set_steps(self, steps: int) -> None:
        """Lets Adam go on after so many steps."""
        for part in self.parts:
            for state in part.optimizer.state.values():
                # A tensor for each parameter: Adam counts up in place.
                state["step"] = torch.full_like(state["step"], steps)

    def remember_options(self) -> None:
        """Notes the options of all parameter groups, which a load would replace."""
        self._options = [
            [{key: value for key, value in group.items() if key != "params"} for group in part.optimizer.param_groups]
            for part in self.parts
        ]

    def after_load(self) -> None:
        """Mends what megatron's ``load_state_dict`` leaves behind; to be called after it."""
        # Left behind are also the steps from before the load, in one tensor that all parameters share, so that Adam
        # would count each step once a parameter.
        self.set_steps(max(group["step"] for part in self.parts for group in part.optimizer.param_groups))
        for part, options in zip(self.parts, self._options, strict=True):
            for group, option in zip(part.optimizer.param_groups, options, strict=True):
                group.update(option)  # learning rates, betas, ... are the flags of this start, not those of the save

    def state_dict(self) -> dict[str, Any]:
        """State of the schedule; the rest is in the sharded checkpoint."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state


def build_optimizer(settings: TrainSettings, model: Model, *, total_steps: int | None = None) -> Optimizer:
    """Makes the optimizer of ``model`` and sets the schedule's hooks on ``model.config``.

    The weights must be loaded before: the optimizer keeps master weights of its own.

    Args:
        total_steps: optimizer steps of the run, the end of the decay unless ``--lr-decay-iters`` is given.

    Raises:
        ValueError: the learning rate decays but nothing says when it ends.
    """
    assert model.trainable, "an optimizer needs a model with gradient buffers"
    flags = settings.optimizer
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
        )
        # Without a graph: in float32 the master weights are views of the weights, and torch's optimizers want leaves.
        with torch.no_grad():
            megatron = get_megatron_optimizer(config, model.chunks)
        optimizer = Optimizer(model, megatron)
        for part in optimizer.parts:
            if settings.parallel.optimizer_cpu_offload:
                part.optimizer = HostStateAdamW(part.optimizer.param_groups)
            _allocate_state(part.optimizer)
        optimizer.scheduler = Schedule(
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
    optimizer.remember_options()
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = megatron.scale_loss
    model.config.no_sync_func = model.chunks[0].no_sync
    return optimizer


class Schedule(OptimizerParamScheduler):
    """megatron-core's schedule with a warm-up of which every step trains.

    megatron-core gives step i of N, counted from 0, the share i / N of the rate, so the first step moves no weight: in
    reinforcement learning a whole rollout for nothing. Here it is i / N counted from 1. What follows is as there.
    """

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of the step after the ``num_steps`` that were taken."""
        if self.num_steps < self.lr_warmup_steps:
            highest = float(param_group.get("max_lr") or self.max_lr)
            return float(highest * (self.num_steps + 1) / self.lr_warmup_steps)
        rate: float = super().get_lr(param_group)
        return rate


class HostStateAdamW(torch.optim.AdamW):
    """AdamW whose moments stay in host memory and pass through the device one parameter at a time.

    The arithmetic is that of the device, so that results do not depend on where the moments are. Eight of the twelve
    bytes a float32 master weight takes with Adam leave the device; a step moves them over the host link twice.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        mean, square, step = (state[key].to(param.device, non_blocking=True) for key in _STATE)
        adamw(
            [param],
            [gradient],
            [mean],
            [square],
            [],
            [step],
            foreach=False,
            fused=bool(group["fused"]),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for key, value in zip(_STATE, (mean, square, step), strict=True):
            if value is not state[key]:
                state[key].copy_(value, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the options of the groups. megatron hands back this optimizer's own moments, which torch would move."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})


_STATE = ("exp_avg", "exp_avg_sq", "step")


def _allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes Adam's moments now rather than at the first step.

    So too little memory shows before the first rollout, and a checkpoint has the same content from the start.
    """
    assert isinstance(optimizer, torch.optim.AdamW)
    on_host = isinstance(optimizer, HostStateAdamW)
    for group in optimizer.param_groups:
        if all(param.is_cuda for param in group["params"]):
            # One kernel without temporaries. megatron builds the optimizer with torch's defaults.
            group["fused"], group["foreach"] = True, False
        for param in group["params"]:
            device = torch.device("cpu") if on_host else param.device
            options: dict[str, Any] = {"dtype": param.dtype, "device": device, "pin_memory": on_host and param.is_cuda}
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros(param.shape, **options),
                "exp_avg_sq": torch.zeros(param.shape, **options),
            }


def _decay_steps(settings: TrainSettings, total_steps: int | None) -> int:
    flags = settings.optimizer
    steps = flags.lr_decay_iters or total_steps
    if steps is None and flags.lr_decay_style != "constant":
        raise ValueError(f"--lr-decay-style {flags.lr_decay_style} needs an end; add --lr-decay-iters or --num-rollout")
    # Megatron wants the decay to end after the warm-up, also where the rate stays constant.
    return max(steps or 1, flags.lr_warmup_iters + 1)
