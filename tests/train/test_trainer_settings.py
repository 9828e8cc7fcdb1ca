"""Flags of algorithm, optimizer and batching: what is wrong is said, with the flag and the fix."""

from typing import Any

import pytest
from relax_train.settings import AlgorithmSettings, BatchSettings, OptimizerSettings


def problems(kind: type, **flags: Any) -> list[str]:
    found: list[str] = kind(**flags).problems(frozenset(flags))
    return found


@pytest.mark.parametrize("kind", [AlgorithmSettings, BatchSettings, OptimizerSettings])
def test_the_defaults_are_fine(kind: type) -> None:
    assert problems(kind) == []


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        (AlgorithmSettings, {"eps_clip": 1.0}, "--eps-clip must be below 1, not 1.0"),
        (AlgorithmSettings, {"eps_clip_high": -0.1}, "--eps-clip-high must be above 0, not -0.1"),
        (AlgorithmSettings, {"entropy_coef": -1.0}, "--entropy-coef must be 0 or more, not -1.0"),
        (AlgorithmSettings, {"use_tis": True, "tis_clip": 0.0}, "--tis-clip must be above 0, not 0.0"),
        (AlgorithmSettings, {"tis_clip": 3.0}, "--tis-clip has no effect without --use-tis"),
        (AlgorithmSettings, {"kl_loss_coef": 0.1}, "--kl-loss-coef has no effect without --use-kl-loss"),
        (AlgorithmSettings, {"kl_loss_type": "k2"}, "--kl-loss-type has no effect without --use-kl-loss"),
        (AlgorithmSettings, {"use_kl_loss": True}, "--use-kl-loss has no effect with the default --kl-loss-coef 0"),
        (
            AlgorithmSettings,
            {"advantage_estimator": "gropo"},
            "--advantage-estimator 'gropo' is none of grpo, rloo, .*, nor of the form module.*; did you mean 'grpo'",
        ),
        (AlgorithmSettings, {"advantage_estimator": "missing_module:f"}, "there is no module 'missing_module'"),
        (AlgorithmSettings, {"loss_type": "clp"}, "--loss-type 'clp' is none of clip, cispo, nor.*did you mean 'clip'"),
        (AlgorithmSettings, {"loss_type": "missing_module:f"}, "--loss-type .* there is no module 'missing_module'"),
        *(
            (
                AlgorithmSettings,
                {"advantage_estimator": name, "disable_grpo_std_normalization": True},
                f"--disable-grpo-std-normalization has no effect with --advantage-estimator {name}.* use grpo or gspo",
            )
            for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        ),
        *(
            (
                AlgorithmSettings,
                {"advantage_estimator": name, "normalize_advantages": True},
                f"--normalize-advantages has no effect with --advantage-estimator {name}",
            )
            for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
        ),
        (
            AlgorithmSettings,
            {"advantage_estimator": "gspo", "loss_type": "cispo"},
            "--loss-type cispo clips the ratio of a token, and --advantage-estimator gspo has one ratio for a whole",
        ),
        (OptimizerSettings, {"lr": -1.0}, "--lr must be 0 or more, not -1.0"),
        (OptimizerSettings, {"min_lr": 0.0}, "--min-lr has no effect with --lr-decay-style constant"),
        (OptimizerSettings, {"lr_decay_style": "cosine", "min_lr": 1.0}, "--min-lr 1.0 must lie between 0 and --lr"),
        (
            OptimizerSettings,
            {"lr_decay_style": "linear", "lr_warmup_iters": 5, "lr_decay_iters": 5},
            "--lr-decay-iters 5 must be greater than --lr-warmup-iters 5",
        ),
        (OptimizerSettings, {"adam_beta2": 1.0}, "--adam-beta2 must be below 1, not 1.0"),
        (OptimizerSettings, {"clip_grad": -1.0}, "--clip-grad must be 0 or more, not -1.0"),
        (BatchSettings, {"use_dynamic_batch_size": True}, "--use-dynamic-batch-size needs --max-tokens-per-gpu"),
        (BatchSettings, {"max_tokens_per_gpu": 9}, "--max-tokens-per-gpu has no effect without --use-dynamic-batch-si"),
        (
            BatchSettings,
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "micro_batch_size": 1},
            "--micro-batch-size has no effect with --use-dynamic-batch-size",
        ),
        (BatchSettings, {"global_batch_size": 0}, "--global-batch-size must be 1 or more, not 0"),
    ],
)
def test_each_problem_names_flag_and_fix(kind: type, flags: dict[str, Any], message: str) -> None:
    found = problems(kind, **flags)
    assert len(found) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[0])


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(AlgorithmSettings, eps_clip=2.0, eps_clip_high=-1.0, tis_clip=-1.0)) == 4


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_estimator": "gspo", "disable_grpo_std_normalization": True, "normalize_advantages": True},
        {"advantage_estimator": "rloo", "normalize_advantages": True, "kl_coef": 0.1, "loss_type": "cispo"},
        {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "use_kl_loss": True, "kl_loss_coef": 0.1},
        {"advantage_estimator": "json:dumps", "disable_grpo_std_normalization": True, "normalize_advantages": True},
        {"advantage_estimator": "gspo", "loss_type": "json:dumps"},
    ],
)
def test_combinations_that_mean_something(flags: dict[str, Any]) -> None:
    assert problems(AlgorithmSettings, **flags) == []


def test_only_gspo_has_the_ratio_of_a_response() -> None:
    assert AlgorithmSettings(advantage_estimator="gspo").sequence_ratio
    assert not AlgorithmSettings().sequence_ratio
    assert not AlgorithmSettings(advantage_estimator="json:dumps").sequence_ratio


def test_a_kl_loss_of_weight_zero_that_was_asked_for_needs_no_reference() -> None:
    assert problems(AlgorithmSettings, use_kl_loss=True, kl_loss_coef=0.0) == []
    assert not AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.0).needs_reference
    assert AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1).needs_reference
    assert AlgorithmSettings(kl_coef=0.1).needs_reference


def test_forward_only_passes_take_the_training_cap_unless_they_have_their_own() -> None:
    assert BatchSettings(max_tokens_per_gpu=8).log_probs_cap == 8
    assert BatchSettings(max_tokens_per_gpu=8, log_probs_max_tokens_per_gpu=32).log_probs_cap == 32
