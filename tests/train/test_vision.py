"""Pictures in the trainer: the numbers of transformers under every layout, and rows whose pictures do not fit."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train import settings as s
from relax_train.models.architectures import model_shape
from relax_train.models.hf_mapping import SafetensorsFolder
from relax_train.models.vision import lay_out_pictures
from relax_train.models.vision.places import picture_positions
from relax_train.settings.model import read_hf_config
from tiny_vision import save_processor, vision_model

ADAM: dict[str, Any] = {"lr": 1e-2, "adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.0, "clip_grad": 1.0}
STEPS = 3
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PACKED = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 160}
CASES: dict[str, tuple[int, bool, dict[str, Any], dict[str, Any]]] = {
    "frozen": (1, False, {}, {}),
    "trained-packed": (1, True, {}, PACKED),
    "tp2-trained": (2, True, {"tensor_model_parallel_size": 2}, PACKED),
    "tp2-sp-trained": (2, True, SP, PACKED),
    "cp2-trained": (2, True, {"context_parallel_size": 2}, PACKED),
    "pp2-frozen": (2, False, {"pipeline_model_parallel_size": 2}, {}),
    "dp2-trained": (2, True, {}, PACKED),
    "tp2-sp-cp2-recompute": (
        4,
        True,
        {
            **SP,
            "context_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        PACKED,
    ),
}
SIZES = [[(56, 84)], [(28, 56), (84, 56)], [], [(112, 140)]]
"""Height and width of the pictures of each prompt; one has none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("vision")
    processor = save_processor(base)
    vision_model(processor.tokenizer).save_pretrained(base)
    return base


