"""What a training step does beside its arithmetic: phases, skipped steps, the reference's weights, grouping."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train import settings as s

RunRanks = Callable[..., list[Any]]


def make_batch(rollout_id: int = 0, vocab: int = 96, n: int = 8) -> TrainBatch:
    rng = np.random.default_rng(rollout_id)
    prompts, responses = rng.integers(2, 9, n), rng.integers(1, 15, n)
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[rng.integers(0, vocab, p + r) for p, r in zip(prompts, responses, strict=True)],
        response_lengths=responses,
        loss_masks=[np.ones(r, np.float32) for r in responses],
        rollout_log_probs=[(-rng.random(r) - 3).astype(np.float32) for r in responses],
        rewards=rng.random(n).astype(np.float32),
        group_ids=np.arange(n) // 4,
        oldest_versions=np.zeros(n, np.int64),
        names=[f"row:{i}" for i in range(n)],
    )


def make_trainer(
    folder: Path,
    *,
    ref: Path | None = None,
    observer: Any = None,
    always_log_probs: bool = False,
    **flags: dict[str, Any],
) -> Any:
    """A trainer that is set up; keyword arguments are the flags of ``algorithm``, ``batch`` and ``optimizer``."""
    from relax_train.trainer import Trainer

    settings = s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=str(folder), ref_load=str(ref) if ref else None, bf16=False),
        algorithm=s.AlgorithmSettings(**flags.get("algorithm", {})),
        optimizer=s.OptimizerSettings(**{"lr": 1e-3, "adam_eps": 1e-3, **flags.get("optimizer", {})}),
        batch=s.BatchSettings(**flags.get("batch", {})),
    )
    trainer = Trainer(settings, observer=observer, always_log_probs=always_log_probs)
    trainer.setup()
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[n] - b[n]).abs().max().item() for n in a)


class Recorder:
    """An observer that writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []

    def before_model(self) -> None:
        self.events.append(("model", "", -1))

    @contextlib.contextmanager
    def phase(self, name: str, offset: int) -> Iterator[None]:
        self.events.append(("enter", name, offset))
        try:
            yield
        finally:
            self.events.append(("leave", name, offset))

    def close(self) -> None:
        self.events.append(("close", "", -1))


def _observe(folder: Path) -> list[tuple[str, str, int]]:
    recorder = Recorder()
    trainer = make_trainer(folder, observer=recorder)
    trainer.train(make_batch(40), version=40)
    bad = make_batch(41)
    bad.rewards[1] = float("nan")
    with pytest.raises(ValueError, match="row:1: its reward is nan"):
        trainer.train(bad, version=41)
    trainer.close()
    return recorder.events


def test_the_observer_sees_nested_phases_counted_from_this_launch(reference: Any, run_ranks: RunRanks) -> None:
    [events] = run_ranks(_observe, 1, reference("qwen3").folder)
    step = [
        ("enter", "train_overall", 0),
        ("enter", "train_log_probs", 0),
        ("leave", "train_log_probs", 0),
        ("enter", "train_actor", 0),
        ("leave", "train_actor", 0),
        ("leave", "train_overall", 0),
    ]
    assert events[0] == ("model", "", -1)
    assert events[1:7] == step
    # A step that fails leaves every phase it entered.
    assert events[7:-1] == [
        ("enter", "train_overall", 1),
        ("enter", "train_log_probs", 1),
        ("leave", "train_log_probs", 1),
        ("leave", "train_overall", 1),
    ]
    assert events[-1] == ("close", "", -1)


