"""Partial rollout and staleness on the command line: what is refused, with the numbers; what is derived; the plan."""

from pathlib import Path

import pytest
from relax_cli.checks.plan import plan_text
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_cli.main import main

SURPLUS = ["--partial-rollout", "--over-sampling-batch-size", "64"]
KEEP = "--no-recompute-kv-cache-after-weight-updates"
MOST = "--rollout-batch-size 32 x (--max-staleness 1 + 1) = 64"
ON_POLICY = "--rollout-batch-size 32 x (--max-staleness 0 + 1) = 32"
LEAVE_OUT = "or remove --partial-rollout"


def plan(words: list[str]) -> dict[str, str]:
    """The rows of the plan that have a name of their own."""
    rows = [line.strip().split("  ", 1) for line in plan_text(resolve([*words, "--dry-run"], {})).splitlines()]
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        # Nothing would ever be interrupted.
        (["--partial-rollout"], ["waits for all its prompts", f"at most {MOST}", LEAVE_OUT]),
        (["--partial-rollout", "--over-sampling-batch-size", "32"], ["no effect without over-sampling", MOST]),
        (["--partial-rollout", "--max-staleness", "0"], [ON_POLICY, "raise --max-staleness to 1 or more", LEAVE_OUT]),
        (["--partial-rollout", "--max-staleness", "3"], ["(--max-staleness 3 + 1) = 128"]),
        # More than the bound allows.
        (
            ["--partial-rollout", "--over-sampling-batch-size", "65"],
            ["--over-sampling-batch-size 65 is more than", MOST, "lower it to 64, or raise --max-staleness to 2"],
        ),
        ([*SURPLUS, "--max-staleness", "0"], [ON_POLICY, "allows: raise --max-staleness to 1"]),
        ([*SURPLUS, "--rollout-batch-size", "12"], ["12 x (--max-staleness 1 + 1) = 24", "--max-staleness to 5"]),
        (["--fully-async", "--over-sampling-batch-size", "65"], [MOST, "lower it to 64"]),
        (["--fully-async", "--no-partial-rollout", "--over-sampling-batch-size", "65"], [MOST, "lower it to 64"]),
        (
            ["--fully-async", "--max-staleness", "0", "--over-sampling-batch-size", "33"],
            [ON_POLICY, "lower it to 32, or raise --max-staleness to 1"],
        ),
        # Without effect, or never right.
        ([*SURPLUS, "--partial-rollout-max-aborted-count", "0"], ["must be 1 or more, not 0", "no sample would ever"]),
        (["--partial-rollout-max-aborted-count", "2"], ["has no effect without --partial-rollout; add that"]),
        (["--mask-offpolicy-in-partial-rollout"], ["has no effect without --partial-rollout; add that"]),
        (
            ["--fully-async", "--no-partial-rollout", "--mask-offpolicy-in-partial-rollout"],
            ["--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout"],
        ),
        (
            ["--fully-async", "--max-staleness", "0", "--mask-offpolicy-in-partial-rollout"],
            ["--mask-offpolicy-in-partial-rollout has no effect with --max-staleness 0", "raise --max-staleness to 1"],
        ),
        (
            ["--fully-async", "--max-staleness", "0", "--partial-rollout-max-aborted-count", "2"],
            ["--partial-rollout-max-aborted-count has no effect with --max-staleness 0", "remove it"],
        ),
        ([*SURPLUS, KEEP], [f"{KEEP} has no effect with --colocate", "remove it"]),
        (["--fully-async", "--max-staleness", "0", KEEP], [f"{KEEP} has no effect without", "--max-staleness of 1"]),
        (["--fully-async", "--no-partial-rollout", KEEP], [f"{KEEP} has no effect without --partial-rollout"]),
        (
            ["--fully-async", KEEP, "--sglang-disable-radix-cache"],
            [f"{KEEP} has no effect with --sglang-disable-radix-cache", "remove one"],
        ),
        (["--max-staleness", "2"], ["--max-staleness has no effect without --fully-async or over-sampling"]),
        (
            [*SURPLUS, "--debug-train-only", "--load-debug-rollout-data", "s{rollout_id}"],
            ["--partial-rollout without effect: --debug-train-only generates nothing"],
        ),
        (
            ["--partial-rollout", "--rollout-function-path", "json:dumps", "--over-sampling-batch-size", "64"],
            ["--over-sampling-batch-size has no effect with --rollout-function-path"],
        ),
    ],
)
def test_refused_with_the_numbers_and_the_fix(
    workspace: Path, start: list[str], words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([*start, *words, "--dry-run"], {})
    (found,) = caught.value.problems
    assert [part for part in parts if part not in found] == [], found
    assert main(["train", *start, *words, "--dry-run"]) == 2
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        SURPLUS,
        [*SURPLUS, "--partial-rollout-max-aborted-count", "1", "--mask-offpolicy-in-partial-rollout"],
        ["--partial-rollout", "--over-sampling-batch-size", "33"],
        ["--partial-rollout", "--over-sampling-batch-size", "160", "--max-staleness", "4"],
        [*SURPLUS, "--debug-rollout-only"],
        ["--partial-rollout", "--rollout-function-path", "json:dumps"],
        ["--partial-rollout", "--rollout-function-path", "json:dumps", "--max-staleness", "0"],
        # Without partial rollout what is over starts again, however much it is.
        ["--over-sampling-batch-size", "999"],
        ["--over-sampling-batch-size", "64", "--max-staleness", "0"],
    ],
)
def test_starts(workspace: Path, start: list[str], words: list[str]) -> None:
    assert resolve([*start, *words], {}).warnings == ()


