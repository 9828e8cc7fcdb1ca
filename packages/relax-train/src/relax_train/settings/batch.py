"""Options of the division of a rollout into optimizer steps and micro-batches."""

import dataclasses
from typing import ClassVar

from relax_data.options import LARGEST_COUNT, Settings, flag, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings(Settings):
    """Flags of batching."""

    TITLE: ClassVar[str] = "Batching"

    global_batch_size: int | None = option(
        None,
        "Samples of one optimizer step; default: all samples of a rollout / --num-steps-per-rollout.",
        ge=1,
        le=LARGEST_COUNT,
    )
    num_steps_per_rollout: int | None = option(
        None,
        "Optimizer steps on the samples of one rollout; default: 1, or what --global-batch-size gives.",
        ge=1,
        le=LARGEST_COUNT,
    )
    micro_batch_size: int = option(
        1, "Samples of one forward pass, without --use-dynamic-batch-size.", ge=1, le=LARGEST_COUNT
    )
    use_dynamic_batch_size: bool = option(
        False, "Fill each micro-batch up to a number of tokens; needs --max-tokens-per-gpu."
    )
    max_tokens_per_gpu: int | None = option(
        None,
        "Most tokens of a micro-batch on one GPU: a micro-batch holds at most this x the context-parallel size.",
        ge=1,
        le=LARGEST_COUNT,
    )
    log_probs_max_tokens_per_gpu: int | None = option(
        None,
        "The same for forward-only log-prob passes; default: --max-tokens-per-gpu.",
        ge=1,
        le=LARGEST_COUNT,
    )
    balance_data: bool = option(
        False,
        "Deal samples so that optimizer steps and data-parallel ranks get about as many tokens each; responses of one "
        "prompt may then fall into different optimizer steps. Micro-batches of --use-dynamic-batch-size always take "
        "all ranks about as many FLOPs.",
    )

    @property
    def log_probs_cap(self) -> int | None:
        """Tokens per GPU of a forward-only micro-batch; None without dynamic batches."""
        return self.log_probs_max_tokens_per_gpu or self.max_tokens_per_gpu

    def samples_per_step(self, n_samples: int) -> int:
        """Samples of one optimizer step when a whole rollout has ``n_samples``: the check at the start of a run.

        Raises:
            ValueError: they do not divide; the message shows the arithmetic.
        """
        steps, size = self.num_steps_per_rollout, self.global_batch_size
        if size is not None and steps is not None and size * steps != n_samples:
            raise ValueError(
                f"--num-steps-per-rollout {steps} x --global-batch-size {size} = {steps * size} samples, but a rollout "
                f"has {n_samples}: drop one of the two flags, or make them agree with "
                "--rollout-batch-size x --n-samples-per-prompt"
            )
        if size is not None:
            if n_samples % size:
                raise ValueError(
                    f"a rollout of {n_samples} samples (--rollout-batch-size x --n-samples-per-prompt) is "
                    f"{n_samples // size} x --global-batch-size {size} + {n_samples % size}: it must be a multiple"
                )
            return size
        steps = steps or 1
        if n_samples % steps:
            raise ValueError(
                f"a rollout of {n_samples} samples (--rollout-batch-size x --n-samples-per-prompt) cannot be divided "
                f"into --num-steps-per-rollout {steps} equal steps: {n_samples % steps} samples are left over"
            )
        return n_samples // steps

    def step_sizes(self, n_samples: int) -> list[int]:
        """Samples of each optimizer step of a rollout that has ``n_samples``, perhaps fewer than a whole one has.

        Raises:
            ValueError: they are more than ``--num-steps-per-rollout`` steps of ``--global-batch-size`` hold.
        """
        steps, size = self.num_steps_per_rollout, self.global_batch_size
        if size is None:
            steps = max(1, min(steps or 1, n_samples))
            return [n_samples * (i + 1) // steps - n_samples * i // steps for i in range(steps)]
        if steps is not None and n_samples > size * steps:
            return [self.samples_per_step(n_samples)]  # raises
        whole, rest = divmod(n_samples, size)
        return [size] * whole + [rest] * (rest > 0)

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if self.use_dynamic_batch_size:
            if self.max_tokens_per_gpu is None:
                found.append("--use-dynamic-batch-size needs --max-tokens-per-gpu, for example 9216")
            if "micro_batch_size" in given:
                found.append("--micro-batch-size has no effect with --use-dynamic-batch-size: drop one of the two")
        else:
            for name in ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu"):
                if name in given:
                    found.append(
                        f"{flag(name)} has no effect without --use-dynamic-batch-size: add it or drop the flag"
                    )
        return found
