"""Batches through the model: forward only for log-probs, forward and backward for the gradient.

Both run megatron-core's schedules, so pipeline parallelism is the same code. Every rank is called with the same
samples, of which it has the rows of its own, and takes its own part of them.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relax_train.algorithms.logprobs import effective_temperature
from relax_train.algorithms.losses import MAXIMA, MEANS, Documents, metric_names, policy_loss
from relax_train.algorithms.output_head import head_log_probs, head_loss
from relax_train.algorithms.registry import LOSSES, load_loss
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import (
    PackedSeqParams,
    finalize_model_grads,
    get_forward_backward_func,
    tensor_parallel,
)
from relax_train.backend.optimizer import Optimizer, StepResult
from relax_train.batching import (
    Lengths,
    MicroBatch,
    Samples,
    Split,
    Values,
    build_micro_batch,
    plan_micro_batches,
    response_offsets,
    split_responses,
)
from relax_train.models.build import Model
from relax_train.models.costs import cost_model
from relax_train.models.vision.tower import decoder_inputs
from relax_train.settings import TrainSettings

MicroBatchTensors = dict[str, torch.Tensor]
"""The tensors of a micro-batch: :meth:`relax_train.batching.MicroBatch.to`."""

Columns = Mapping[str, Values]
"""Values per response token: for each name one ``[response]`` array for each sample of this rank, by its place."""

COLUMNS = ("weights", "mask", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
"""Arguments of :func:`relax_train.algorithms.losses.policy_loss` that hold a value per token."""

Plan = list[list[int]]
"""Micro-batches of one rank: places of the samples of each."""


class ForwardBackward:
    """Runs batches through one model.

    Args:
        model: weights and layout.
        settings: batching and algorithm.
        temperature: sampling temperature of the rollout (``--rollout-temperature``); log-probs are those of
            ``logits / temperature``, as the engine's are.
    """

    def __init__(self, model: Model, settings: TrainSettings, *, temperature: float = 1.0) -> None:
        self._model, self._settings = model, settings
        self._temperature = effective_temperature(temperature)
        self._objective = load_loss(settings.algorithm.loss_type)
        parallel = model.parallel
        self.split = Split(
            dp_size=parallel.dp_size,
            cp_size=parallel.cp_size,
            cp_rank=parallel.cp_rank,
            sequence_size=parallel.tp_size if settings.parallel.sequence_parallel else 1,
            lock_step=parallel.experts_span_data_parallel,
            cost=cost_model(model.shape),
        )

    def plan(self, samples: Lengths, *, forward_only: bool) -> Plan:
        """The micro-batches of this rank.

        Args:
            samples: of one optimizer step, or of a rollout for a forward-only pass; no rows are needed.
            forward_only: whether this is for a log-prob pass, which has its own cap.

        Raises:
            ValueError: a sample does not fit into a micro-batch; the message names it.
        """
        plan = plan_micro_batches(samples, self._settings.batch, self.split, forward_only=forward_only)
        return plan[self._model.parallel.dp_rank]

    def log_probs(self, batch: Samples, plan: Plan | None = None) -> list[np.ndarray]:
        """Log-probability of every response token under the model, without gradient.

        Args:
            batch: the samples; those of this rank's part of the plan have their rows.
            plan: what :meth:`plan` gave for them.

        Returns:
            float32 ``[response]`` per sample, in the order of the batch, the same on every rank.

        Raises:
            ValueError: a sample does not fit into a micro-batch; the message names it.
        """
        parallel = self._model.parallel
        micro_batches = self._micro_batches(batch, {}, self.plan(batch, forward_only=True) if plan is None else plan)
        total = int(response_offsets(batch)[-1])
        # One more place, where the positions that predict no response token go.
        flat = torch.zeros(total + 1, dtype=torch.float32, device=parallel.device)
        with DeviceContext(), torch.no_grad():
            parts = self._schedule(micro_batches, self._log_probs_of, forward_only=True)
            for targets, values in parts:
                flat.index_copy_(0, targets.where(targets >= 0, total), values.float())
            if parallel.is_last_stage:
                # Each token lies on one rank, and is 0 on the others.
                flat[total] = 0
                _all_reduce(flat, parallel.dp_cp_group)
            _from_last_stage(flat, self._model)
        return split_responses(flat[:total].cpu().numpy(), batch)

    def gradient(self, batch: Samples, columns: Columns, plan: Plan | None = None) -> dict[str, float]:
        """Adds the gradient of the loss of one optimizer step to the gradient buffers, complete over all ranks.

        Args:
            batch: the samples of the optimizer step; those of this rank's part of the plan have their rows.
            columns: ``weights``, ``mask``, ``advantages``, ``rollout_log_probs``, and optionally ``old_log_probs`` and
                ``ref_log_probs``: the arguments of :func:`relax_train.algorithms.losses.policy_loss`.
            plan: what :meth:`plan` gave for them.

        Returns:
            metrics of the step over all ranks, the same on every rank, and ``micro_batches`` of a rank.

        Raises:
            ValueError: a sample does not fit into a micro-batch; the message names it.
        """
        self._model.config.finalize_model_grads_func = _finalize
        micro_batches = self._micro_batches(
            batch, columns, self.plan(batch, forward_only=False) if plan is None else plan
        )
        with DeviceContext():
            sums = self._schedule(micro_batches, self._loss_of, forward_only=False)
            return self._step_metrics(sums) | {"micro_batches": float(len(micro_batches))}

    # ------------------------------------------------------------------ micro-batches through the model

    def _micro_batches(self, batch: Samples, columns: Columns, plan: Plan) -> list[MicroBatch]:
        vision = self._model.shape.vision
        return [build_micro_batch(batch, indices, self.split, columns, vision) for indices in plan]

    def _schedule(
        self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Runs them all; gives ``finish(tensors, output)`` of each on the last pipeline stage, nothing elsewhere."""

        def forward(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            micro = next(iterator)
            tensors = micro.to(self._model.parallel.device, self._column_dtype)
            packed = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=tensors["cu_seqlens"],
                cu_seqlens_kv=tensors["cu_seqlens"],
                max_seqlen_q=micro.max_seqlen,
                max_seqlen_kv=micro.max_seqlen,
            )
            more = {}
            if micro.pictures is not None:
                more = decoder_inputs(self._model.gpt[0], tensors["tokens"], micro.pictures, packed)
            with self._model.without_head():
                output = chunk(tensors["tokens"], tensors["position_ids"], None, packed_seq_params=packed, **more)
            return output, functools.partial(finish, tensors)

        result: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=self._model.chunks,
            num_microbatches=len(micro_batches),
            seq_length=max(len(m.tokens) for m in micro_batches) * self.split.cp_size,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return result

    @property
    def _column_dtype(self) -> torch.dtype:
        return torch.float64 if self._model.dtype == torch.float64 else torch.float32

    def _selected(self, output: torch.Tensor, tensors: MicroBatchTensors) -> torch.Tensor:
        """Hidden states ``[selected, hidden]`` at the positions that predict a response token.

        The same on all tensor-parallel ranks, whose gradients are summed on the way back.
        """
        hidden, parallel = output[0], self._model.parallel
        if self._settings.parallel.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=parallel.tp_group
            )
        elif parallel.tp_size > 1:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=parallel.tp_group)
        return hidden.index_select(0, tensors["selected"])

    @property
    def _head_options(self) -> dict[str, Any]:
        return {
            "temperature": self._temperature,
            "group": self._model.parallel.tp_group,
            "vocab_size": self._model.vocab_size,
        }

    def _log_probs_of(
        self, tensors: MicroBatchTensors, output: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, at = self._selected(output, tensors), tensors["selected"]
        log_probs, _entropy = head_log_probs(
            hidden, self._model.head_weight, tensors["labels"][at], with_entropy=False, **self._head_options
        )
        return tensors["targets"][at], log_probs

    def _loss_of(
        self, tensors: MicroBatchTensors, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        settings, at = self._settings.algorithm, tensors["selected"]
        hidden, weight, labels = self._selected(output, tensors), self._model.head_weight, tensors["labels"][at]
        columns: dict[str, Any] = {name: tensors[name][at] for name in COLUMNS if name in tensors}
        documents = Documents(tensors["documents"][at], len(tensors["cu_seqlens"]) - 1, self._model.parallel.cp_group)
        if settings.loss_type in LOSSES and not settings.sequence_ratio:
            sums = _Sums(self._reduced_names)

            def loss_of(rows: slice, log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
                loss, found = policy_loss(
                    log_probs,
                    entropy,
                    **{name: column[rows] for name, column in columns.items()},
                    objective=self._objective,
                    settings=settings,
                )
                sums.add(found)
                return loss

            loss = head_loss(hidden, weight, labels, loss_of, **self._head_options)
            total = sums.total()
        else:  # a loss that may look at all tokens of a response
            log_probs, entropy = head_log_probs(
                hidden, weight, labels, entropy_grad=settings.entropy_coef != 0, **self._head_options
            )
            loss, found = policy_loss(
                log_probs, entropy, **columns, documents=documents, objective=self._objective, settings=settings
            )
            total = torch.stack([found[n] for n in self._reduced_names])
        # The second value is megatron's token count; the weights hold the normalisation already (see _finalize).
        return loss, torch.ones((), dtype=torch.int, device=loss.device), total

    # ------------------------------------------------------------------ metrics

    @property
    def _reduced_names(self) -> list[str]:
        """Names of the metrics that a micro-batch reports: sums first, then maxima."""
        names = [*metric_names(self._settings.algorithm), "tokens"]
        return sorted(names, key=lambda n: (n in MAXIMA, n))

    def _step_metrics(self, per_micro_batch: list[torch.Tensor]) -> dict[str, float]:
        parallel, names = self._model.parallel, self._reduced_names
        n_sums = sum(n not in MAXIMA for n in names)
        total = torch.zeros(len(names), dtype=torch.float64, device=parallel.device)
        if parallel.is_last_stage:
            stacked = torch.stack(per_micro_batch)
            sums, maxima = stacked[:, :n_sums].sum(0), stacked[:, n_sums:].amax(0)
            _all_reduce(sums, parallel.dp_cp_group)
            _all_reduce(maxima, parallel.dp_cp_group, op=dist.ReduceOp.MAX)
            total = torch.cat([sums, maxima])
        _from_last_stage(total, self._model)
        values = dict(zip(names, total.tolist(), strict=True))
        tokens = max(values["tokens"], 1.0)
        return {name: value / tokens if name in MEANS else value for name, value in values.items()}


class _Sums:
    """Metrics of the chunks of a micro-batch, put together: those of :data:`MAXIMA` by the largest, others by the sum.

    Args:
        names: in the order of the result.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._chunks: list[torch.Tensor] = []

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        self._chunks.append(torch.stack([metrics[name] for name in self._names]))

    def total(self) -> torch.Tensor:
        """float64 ``[names]``."""
        stacked = torch.stack(self._chunks)
        largest = torch.tensor([name in MAXIMA for name in self._names], device=stacked.device)
        return torch.where(largest, stacked.amax(0), stacked.sum(0))


def update_weights(optimizer: Optimizer) -> StepResult | None:
    """Clips the gradient and steps, unless the gradient is not finite: then nothing changes.

    Returns:
        what the step did, the same on every rank; None when it was skipped.
    """
    with DeviceContext():
        overflow = optimizer.megatron.prepare_grads()
        norm = float(optimizer.megatron.get_grad_norm())
    if overflow or not math.isfinite(norm):
        return None
    return optimizer.step()


def _finalize(chunks: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's reduction of gradients over ranks, without its division by the number of tokens.

    The weights of :func:`relax_train.algorithms.losses.token_weights` hold the normalisation over the whole step, which
    also covers the mean over samples.
    """
    finalize_model_grads(chunks, None, **options)


def _all_reduce(tensor: torch.Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)


def _from_last_stage(tensor: torch.Tensor, model: Model) -> None:
    """Gives every pipeline stage what the last one has."""
    parallel = model.parallel
    if parallel.pp_size > 1:
        source = dist.get_global_rank(parallel.pp_group, parallel.pp_size - 1)
        dist.broadcast(tensor, source, group=parallel.pp_group)