def test_fully_async_keeps_tokens_and_fills_the_bound(workspace: Path, start: list[str]) -> None:
    def settings(*words: str) -> tuple[bool, int | None]:
        rollout = resolve([*start, "--dry-run", *words], {}).rollout
        return rollout.partial_rollout, rollout.over_sampling_batch_size

    assert settings() == (False, 32)
    assert settings("--fully-async") == (True, 64)
    assert settings("--fully-async", "--max-staleness", "0") == (True, 32)
    assert settings("--fully-async", "--max-staleness", "4", "--over-sampling-batch-size", "48") == (True, 48)
    assert settings("--fully-async", "--no-partial-rollout") == (False, 64)
    assert settings("--fully-async", "--max-staleness", str(2**31 - 1)) == (True, 2**31 - 1)
    async_run = resolve([*start, "--dry-run", "--fully-async"], {})
    assert not async_run.given & {"partial_rollout", "over_sampling_batch_size"}


def test_pushes_that_wait_are_warned_of(workspace: Path, start: list[str]) -> None:
    begin = [*start, "--dry-run", "--fully-async", "--use-tis"]
    (warning,) = resolve([*begin, "--no-partial-rollout"], {}).warnings
    assert warning.startswith("--no-partial-rollout with --fully-async: each push of weights waits")
    assert resolve(begin, {}).warnings == ()


def test_old_tokens_without_a_correction_are_warned_of(workspace: Path, start: list[str]) -> None:
    begin = [*start, "--fully-async"]
    (warning,) = resolve(begin, {}).warnings
    assert warning.startswith("--fully-async with --max-staleness 1 trains on tokens of older weights as if")
    assert resolve([*begin, "--max-staleness", "0"], {}).warnings == ()
    (warning,) = resolve([*begin, "--use-tis", "--num-steps-per-rollout", "4"], {}).warnings
    assert warning.startswith("--fully-async with 4 optimizer steps a rollout: --max-staleness counts pushes")


def test_the_plan_says_what_is_open_and_how_old_it_may_become(workspace: Path, start: list[str]) -> None:
    names = ("over-sampling", "staleness", "interruptions", "not trained on")

    def rows(*words: str) -> list[str | None]:
        found = plan([*start, *words])
        return [found.get(name) for name in names]

    bound = "at most 1 version(s) (--max-staleness)"
    assert rows() == [None] * 4
    assert rows(*SURPLUS) == [
        "64 prompts open at once (at most 32 x (1 + 1) = 64): the first 32 groups are used; interrupted samples keep "
        "their tokens (--partial-rollout)",
        bound,
        None,
        None,
    ]
    assert rows("--over-sampling-batch-size", "99")[:2] == [
        "99 prompts open at once: the first 32 groups are used; interrupted samples start again",
        bound,
    ]
    assert rows("--fully-async", "--partial-rollout-max-aborted-count", "1")[:3] == [
        "64 prompts open at once (at most 32 x (1 + 1) = 64): a step takes the 32 groups with the earliest deadlines; "
        "samples keep their tokens over a push of weights (--partial-rollout)",
        bound,
        "a sample interrupted once is waited for (--partial-rollout-max-aborted-count)",
    ]
    assert "samples keep their tokens, keys and values over a push" in str(rows("--fully-async", KEEP)[0])
    assert rows("--fully-async", "--no-partial-rollout")[0] == (
        "64 prompts open at once (at most 32 x (1 + 1) = 64): a step takes the 32 groups with the earliest deadlines; "
        "a push waits for all that run"
    )
    assert rows(*SURPLUS, "--partial-rollout-max-aborted-count", "3", "--mask-offpolicy-in-partial-rollout")[2:] == [
        "a sample interrupted 3 times is waited for (--partial-rollout-max-aborted-count)",
        "tokens older than the weights that finished their sample (--mask-offpolicy-in-partial-rollout)",
    ]
    assert rows("--partial-rollout", "--rollout-function-path", "json:dumps") == [None, bound, None, None]
