"""Every family and every scaling of positions: a real SGLang server computes what transformers does, after a push too.

The trainer is held to transformers in ``tests/train``; here the engine is, with models whose scaling acts on short
texts. Two cases stand in ``tests/cli/test_e2e_models.py``, where a run holds the engine to the trainer after each push:
Llama with the scaling of llama3, and Qwen3-MoE without any.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_data.weights import Bucket
from relax_rollout.engines.base import GenerateRequest, GenerateResult, SamplingParams
from relax_rollout.engines.sglang.client import SGLangEngine
from relax_rollout.engines.sglang.server import SGLangServer
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.weight_sync import push
from relax_rollout.weight_sync.ranks import OneRank
from relax_rollout.weight_sync.value import SendValues
from tiny_models import disturb

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

ORIGINAL, FACTOR = 64, 4.0
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": FACTOR},
    "yarn": {"factor": FACTOR, "original_max_position_embeddings": ORIGINAL},
}
CASES = [
    ("Llama", "linear"),
    ("Qwen2", "yarn"),
    ("Qwen3", "yarn"),
    ("Qwen3Moe", "yarn"),
]
PROMPT = [10 + i % 100 for i in range(ORIGINAL)]
NEW = 100
"""Tokens of a response: with the prompt more than the model had before its positions were scaled."""


def make_model(family: str, scaling: str, folder: Path) -> Any:
    from tiny_models import SHAPE, random_model

    # Of linear scaling this is the length before, of the others the length after it.
    options = SHAPE | {
        "max_position_embeddings": ORIGINAL if scaling == "linear" else int(ORIGINAL * FACTOR),
        "tie_word_embeddings": family == "Qwen3",
        "rope_parameters": {"rope_type": scaling, "rope_theta": 1e4, **SCALINGS[scaling]},
    }
    if family == "Qwen2":
        del options["head_dim"]
    if family == "Qwen3Moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    model = random_model(family, options)
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, SGLangServer]]:
    """A model, and a server of its own that started with it."""
    from char_tokenizer import char_tokenizer

    family, scaling = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{scaling}")
    char_tokenizer().save_pretrained(folder)
    model = make_model(family, scaling, folder)
    server = SGLangServer(
        SGLangSettings(),
        model_path=folder,
        name="engine0",
        log_path=folder / "engine0.log",
        device="cpu",
        dtype="float32",
    )
    server.start(deadline_s=580)
    try:
        yield model, server
    finally:
        server.stop()


@torch.no_grad()
def largest_error(model: Any, result: GenerateResult) -> float:
    expected = torch.log_softmax(model(torch.tensor([PROMPT + result.tokens])).logits[0], -1)
    first = len(PROMPT) - 1
    return max(abs(float(expected[first + i, t]) - result.log_probs[i]) for i, t in enumerate(result.tokens))


def exported(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Its tensors as the trainer names them: each expert by itself, no head that is the embedding."""
    tensors = []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(half.chunk(2) for half in tensor):
                tensors += [(name.replace("gate_up_proj", f"{i}.gate_proj.weight"), gate)]
                tensors += [(name.replace("gate_up_proj", f"{i}.up_proj.weight"), up)]
        elif name.endswith("experts.down_proj"):
            tensors += [(name.replace("down_proj", f"{i}.down_proj.weight"), down) for i, down in enumerate(tensor)]
        else:
            tensors.append((name, tensor))
    return tensors


def test_log_probabilities_are_those_of_transformers_before_and_after_a_push(served: tuple[Any, SGLangServer]) -> None:
    model, server = served
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

    async def compare() -> list[float]:
        engine, errors = SGLangEngine.at(server.address), []
        for version in (0, 1):
            if version:
                disturb(model)
                bucket = Bucket.of(exported(model))
                await asyncio.to_thread(
                    push.push_weights, [engine], [bucket], version, send=SendValues(), ranks=OneRank()
                )
            result = await engine.generate(GenerateRequest(rid=f"r{version}", input_ids=PROMPT, sampling=sampling))
            assert set(result.versions) == {version}
            assert len(result.tokens) == NEW
            errors.append(largest_error(model, result))
        await engine.close()
        return errors

    errors = asyncio.run(compare())
    assert max(errors) < 1e-4, errors


@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "default"], ids="-".join)
def test_the_scalings_here_change_what_is_computed(case: tuple[str, str], tmp_path: Path) -> None:
    """Otherwise the comparison above would hold for an engine that scales nothing."""
    scaled, plain = (make_model(case[0], scaling, tmp_path) for scaling in (case[1], "default"))
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        assert (scaled(tokens).logits - plain(tokens).logits).abs().max() > 1e-2
