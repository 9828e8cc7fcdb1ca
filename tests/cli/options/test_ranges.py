"""Every option that is a number says which numbers are right; the ends are where a type or a formula ends."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from command_words import changed
from relax_cli.config.options import namespace, settings_classes
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError

INT32 = 2**31 - 1
GPU_PLAN = ["--dry-run", "--num-gpus-per-node", "8"]
COUNTS = [
    "rollout-max-prompt-len",
    "streaming-buffer-size",
    "num-data-storage-units",
    "rollout-batch-size",
    "n-samples-per-prompt",
    "over-sampling-batch-size",
    "rollout-max-response-len",
    "rollout-max-context-len",
    "rollout-top-k",
    "rollout-stop-token-ids",
    "partial-rollout-max-aborted-count",
    "reward-max-concurrency",
    "n-samples-per-eval-prompt",
    "eval-max-response-len",
    "rollout-num-gpus-per-engine",
    "sglang-server-concurrency",
    "global-batch-size",
    "num-steps-per-rollout",
    "micro-batch-size",
    "max-tokens-per-gpu",
    "log-probs-max-tokens-per-gpu",
    "save-interval",
    "max-actor-ckpt-to-keep",
    "start-rollout-id",
    "lr-warmup-iters",
    "lr-decay-iters",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "recompute-num-layers",
    "max-staleness",
    "actor-num-nodes",
    "actor-num-gpus-per-node",
    "rollout-num-gpus",
    "num-gpus-per-node",
    "num-rollout",
    "num-epoch",
    "eval-interval",
    "rollout-seed",
]
COEFFICIENTS = [
    "kl-loss-coef",
    "kl-coef",
    "entropy-coef",
    "weight-decay",
    "adam-eps",
    "rollout-temperature",
    "eval-temperature",
]
BOUNDS = ["eps-clip-high", "tis-clip", "clip-grad"]


def told(argv: list[str], problem: str) -> int:
    """How often a start with these words is refused with that sentence, whatever else is wrong with it."""
    try:
        resolve(changed(GPU_PLAN, argv), {})
    except ConfigError as error:
        return sum(found.split(" [")[0] == problem for found in error.problems)
    return 0


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_ends_where_32_bits_end(workspace: Path, model: list[str], name: str) -> None:
    problem = f"--{name} must be {INT32} or less"
    problem += ", or -1" if name == "rollout-top-k" else ""
    assert told([*model, f"--{name}", str(INT32 + 1)], f"{problem}, not {INT32 + 1}") == 1
    assert told([*model, f"--{name}", str(INT32)], f"{problem}, not {INT32}") == 0


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_coefficient_is_at_most_a_million(workspace: Path, model: list[str], name: str) -> None:
    assert told([*model, f"--{name}", "1e7"], f"--{name} must be 1000000.0 or less, not 10000000.0") == 1
    assert told([*model, f"--{name}", "1e6"], f"--{name} must be 1000000.0 or less, not 1000000.0") == 0


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_never_holds_may_be_as_high_as_float32_goes(workspace: Path, model: list[str], name: str) -> None:
    assert told([*model, f"--{name}", "1e39"], f"--{name} must be 3e+38 or less, not 1e+39") == 1
    assert told([*model, f"--{name}", "1e38"], f"--{name} must be 3e+38 or less, not 1e+38") == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lr", "1.5"], "--lr must be 1 or less, not 1.5"),
        (["--lr", "1e308"], "--lr must be 1 or less, not 1e+308"),
        (["--rollout-stop-token-ids", "5", "-1"], "--rollout-stop-token-ids must be 0 or more, not -1"),
        (["--rollout-top-k", "0"], "--rollout-top-k must be 1 or more, or -1, not 0"),
        (["--adam-beta1", "1"], "--adam-beta1 must be below 1, not 1.0"),
    ],
)
def test_a_value_out_of_range_is_refused(workspace: Path, model: list[str], words: list[str], problem: str) -> None:
    assert told([*model, *words], problem) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--lr", "0"],
        ["--lr", "1"],
        ["--rollout-top-k", "-1"],
        ["--rollout-top-k", "50"],
        ["--rollout-temperature", "0"],
        ["--rollout-stop-token-ids", "0", "151645"],
        ["--start-rollout-id", "0"],
        ["--clip-grad", "0"],
        ["--clip-grad", "1e9"],
        ["--use-tis", "--tis-clip", "1e9"],
        ["--eps-clip-high", "1e9"],
        ["--max-staleness", "0", "--over-sampling-batch-size", "64"],
    ],
)
def test_what_somebody_may_want_is_right(workspace: Path, model: list[str], words: list[str]) -> None:
    resolve([*GPU_PLAN, *model, *words], {})


def test_every_number_declares_its_least_value() -> None:
    """relax-profiling checks its own: its windows depend on two options each, and -1 is the whole rollout."""
    known: dict[str, Any] = {
        field.name: field.metadata.get("range") for cls in settings_classes() for field in dataclasses.fields(cls)
    }
    numbers = {o.name for o in namespace().options.values() if o.kind.base in (int, float)}
    bare = {n for n in numbers if known[n] is None or (known[n].ge is None and known[n].gt is None)}
    assert bare == {
        # Checked against --rollout-batch-size and --lr-warmup-iters, which have a least value.
        "over_sampling_batch_size",
        "lr_decay_iters",
        # Says why it is 1 or more.
        "partial_rollout_max_aborted_count",
        "memory_snapshot_num_steps",
        "profile_step_end",
        "profile_step_start",
        "sglang_profile_num_steps",
        "sglang_profile_step_end",
        "sglang_profile_step_start",
        "sglang_profile_steps",
    }
