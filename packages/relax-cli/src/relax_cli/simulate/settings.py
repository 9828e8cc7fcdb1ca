"""Options of `relax simulate`: the run to take figures from, or the figures themselves, and what to compare."""

import dataclasses
import math
from typing import ClassVar

from relax_data.options import LARGEST_COUNT, Settings, option

FASTEST = 1e9
"""Most tokens/s of anything."""
LONGEST = 10**7
"""Most tokens of a text."""
MOST_GPUS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateSettings(Settings):
    """What is compared, how fast the parts are, and how long the responses."""

    TITLE: ClassVar[str] = "Simulation"

    from_run: str | None = option(
        None,
        "Folder of a run (runs/NAME): its response lengths, speeds and sizes are the figures. What is given beside it "
        "wins.",
        metavar="RUN_DIR",
    )
    num_gpus: int | None = option(
        None, "GPUs in all. By default those of --from, else 8.", ge=1, le=MOST_GPUS, metavar="N"
    )
    rollout_num_gpus: tuple[int, ...] = option(
        (),
        "Of these, GPUs that generate when fully async, one row each; the others train. By default a quarter, half and "
        "three quarters.",
        ge=1,
        le=MOST_GPUS,
    )
    rollout_num_gpus_per_engine: int | None = option(
        None, "GPUs of one engine. By default those of --from, else 1.", ge=1, le=MOST_GPUS
    )
    max_staleness: tuple[int, ...] = option((1, 2, 4, 8), "Values of --max-staleness, one row each.", ge=0, le=1000)
    rollout_batch_size: int | None = option(
        None, "Prompts a step. By default that of --from, else 32.", ge=1, le=LARGEST_COUNT
    )
    n_samples_per_prompt: int | None = option(
        None, "Responses to each prompt. By default that of --from, else 8.", ge=1, le=LARGEST_COUNT
    )
    over_sampling_batch_size: int | None = option(
        None,
        "Groups open at once, where the staleness allows so many. By default all that it allows, with colocate at most "
        "3 x --rollout-batch-size.",
        ge=1,
        le=LARGEST_COUNT,
    )
    partial_rollout: bool = option(
        True,
        "Interrupted responses keep their tokens. --no-partial-rollout: a push waits until all that runs has ended, "
        "and colocate starts no more prompts than a step takes.",
    )
    recompute_kv_cache_after_weight_updates: bool = option(
        True,
        "Fully async: keys and values of interrupted responses are computed again. "
        "--no-recompute-kv-cache-after-weight-updates keeps them.",
    )
    num_rollout: int = option(
        100, "Steps that the means are taken over, after those that fill the pipeline.", ge=10, le=LARGEST_COUNT
    )
    seed: int = option(1234, "Seed of the response lengths, which are the same in all rows.", ge=0, le=LARGEST_COUNT)
    json: bool = option(False, "Print JSON instead of a table.")

    engine_rate: float | None = option(
        None, "Tokens/s that one engine generates with very many requests.", gt=1e-3, le=FASTEST
    )
    engine_half: float | None = option(
        None,
        "Requests with which an engine reaches half of --engine-rate: with k it generates engine-rate * k / (k + "
        "engine-half) tokens/s. 0: the same rate with any number.",
        ge=0,
        le=1e6,
    )
    prefill_rate: float | None = option(
        None,
        "Tokens/s of which one engine computes keys and values, those of prompts and of interrupted responses. By "
        "default 3 x --train-rate of its GPUs: a forward pass is a third of a training pass.",
        gt=1e-3,
        le=FASTEST,
    )
    train_rate: float | None = option(
        None,
        "Tokens/s, prompts and responses, that one GPU trains, all passes of a step together.",
        gt=1e-3,
        le=FASTEST,
    )
    push_seconds: float | None = option(
        None, "Seconds of a push of weights. By default those of --from, else 1.", ge=0, le=1e5
    )
    switch_seconds: float | None = option(
        None,
        "Colocate: seconds a step for the change from engines to trainer and back. By default those of --from, else 2.",
        ge=0,
        le=1e5,
    )
    sglang_server_concurrency: int | None = option(
        None, "Most requests that run on one engine. By default that of --from, else 512.", ge=1, le=LARGEST_COUNT
    )
    response_lengths: str | None = option(
        None,
        "File of response lengths in tokens, separated by blanks or lines; they are drawn from it.",
        metavar="FILE",
    )
    response_length_mean: float | None = option(
        None, "Or: mean of response lengths that are log-normal, before the cap.", ge=1, le=LONGEST
    )
    response_length_sigma: float = option(
        1.0, "With --response-length-mean: standard deviation of the logarithm; 0: all are equal.", ge=0, le=5
    )
    rollout_max_response_len: int | None = option(
        None, "With --response-length-mean, which needs it: most tokens of a response.", ge=1, le=LONGEST
    )
    prompt_length: float | None = option(
        None, "Tokens of a prompt. By default those of --from, else 0.", ge=0, le=LONGEST
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        if self.response_lengths is not None and self.response_length_mean is not None:
            return ["--response-lengths and --response-length-mean both say how long responses are: give one of them"]
        if self.response_length_mean is not None and self.rollout_max_response_len is None:
            return ["--response-length-mean needs --rollout-max-response-len: the longest responses decide most"]
        if (self.response_length_mean or 0) > (self.rollout_max_response_len or math.inf):
            return [
                f"--response-length-mean {self.response_length_mean:g} is more than --rollout-max-response-len "
                f"{self.rollout_max_response_len}, where all responses end: lower the one or raise the other"
            ]
        name = "recompute_kv_cache_after_weight_updates"
        if name in given and not self.recompute_kv_cache_after_weight_updates and not self.partial_rollout:
            return ["--no-recompute-kv-cache-after-weight-updates has no effect with --no-partial-rollout; remove one"]
        shape = given & {"response_length_sigma", "rollout_max_response_len"}
        if self.response_length_mean is None and shape:
            names = " and ".join(sorted("--" + name.replace("_", "-") for name in shape))
            return [f"{names} without effect: add --response-length-mean, or remove it"]
        return []