def _break_gradient(folder: Path) -> dict[str, Any]:
    trainer = make_trainer(folder)
    before = weights_of(trainer)
    bad = make_batch()
    bad.rollout_log_probs[0][:] = -1.0
    gradient = trainer._forward_backward.gradient

    def broken(*args: Any) -> dict[str, float]:
        metrics = gradient(*args)
        parameter = next(trainer.model.gpt[0].parameters())
        parameter.main_grad[0, 0] = float("inf")
        return metrics

    trainer._forward_backward.gradient = broken
    skipped = [trainer.train(bad, version=0) for _ in range(2)]
    after_skips = weights_of(trainer)
    trainer._forward_backward.gradient = gradient
    good = trainer.train(make_batch(), version=0)
    moved = weights_of(trainer)
    trainer._forward_backward.gradient = broken
    error = ""
    for _ in range(3):
        try:
            trainer.train(bad, version=0)
        except FloatingPointError as e:
            error = str(e)
    unchanged = largest_difference(moved, weights_of(trainer))
    trainer.close()
    return {
        "skipped": [m["train/skipped_steps"] for m in skipped],
        "after_skips": largest_difference(before, after_skips),
        "good": good["train/skipped_steps"],
        "moved": largest_difference(before, moved),
        "error": error,
        "unchanged": unchanged,
    }


@pytest.mark.parametrize("world", [1, 2])
def test_a_gradient_that_is_not_finite_is_skipped_and_stops_training_in_the_end(
    reference: Any, run_ranks: RunRanks, world: int
) -> None:
    for found in run_ranks(_break_gradient, world, reference("qwen3").folder):
        assert found["skipped"] == [1, 1]
        assert found["after_skips"] == 0
        assert found["good"] == 0
        assert found["moved"] > 1e-5
        assert "gradient of 3 optimizer steps in a row was not finite (rollout 0" in found["error"]
        assert found["unchanged"] == 0


def _use_reference(folder: Path, ref: Path | None) -> dict[str, Any]:
    trainer = make_trainer(folder, ref=ref, algorithm={"use_kl_loss": True, "kl_loss_coef": 0.1})
    start = weights_of(trainer)
    first = trainer.log_probs(make_batch())
    with trainer._reference.put_in():
        inside = weights_of(trainer)
        of_reference = trainer.log_probs(make_batch())
    restored = largest_difference(start, weights_of(trainer))
    with contextlib.suppress(RuntimeError), trainer._reference.put_in():
        raise RuntimeError
    restored = max(restored, largest_difference(start, weights_of(trainer)))
    one = trainer.train(make_batch(), version=0)
    two = trainer.train(make_batch(), version=0)
    with trainer._reference.put_in():
        later = weights_of(trainer)
    trainer.close()
    return {
        "restored": restored,
        "reference_moved": largest_difference(inside, later),
        "kl": (one["train/kl_ref"], two["train/kl_ref"]),
        "log_probs": (first, of_reference),
        "phases": sorted(k for k in one if k.startswith("time/")),
    }


def test_the_reference_is_the_start_weights_and_stays(reference: Any, run_ranks: RunRanks) -> None:
    [found] = run_ranks(_use_reference, 1, reference("qwen3").folder, None)
    assert found["restored"] == found["reference_moved"] == 0
    assert found["kl"][0] == 0
    assert found["kl"][1] > 0
    assert all(np.array_equal(a, b) for a, b in zip(*found["log_probs"], strict=True))
    assert found["phases"] == ["time/fetch", "time/ref_log_probs", "time/train"]


def test_the_reference_may_be_another_model(reference: Any, run_ranks: RunRanks) -> None:
    [found] = run_ranks(_use_reference, 1, reference("qwen3").folder, reference("qwen3").after)
    assert found["restored"] == found["reference_moved"] == 0
    assert found["kl"][0] > 0
    assert not all(np.allclose(a, b) for a, b in zip(*found["log_probs"], strict=True))


