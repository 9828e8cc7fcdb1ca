"""The trainer: one rank of the megatron-core backend, from a rollout's samples to new weights.

Old log-probs are those of the weights before the first optimizer step of a rollout. With one optimizer step a rollout
they equal the log-probs of the training pass itself, so that pass's detached values are used, which is exact and
saves a forward pass; with several steps they are computed beforehand in a forward-only pass. The same values feed
importance sampling and the comparison with the engine's log-probs.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from relax_data.types import BatchRows, RowSource, StepManifest, TrainBatch
from relax_data.weights import Bucket

from relax_train.algorithms.advantages import advantage_inputs, compute_advantages
from relax_train.algorithms.losses import masked_weights, weight_divisors
from relax_train.algorithms.reference import ReferenceWeights
from relax_train.algorithms.registry import load_estimator, load_loss
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.host_memory import HostMemory
from relax_train.backend.offload import Offload
from relax_train.backend.optimizer import Optimizer, build_optimizer
from relax_train.backend.parallel import ParallelState, setup_parallel, teardown_parallel
from relax_train.batching import check_samples, optimizer_steps
from relax_train.checkpoint.hf_export import save_hf
from relax_train.checkpoint.manifest import Loaded
from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint
from relax_train.models.build import Model, build_model, check_same_architecture
from relax_train.models.export import weight_buckets
from relax_train.models.hf_mapping import load_hf_weights
from relax_train.models.vision.shape import PREFIX
from relax_train.observer import NullObserver, StepObserver
from relax_train.rows import RankBatch, fetch_rows
from relax_train.settings import TrainSettings
from relax_train.step import ForwardBackward, Plan, update_weights

T = TypeVar("T")

MAX_SKIPPED_STEPS = 3
"""Optimizer steps in a row that may be skipped for a gradient that is not finite, before training stops."""


class Trainer:
    """One rank of the trainer. Every method is collective: all ranks call it with the same arguments.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set in the environment before :meth:`setup`.

    Args:
        settings: model, parallel layout, algorithm, optimizer, batching, checkpoints.
        temperature: sampling temperature of the rollout (``--rollout-temperature``).
        total_steps: optimizer steps of the whole run, where a decaying learning rate ends; None when unknown.
        always_log_probs: run the forward-only log-prob pass also where the training pass gives the same values, for a
            profile of the phase ``train_log_probs``, which is empty otherwise. The training result is the same.
        observer: is told of the phases of each step.
        host: memory for :meth:`sleep`, which may have been begun before. With it every push of weights is followed by a
            sleep: what that takes is begun while the push and what comes before it run.

    Raises:
        ValueError: ``--advantage-estimator`` or ``--loss-type`` names a function of the user that cannot be imported or
            called with what it is given.
    """

    def __init__(
        self,
        settings: TrainSettings,
        *,
        temperature: float = 1.0,
        total_steps: int | None = None,
        always_log_probs: bool = False,
        observer: StepObserver | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self._settings, self._temperature, self._total_steps = settings, temperature, total_steps
        self._always_log_probs = always_log_probs
        self._observer: StepObserver = observer or NullObserver()
        self._estimator = load_estimator(settings.algorithm.advantage_estimator)
        load_loss(settings.algorithm.loss_type)  # now, before a model is loaded
        self._parallel: ParallelState | None = None
        self._model: Model | None = None
        self._optimizer: Optimizer | None = None
        self._forward_backward: ForwardBackward | None = None
        self._reference: ReferenceWeights | None = None
        self._offload: Offload | None = None
        self._host = host
        self._offset = 0
        self._skipped_in_a_row = 0

    # ------------------------------------------------------------------ life

    def setup(self) -> None:
        """Joins the process group, builds model and optimizer, and loads the start weights.

        Raises:
            ValueError: the model, its files or the parallel sizes do not fit; the message says what to change.
        """
        settings = self._settings
        self._observer.before_model()
        self._parallel = setup_parallel(settings.parallel, seed=settings.model.seed)
        if self._host is not None and self._parallel.device.type == "cuda":
            self._host.pin(self._parallel.device)  # while the model is built and loaded
        self._model = build_model(settings, self._parallel)
        if settings.algorithm.needs_reference and settings.model.ref_load is not None:
            try:
                check_same_architecture(self._model.shape, settings.model.ref_load)
                load_hf_weights(self._model, settings.model.ref_load)
            except ValueError as error:
                raise ValueError(f"--ref-load: {error}") from error
            self._reference = ReferenceWeights(self._model)
        load_hf_weights(self._model, settings.model.hf_checkpoint)
        if settings.algorithm.needs_reference and self._reference is None:
            self._reference = ReferenceWeights(self._model)
        self._optimizer = build_optimizer(settings, self._model, total_steps=self._total_steps)
        self._forward_backward = ForwardBackward(self._model, settings, temperature=self._temperature)
        self._offload = Offload(self._model, self._optimizer, self._host)
        if self._host is not None:
            self._offload.prepare()

    def sleep(self) -> None:
        """Gives the GPU's memory away: weights and optimizer move to the host. Without a GPU nothing happens.

        Until :meth:`wake` every method but that one and :meth:`close` is refused.
        """
        if self.parallel.device.type == "cuda":
            _there(self._offload).sleep()

    def wake(self) -> None:
        """Takes the GPU's memory back, with everything as it was."""
        _there(self._offload).wake()

    def measure_room(self) -> None:
        """While it sleeps and the engines have all they use: from the next step on, what fits beside them stays."""
        if self.parallel.device.type == "cuda" and _there(self._offload).asleep:
            _there(self._offload).measure_room()

    def free_resident(self) -> None:
        """While it sleeps: gives away also what has stayed on the GPU, for an engine that starts anew."""
        if _there(self._offload).asleep:
            _there(self._offload).free_resident()

    def write_traces(self, *, last: bool = False) -> None:
        """Lets the observer write what it has recorded; for a moment when nothing waits for this rank.

        Args:
            last: no step follows.
        """
        self._observer.write_traces(last=last)

    def close(self) -> None:
        """Closes the observer and leaves the process group; may be called twice."""
        self._observer.close()
        if self._offload is not None:
            self._offload.close()
        if self._parallel is not None:
            teardown_parallel()
        self._parallel = self._model = self._optimizer = self._forward_backward = self._reference = self._offload = None

    @property
    def parallel(self) -> ParallelState:
        """Rank, sizes and groups; after :meth:`setup`."""
        return _there(self._parallel)

    @property
    def model(self) -> Model:
        """The policy; after :meth:`setup`."""
        return _there(self._model)

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, over all ranks. Collective."""
        return count_parameters(self.model)

    def _awake(self) -> Model:
        if _there(self._offload).asleep:
            raise RuntimeError("the trainer sleeps, its weights are in host memory: call wake() first")
        return self.model

    def _with_optimizer(self) -> Optimizer:
        """The optimizer, of which a wake brings back moments and master weights after the weights."""
        _there(self._offload).wait()
        return _there(self._optimizer)

    def _begin_sleep(self) -> None:
        """Begins to copy out what the next sleep frees, unless that would have to wait for the host's memory."""
        if self._host is not None and _there(self._offload).prepared:
            _there(self._offload).begin_sleep()

    # ------------------------------------------------------------------ weights out

    @property
    def has_frozen_tower(self) -> bool:
        """Whether the model has a vision tower that stays as it is."""
        return self.model.shape.vision is not None and self._settings.model.freeze_vision_model

    def weight_buckets(self, max_bytes: int, *, frozen: bool = True) -> Iterator[Bucket]:
        """The weights under their Hugging Face names, full tensors on every rank: see :mod:`relax_train.models.export`.

        Args:
            max_bytes: size of a bucket (``--update-weight-buffer-size``); a larger tensor comes alone.
            frozen: also those of a vision tower that stays as it is; the same on every rank.
        """
        model = self._awake()
        self._begin_sleep()
        return weight_buckets(model, max_bytes, without=None if frozen or not self.has_frozen_tower else PREFIX)

    def save(
        self, directory: str, rollout_id: int, extra: dict[str, Any] | None = None, files: Path | None = None
    ) -> None:
        """Writes the checkpoint of a rollout under ``directory``; it appears whole or not at all.

        Args:
            directory: folder of checkpoints (``--save``).
            rollout_id: absolute id of the rollout that was trained last.
            extra: JSON-able state of the caller, which :meth:`load` gives back; rank 0's is written.
            files: folder with files that become part of the checkpoint
                (:func:`relax_train.checkpoint.folders.side_folder`); it is gone afterwards.

        Raises:
            CheckpointError: it could not be written, for example on a full disk; the previous one is as it was.
        """
        keep = self._settings.checkpoint.max_actor_ckpt_to_keep
        model = self._awake()
        save_checkpoint(directory, rollout_id, model, self._with_optimizer(), extra=extra, files=files, keep=keep)

    def load(self, directory: str) -> Loaded | None:
        """Resumes weights, optimizer and schedule from the latest checkpoint under ``directory``.

        It may have been saved under another parallel layout.

        The reference model stays what :meth:`setup` made it: ``--ref-load`` or the start weights.

        Returns:
            the rollout id after which it was written, the caller's state, and the folder; None when there is no
            checkpoint.

        Raises:
            CheckpointError: it is unreadable.
            ValueError: it belongs to another model, precision or optimizer; the message names the difference.
        """
        model = self._awake()
        _there(self._offload).changed()
        return load_checkpoint(directory, model, self._with_optimizer())

    def save_hf(self, directory: str) -> None:
        """Writes a Hugging Face folder that transformers loads (``--save-hf``).

        Raises:
            CheckpointError: it could not be written; what was there before is as it was.
        """
        save_hf(self._awake(), directory)

    # ------------------------------------------------------------------ training

    def log_probs(self, batch: TrainBatch) -> list[np.ndarray]:
        """Log-probability of every response token under the current weights, at the rollout temperature.

        Returns:
            float32 ``[response]`` per sample, in the order of the batch, the same on every rank.
        """
        self._awake()
        return _there(self._forward_backward).log_probs(batch)

    def train(
        self, samples: TrainBatch | StepManifest, rows: RowSource | None = None, *, version: int
    ) -> dict[str, float]:
        """Takes all optimizer steps on one rollout.

        Args:
            samples: the whole rollout, the same on every rank: its manifest, or the batch itself.
            rows: where this rank gets the rows of its own samples; needed with a manifest.
            version: version of the weights before these steps, for the staleness of the samples.

        Returns:
            ``train/...``: means over the optimizer steps, the same on every rank; ``staleness/...`` in versions;
            ``time/...``: seconds of this rank in phases that do not overlap.

        Raises:
            ValueError: the samples do not fit the settings; nothing was trained. The message names sample and flag.
            FloatingPointError: the gradient of several optimizer steps in a row was not finite.
        """
        if isinstance(samples, TrainBatch):
            rows = BatchRows(samples)
            samples = StepManifest.of(samples)
        assert rows is not None, "a manifest comes with a source of its rows"
        if len(samples) == 0:
            raise ValueError(f"rollout {samples.rollout_id} has no samples: there is nothing to train on")
        self._awake()
        _there(self._offload).changed()
        offset, self._offset = self._offset, self._offset + 1
        with self._observer.phase("train_overall", offset):
            metrics = self._train(samples, rows, version, offset)
        self._begin_sleep()
        return metrics

    def _train(self, manifest: StepManifest, rows: RowSource, version: int, offset: int) -> dict[str, float]:
        settings, forward_backward, timer = self._settings, _there(self._forward_backward), PhaseTimer(self.parallel)
        steps = optimizer_steps(manifest, settings.batch)
        needs_old = len(steps) > 1 or settings.algorithm.kl_coef != 0 or self._always_log_probs
        check_samples(manifest, settings.batch, forward_backward.split)
        plans = [forward_backward.plan(manifest.select(indices), forward_only=False) for indices in steps]
        mine = sorted(
            indices[i] for indices, plan in zip(steps, plans, strict=True) for members in plan for i in members
        )
        forward_plan: Plan | None = None
        if needs_old or self._reference is not None:
            forward_plan = forward_backward.plan(manifest, forward_only=True)
        with timer.phase("fetch"):
            own = sorted({*mine, *(i for members in forward_plan or () for i in members)})
            batch = fetch_rows(manifest, rows, own, pictures=self.model.shape.vision is not None)
        old = ref = None
        with self._observer.phase("train_log_probs", offset):
            if self._reference is not None:
                with timer.phase("ref_log_probs"), self._reference.put_in():
                    ref = forward_backward.log_probs(batch, forward_plan)
            if needs_old:
                with timer.phase("log_probs"):
                    old = forward_backward.log_probs(batch, forward_plan)
        inputs = advantage_inputs(
            manifest,
            settings.algorithm,
            own=mine,
            masks=[batch.loss_masks[i] for i in mine],
            old_log_probs=None if old is None else [old[i] for i in mine],
            ref_log_probs=None if ref is None else [ref[i] for i in mine],
            all_reduce=self._sum_over_data_parallel,
        )
        columns: dict[str, dict[int, np.ndarray]] = {
            "mask": {i: batch.loss_masks[i] for i in mine},
            "rollout_log_probs": {i: batch.rollout_log_probs[i] for i in mine},
            "advantages": dict(zip(mine, compute_advantages(inputs, self._estimator), strict=True)),
        }
        if old is not None and len(steps) > 1:
            columns["old_log_probs"] = {i: old[i] for i in mine}
        if ref is not None:
            columns["ref_log_probs"] = {i: ref[i] for i in mine}
        with self._observer.phase("train_actor", offset), timer.phase("train"):
            metrics = _mean_of_steps(
                [self._step(batch, indices, plan, columns) for indices, plan in zip(steps, plans, strict=True)]
            )
        return (
            {f"train/{name}": value for name, value in metrics.items()}
            | {"train/samples": float(len(batch)), "train/total_tokens": float(batch.total_lengths.sum())}
            | _staleness(manifest, version)
            | {f"time/{name}": seconds for name, seconds in timer.seconds.items()}
        )

    def _sum_over_data_parallel(self, values: np.ndarray) -> np.ndarray:
        """Adds up what data-parallel ranks know of their own samples; float64 of the same shape."""
        total = torch.from_numpy(values.astype(np.float64)).to(self.parallel.device)
        with DeviceContext():
            dist.all_reduce(total, group=self.parallel.dp_group)
        result: np.ndarray = total.cpu().numpy()
        return result

    def _step(
        self, batch: RankBatch, indices: list[int], plan: Plan, columns: dict[str, dict[int, np.ndarray]]
    ) -> dict[str, float]:
        """One optimizer step on the samples ``indices`` of ``batch``; ``plan`` counts within them."""
        forward_backward, optimizer = _there(self._forward_backward), _there(self._optimizer)
        samples = batch.select(indices)
        chosen = {
            name: {i: column[old] for i, old in enumerate(indices) if old in column} for name, column in columns.items()
        }
        divisors = weight_divisors(
            samples.manifest.trained_tokens, per_token=self._settings.algorithm.calculate_per_token_loss
        )
        chosen["weights"] = {i: masked_weights(mask, divisors[i]) for i, mask in chosen["mask"].items()}
        optimizer.zero_grad()
        metrics = forward_backward.gradient(samples, chosen, plan)
        result = update_weights(self._with_optimizer())
        if result is not None:
            self._skipped_in_a_row = 0
            return metrics | {"grad_norm": result.grad_norm, "lr": result.lr, "skipped_steps": 0.0}
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_STEPS:
            raise FloatingPointError(
                f"the gradient of {self._skipped_in_a_row} optimizer steps in a row was not finite (rollout "
                f"{batch.rollout_id}, loss {metrics['loss']}): the weights or the data are broken. Resume from a "
                "checkpoint with a smaller --lr, and look at rewards and log-probs of this rollout"
            )
        return {"skipped_steps": 1.0}


