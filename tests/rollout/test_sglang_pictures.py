"""Pictures on a real SGLang server: log-probs are those of transformers, after pushes and behind a seam too."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.multimodal import ProcessorPool
from relax_data.prompts.open import open_prompts
from relax_data.settings import DataSettings
from relax_data.types import Prompt, Sample
from relax_data.weights import Bucket
from relax_rollout.engines.base import SamplingParams
from relax_rollout.engines.router import EngineRouter
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.generation.generate import GenerationContext
from relax_rollout.weight_sync import push
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.value import SendValues
from tiny_models import disturb

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    """One prompt with a picture, one with two, one with none."""
    from PIL import Image
    from tiny_vision import media_tokens, save_processor

    save_processor(tmp_path)
    rng = np.random.default_rng(0)
    for i, size in enumerate([(56, 84), (100, 60), (30, 90)]):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    rows: list[tuple[str, list[int]]] = [("what is <image>?", [0]), ("<image> or <image>?", [1, 2]), ("what?", [])]
    lines = [{"input": text, "images": [str(tmp_path / f"{i}.png") for i in images]} for text, images in rows]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, lines)))
    settings = DataSettings(prompt_data=(str(data),), apply_chat_template=True, multimodal_keys={"image": "images"})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with ProcessorPool(str(tmp_path)) as pool:
        return open_prompts(
            settings, tokenizer, processor=pool, num_epoch=1, media_tokens=media_tokens(tokenizer)
        ).next(3)


@torch.no_grad()
def largest_error(model: Any, sample: Sample) -> float:
    ids, features = torch.tensor([sample.prompt.input_ids + sample.tokens]), sample.prompt.features
    more = {}
    if features:
        marks = (ids == model.config.image_token_id).int()
        marks[:, len(sample.prompt.input_ids) :] = 0
        more = {name: torch.from_numpy(features[name]) for name in ("pixel_values", "image_grid_thw")}
        more["mm_token_type_ids"] = marks
    expected = torch.log_softmax(model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0], -1)
    first = len(sample.prompt.input_ids) - 1
    columns = enumerate(zip(sample.tokens, sample.log_probs, sample.loss_mask, strict=True))
    return max(abs(float(expected[first + i, token]) - given) for i, (token, given, sampled) in columns if sampled)


def seeing(prompt: Prompt, marks: list[str]) -> Sample:
    """A response that begins with these marks, which nobody holds back from the engine."""
    from tiny_vision import vision_tokenizer

    tokens = [vision_tokenizer().encode(mark, add_special_tokens=False)[0] for mark in marks]
    features = {name: array for name, array in prompt.features.items() if name != "media_tokens"}
    sample = Sample(dataclasses.replace(prompt, features=features), 0)
    sample.append(tokens, [0.0] * len(tokens), 2, loss_mask=0)
    return sample


def exported(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Its tensors under the names of the checkpoint, which are SGLang's."""
    places = {"model.visual.": "visual.", "model.language_model.": "model."}
    found = []
    for name, tensor in model.state_dict().items():
        place = next((place for place in places if name.startswith(place)), None)
        found.append((name if place is None else places[place] + name.removeprefix(place), tensor))
    return found


def test_log_probs_are_those_of_transformers(
    prompts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_vision import vision_model
    from transformers import AutoTokenizer

    monkeypatch.setenv("SGLANG_VLM_CACHE_SIZE_MB", "0")  # as for a tower that is trained
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = vision_model(tokenizer).eval()
    model.save_pretrained(tmp_path)
    server = SGLangServer(
        SGLangSettings(),
        model_path=tmp_path,
        name="engine0",
        log_path=tmp_path / "engine0.log",
        device="cpu",
        dtype="float32",
    )

    async def compare() -> list[float]:
        engine, errors = SGLangEngine.at(server.address), []
        for version in range(3):
            if version:
                disturb(model)
                bucket = Bucket.of(exported(model))
                await asyncio.to_thread(
                    push.push_weights, [engine], [bucket], version, send=SendValues(), ranks=OneRank()
                )
            context = GenerationContext(
                EngineRouter([engine], 4),
                sampling=SamplingParams(max_new_tokens=16, temperature=0),
                max_context_len=None,
                tokenizer=tokenizer,
                version=version,
                label="test",
            )
            for prompt in prompts:
                sample = Sample(prompt, 0)
                await context.extend(sample, max_new_tokens=6, ignore_eos=True)
                context.continue_from(sample)
                await context.extend(sample, ignore_eos=True)
                assert len(sample.tokens) == 16
                assert set(sample.versions) == {version}
                errors.append(largest_error(model, sample))
        sample = seeing(prompts[0], ["<|vision_start|>", "<|vision_end|>"])
        await context.extend(sample, max_new_tokens=4, ignore_eos=True)
        errors.append(largest_error(model, sample))
        with pytest.raises(ValueError, match="engine0"):  # the mark of a further picture it would never answer
            await context.extend(seeing(prompts[0], ["<|video_pad|>"]), max_new_tokens=1)
        await engine.close()
        return errors

    server.start(deadline_s=580)
    try:
        errors = asyncio.run(compare())
    finally:
        server.stop()
    assert max(errors) < 1e-4, errors