@pytest.mark.parametrize(
    ("key", "value"), [("rms_norm_eps", 1e-3), ("tie_word_embeddings", False), ("rope_theta", 5e5)]
)
def test_a_reference_of_another_architecture_is_refused(
    reference: Any, run_ranks: RunRanks, tmp_path: Path, key: str, value: Any
) -> None:
    """Its weights would load, and give other log-probs than the model they are from."""
    shutil.copytree(reference("qwen3").after, tmp_path / "ref")
    config = json.loads((tmp_path / "ref" / "config.json").read_text())
    if key == "rope_theta":
        config["rope_parameters"][key] = value
    else:
        config[key] = value
    (tmp_path / "ref" / "config.json").write_text(json.dumps(config))
    [message] = run_ranks(_refused_reference, 1, reference("qwen3").folder, tmp_path / "ref")
    assert message.startswith("--ref-load: ")
    assert f"{key} {value!r} instead of" in message


def _refused_reference(folder: Path, ref: Path) -> str:
    try:
        make_trainer(folder, ref=ref, algorithm={"kl_coef": 0.1})
    except ValueError as error:
        return str(error)
    return "no error"


def _short_rollout(folder: Path) -> Any:
    trainer = make_trainer(folder, batch={"global_batch_size": 4, "num_steps_per_rollout": 2})
    metrics = trainer.train(make_batch().select(range(6)), version=0)
    weights = weights_of(trainer)
    trainer.close()
    return metrics, weights


def test_a_rollout_that_the_epoch_cuts_short_is_trained_whole(reference: Any, run_ranks: RunRanks) -> None:
    folder = reference("qwen3").folder
    [(metrics, weights)] = run_ranks(_short_rollout, 1, folder)
    assert (metrics["train/steps"], metrics["train/samples"]) == (2, 6)
    assert metrics["train/tokens"] == make_batch().response_lengths[:6].sum()
    for _, other in run_ranks(_short_rollout, 3, folder):
        assert largest_difference(weights, other) < 1e-6


def _load_twice(folder: Path, checkpoints: Path) -> Any:
    trainer = make_trainer(folder, optimizer={"lr_decay_style": "linear", "lr_decay_iters": 10})
    rates = []
    trainer.train(make_batch(0), version=0)
    trainer.save(str(checkpoints), 0)
    for _ in range(2):
        rates.append([trainer.train(make_batch(i), version=i)["train/lr"] for i in (1, 2)])
        trainer.load(str(checkpoints))
    trainer.close()
    return rates


def test_loading_takes_the_schedule_back_too(reference: Any, run_ranks: RunRanks, tmp_path: Path) -> None:
    [(first, second)] = run_ranks(_load_twice, 1, reference("qwen3").folder, tmp_path)
    assert first == second == pytest.approx([0.9e-3, 0.8e-3])


GROUPINGS: list[dict[str, Any]] = [
    {"micro_batch_size": 8},
    {"micro_batch_size": 1},
    {"micro_batch_size": 3, "balance_data": True},
    {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 24},
    {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 400, "log_probs_max_tokens_per_gpu": 30},
]


def _log_prob_pass(folder: Path, always: bool) -> Any:
    trainer = make_trainer(folder, always_log_probs=always)
    metrics = trainer.train(make_batch(), version=0)
    weights = weights_of(trainer)
    trainer.close()
    return metrics, weights


def test_the_log_prob_pass_is_run_where_it_is_asked_for_and_changes_nothing(
    reference: Any, run_ranks: RunRanks
) -> None:
    folder = reference("qwen3").folder
    [(with_pass, weights)] = run_ranks(_log_prob_pass, 1, folder, True)
    [(without, expected)] = run_ranks(_log_prob_pass, 1, folder, False)
    assert "time/log_probs" in with_pass
    assert "time/log_probs" not in without
    assert largest_difference(weights, expected) == 0


def _group(folder: Path, batch_flags: dict[str, Any], optimizer: dict[str, Any]) -> Any:
    trainer = make_trainer(folder, batch=batch_flags, optimizer=optimizer)
    log_probs = trainer.log_probs(make_batch())
    metrics = trainer.train(make_batch(), version=0)
    weights = weights_of(trainer)
    trainer.close()
    return log_probs, metrics, weights