@pytest.fixture(scope="module")
def batches(folder: Path) -> list[TrainBatch]:
    """For each step two responses to each of the prompts."""
    from PIL import Image
    from transformers import AutoProcessor

    processor, rng = AutoProcessor.from_pretrained(folder), np.random.default_rng(5)
    prompts = []
    for i, sizes in enumerate(SIZES):
        images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
        text = "look: " + "<|vision_start|><|image_pad|><|vision_end|> and " * len(images) + "what is it?"[: 4 + i]
        found = processor(text=[text], images=images or None, return_tensors="np")
        pixels = found["pixel_values"] if images else np.zeros((0, 0), np.float32)
        prompts.append((found["input_ids"][0], pixels, found["image_grid_thw"] if images else np.zeros((0, 3), int)))

    def batch(step: int) -> TrainBatch:
        chosen = [prompts[i // 2] for i in range(8)]
        responses = [rng.integers(4, 80, rng.integers(2, 9)) for _ in chosen]
        return TrainBatch(
            rollout_id=step,
            tokens=[np.concatenate([ids, r]) for (ids, *_), r in zip(chosen, responses, strict=True)],
            response_lengths=np.array([len(r) for r in responses]),
            loss_masks=[np.ones(len(r), np.float32) for r in responses],
            rollout_log_probs=[np.full(len(r), -4.0, np.float32) for r in responses],
            rewards=rng.random(8).astype(np.float32),
            group_ids=np.arange(8) // 2,
            oldest_versions=np.full(8, step),
            names=[f"shapes.jsonl:{i // 2 + 1} response {i % 2}" for i in range(8)],
            pixel_values=[pixels for _, pixels, _ in chosen],
            image_grid_thw=[grid for *_, grid in chosen],
        )

    return [batch(i) for i in range(STEPS)]


def _log_probs(model: Any, batch: TrainBatch, i: int) -> torch.Tensor:
    """Of the response tokens, by transformers, the sample alone."""
    ids, r = torch.from_numpy(batch.tokens[i])[None], int(batch.response_lengths[i])
    more: dict[str, Any] = {}
    if len(batch.image_grid_thw[i]):
        more = {
            "pixel_values": torch.from_numpy(batch.pixel_values[i]),
            "image_grid_thw": torch.from_numpy(batch.image_grid_thw[i]),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0, -r - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, -r:, None]).squeeze(1)


@pytest.fixture(scope="module")
def oracle(folder: Path, batches: list[TrainBatch]) -> Callable[[bool], Any]:
    """Log-probs of the first batch, gradient norms and weights after all steps, with the tower trained or not."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    made: dict[bool, Any] = {}

    def get(trained: bool) -> Any:
        if trained in made:
            return made[trained]
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        model.model.visual.requires_grad_(trained)
        parameters = [p for p in model.parameters() if p.requires_grad]
        adam = torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
        with torch.no_grad():
            first = [_log_probs(model, batches[0], i).numpy() for i in range(8)]
        norms = []
        for batch in batches:
            adam.zero_grad()
            means = batch.rewards.reshape(-1, 2).mean(1).repeat(2)
            for i in range(8):
                # At the weights that sampled, the gradient of the surrogate is that of advantage x log-probability.
                (-float(batch.rewards[i] - means[i]) * _log_probs(model, batch, i).mean() / 8).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
            adam.step()
        out = folder.with_name(f"{folder.name}-{trained}")
        model.save_pretrained(out)
        made[trained] = first, norms, SafetensorsFolder(str(out))
        return made[trained]

    return get


def _settings(folder: Path, trained: bool, parallel: dict[str, Any], batch: dict[str, Any]) -> s.TrainSettings:
    return s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=str(folder), bf16=False, freeze_vision_model=not trained),
        parallel=s.ParallelSettings(**parallel),
        algorithm=s.AlgorithmSettings(disable_grpo_std_normalization=True),
        optimizer=s.OptimizerSettings(**ADAM),
        batch=s.BatchSettings(**batch),
    )


def _train(settings: s.TrainSettings, data: list[TrainBatch]) -> Any:
    from relax_train.trainer import Trainer

    trainer = Trainer(settings)
    trainer.setup()
    try:
        before = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
        log_probs = trainer.log_probs(data[0])
        norms = [trainer.train(b, version=b.rollout_id)["train/grad_norm"] for b in data]
        after = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
        pushed = [name for bucket in trainer.weight_buckets(1 << 20, frozen=False) for name in bucket.names]
        return before, log_probs, norms, after, trainer.parameter_count, pushed
    finally:
        trainer.close()


@pytest.mark.parametrize("case", CASES)
def test_three_steps(case: str, run_ranks: Any, folder: Path, batches: list[TrainBatch], oracle: Any) -> None:
    world, trained, parallel, packing = CASES[case]
    first, norms, expected = oracle(trained)
    stored = SafetensorsFolder(str(folder))
    settings = _settings(folder, trained, parallel, packing)
    for before, log_probs, got_norms, after, count, pushed in run_ranks(_train, world, settings, batches):
        assert set(before) == set(after) == set(stored.names())
        assert count == sum(t.numel() for t in before.values())
        assert all(torch.equal(t, stored.read(name)) for name, t in before.items()), "an export is bit for bit"
        for ours, theirs in zip(log_probs, first, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
        assert got_norms == pytest.approx(norms, rel=1e-3)
        for name, tensor in after.items():
            difference = float((tensor - expected.read(name)).abs().max())
            assert difference < 5e-5, f"{name} differs by {difference}"
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert any(name.startswith("visual.") for name in moved) is trained
        assert set(pushed) == {name for name in after if trained or not name.startswith("visual.")}


def _go_on(
    settings: s.TrainSettings, data: list[TrainBatch], directory: str, *, saves: bool
) -> dict[str, torch.Tensor]:
    """Weights after the second batch; the checkpoint lies before it."""
    from relax_train.trainer import Trainer

    trainer = Trainer(settings)
    trainer.setup()
    try:
        if saves:
            trainer.train(data[0], version=0)
            trainer.save(directory, 0)
        else:
            assert trainer.load(directory) is not None
        trainer.train(data[1], version=1)
        return {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
    finally:
        trainer.close()


def test_a_checkpoint_goes_on_under_another_layout(
    run_ranks: Any, folder: Path, batches: list[TrainBatch], tmp_path: Path
) -> None:
    plain = _settings(folder, True, {}, PACKED)
    expected = run_ranks(_saving, 1, plain, batches, str(tmp_path))[0]
    for parallel in (SP, {"pipeline_model_parallel_size": 2}):
        for weights in run_ranks(_loading, 2, _settings(folder, True, parallel, PACKED), batches, str(tmp_path)):
            for name, tensor in expected.items():
                difference = float((weights[name] - tensor).abs().max())
                assert difference < 5e-5, f"{name} differs by {difference} with {parallel}"


def _saving(*arguments: Any) -> dict[str, torch.Tensor]:
    return _go_on(*arguments, saves=True)


def _loading(*arguments: Any) -> dict[str, torch.Tensor]:
    return _go_on(*arguments, saves=False)


def test_pictures_that_do_not_fit_name_their_sample(folder: Path, batches: list[TrainBatch]) -> None:
    vision = model_shape(read_hf_config(str(folder))).vision
    assert vision is not None
    batch = batches[0]
    prompt = int(batch.total_lengths[0] - batch.response_lengths[0])
    tokens, grid, name = batch.tokens[0].copy(), batch.image_grid_thw[0], batch.names[0]
    tokens[np.flatnonzero(tokens == vision.image_token)[0]] = 5
    with pytest.raises(ValueError, match=r"shapes.jsonl:1 response 0: its prompt has 5 tokens of pictures"):
        picture_positions(tokens, prompt, grid, vision, name)
    other = dataclasses.replace(batch, pixel_values=[batch.pixel_values[0][:, :-1]], image_grid_thw=[grid])
    borders, row = np.array([0, len(tokens)]), [(0, batch.tokens[0], prompt, name)]
    with pytest.raises(ValueError, match="the processor of another model"):
        lay_out_pictures(other, row, borders, np.arange(len(tokens)), vision)


def test_positions_are_those_of_transformers_and_a_mark_in_the_response_is_text(
    folder: Path, batches: list[TrainBatch]
) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    vision = model_shape(read_hf_config(str(folder))).vision
    assert vision is not None
    batch = batches[0]
    for i in (0, 2, 6):
        tokens = batch.tokens[i].copy()
        prompt = int(batch.total_lengths[i] - batch.response_lengths[i])
        ids, grid = torch.from_numpy(tokens)[None], torch.from_numpy(batch.image_grid_thw[i])
        theirs, _ = model.model.get_rope_index(ids, (ids == vision.image_token).int(), grid)
        tokens[-1] = vision.image_token
        ours, marks = picture_positions(tokens, prompt, batch.image_grid_thw[i], vision, "a row")
        np.testing.assert_array_equal(ours, theirs[:, 0].numpy())
        assert marks.max() < prompt


@pytest.mark.parametrize("key", ["image_token_id", "video_token_id"])
def test_a_token_of_pictures_that_is_none_is_named(folder: Path, key: str) -> None:
    config = read_hf_config(str(folder))
    vision = model_shape(config).vision
    assert vision is not None
    assert (vision.image_token, vision.video_token) == (config["image_token_id"], config["video_token_id"])
    with pytest.raises(ValueError, match=rf"{key} .*'four'"):
        model_shape({**config, key: "four"})