class PhaseTimer:
    """Seconds of this rank by phase."""

    def __init__(self, parallel: ParallelState) -> None:
        self.seconds: dict[str, float] = {}
        self._device = parallel.device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside to the phase ``name``; waits at its end for what the GPU computes, not for copies."""
        start = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def _mean_of_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps that were not skipped; maxima, sums and the last value where the name asks."""
    taken = [m for m in steps if not m["skipped_steps"]]
    result = {"steps": float(len(steps)), "skipped_steps": float(len(steps) - len(taken))}
    for name in taken[0] if taken else ():
        values = [m[name] for m in taken]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name in ("tokens", "micro_batches"):
            result[name] = sum(values)
        elif name == "lr":
            result[name] = values[-1]
        elif name != "skipped_steps":
            result[name] = sum(values) / len(values)
    return result


def _staleness(manifest: StepManifest, version: int) -> dict[str, float]:
    """Versions between the weights that are trained and the oldest token of a sample."""
    ages = version - manifest.oldest_versions
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def count_parameters(model: Model) -> int:
    """Parameters of the whole model: sharded ones over all ranks that hold a part, copies once. Collective."""
    parallel = model.parallel
    counts = torch.zeros(2, dtype=torch.int64, device=parallel.device)  # dense, expert
    for gpt in model.gpt:
        for parameter in gpt.parameters():
            expert = not getattr(parameter, "allreduce", True)
            rank = parallel.etp_rank if expert else parallel.tp_rank
            sharded = getattr(parameter, "tensor_model_parallel", False)
            if (sharded or rank == 0) and not getattr(parameter, "shared", False):
                counts[int(expert)] += parameter.numel()
    dist.all_reduce(counts[:1], group=parallel.tp_group)
    for group in (parallel.ep_group, parallel.etp_group):
        dist.all_reduce(counts[1:], group=group)
    dist.all_reduce(counts, group=parallel.pp_group)
    return int(counts.sum())


def _there(value: T | None) -> T:
    assert value is not None, "call setup() first; after close() the trainer is gone"
    return value