@pytest.mark.parametrize("world", [1, 3])
def test_grouping_changes_neither_log_probs_nor_the_step(reference: Any, run_ranks: RunRanks, world: int) -> None:
    folder = reference("qwen3").folder
    [(log_probs, metrics, weights)] = run_ranks(_group, 1, folder, GROUPINGS[0], {})
    for grouping in GROUPINGS[1:] if world == 1 else GROUPINGS[2:4]:
        for other_log_probs, other_metrics, other_weights in run_ranks(_group, world, folder, grouping, {}):
            for a, b in zip(log_probs, other_log_probs, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
            for name in ("loss", "grad_norm", "entropy", "logprob_diff_mean", "logprob_diff_max", "tokens"):
                assert metrics[f"train/{name}"] == pytest.approx(other_metrics[f"train/{name}"], abs=1e-5), name
            assert largest_difference(weights, other_weights) < 1e-6


def test_fewer_samples_than_ranks(reference: Any, run_ranks: RunRanks) -> None:
    """A rank without a sample takes part with a row that trains nothing."""
    folder = reference("qwen3").folder
    [(_, _, weights)] = run_ranks(_one_sample, 1, folder)
    for log_probs, metrics, other in run_ranks(_one_sample, 3, folder):
        assert len(log_probs) == 2
        assert metrics["train/samples"] == 2
        assert largest_difference(weights, other) < 1e-6


def _one_sample(folder: Path) -> Any:
    trainer = make_trainer(folder)
    batch = make_batch(n=2)
    result = trainer.log_probs(batch), trainer.train(batch, version=0), weights_of(trainer)
    trainer.close()
    return result


def test_the_log_prob_metrics_compare_trainer_and_engine(reference: Any, run_ranks: RunRanks) -> None:
    [(log_probs, metrics, _)] = run_ranks(_group, 1, reference("qwen3").folder, {}, {})
    batch = make_batch()
    gaps = np.concatenate([np.abs(a - b) for a, b in zip(log_probs, batch.rollout_log_probs, strict=True)])
    assert metrics["train/logprob_diff_mean"] == pytest.approx(gaps.mean(), abs=1e-5)
    assert metrics["train/logprob_diff_max"] == pytest.approx(gaps.max(), abs=1e-5)
    assert metrics["train/ratio_mean"] == 1
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/tokens"] == len(gaps)


def test_an_empty_rollout_says_so(reference: Any, run_ranks: RunRanks) -> None:
    [message] = run_ranks(_empty, 1, reference("qwen3").folder)
    assert message == "rollout 0 has no samples: there is nothing to train on"


def _empty(folder: Path) -> str:
    trainer = make_trainer(folder)
    try:
        trainer.train(make_batch(n=1).select([]), version=0)
    except ValueError as error:
        return str(error)
    finally:
        trainer.close()
    return "no error"


def test_parameters_are_counted_once(reference: Any, run_ranks: RunRanks) -> None:
    from safetensors import safe_open

    for kind in ("qwen3", "qwen2"):
        folder = reference(kind).folder
        with safe_open(folder / "model.safetensors", "pt") as file:
            expected = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
        for parallel in ({}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
            padding = 32 if kind == "qwen2" and "tensor_model_parallel_size" in parallel else 0
            for count in run_ranks(_count, 2, folder, parallel):
                # The vocabulary of 97 is padded to 98 by tensor parallelism, in embedding and output.
                assert count == expected + 2 * padding


def _count(folder: Path, parallel: dict[str, Any]) -> int:
    from relax_train.trainer import Trainer

    settings = s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=str(folder), bf16=False), parallel=s.ParallelSettings(**parallel)
    )
    trainer = Trainer(dataclasses.replace(settings))
    trainer.setup()
    count = trainer.parameter_count
    trainer.close()
    return int(count)
