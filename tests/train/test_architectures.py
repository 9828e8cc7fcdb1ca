"""Architectures as records: each is what transformers computes, a new one is one record, no other code knows one."""

import ast
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_train.models.architectures import ARCHITECTURES, model_shape
from relax_train.models.architectures.base import Architecture
from relax_train.models.costs import cost_model
from relax_train.models.shape import ModelShape
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]
MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    refuses=("sliding_window",),
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": 4096},
)
"""All that is needed for a family of the plainest shape. It is no more than an example here."""


@pytest.fixture
def with_mistral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "mistral", MISTRAL)


def _shape(folder: Path) -> ModelShape:
    return model_shape(json.loads((folder / "config.json").read_text()))


# ---------------------------------------------------------------------- records


@pytest.mark.parametrize("kind", ["llama", "llama+llama3", "qwen2", "qwen3", "qwen3_moe"])
def test_the_tensors_and_parameters_are_those_of_transformers(kind: str, reference: Callable[[str], Any]) -> None:
    _check_tensors(reference(kind).folder)


def _check_tensors(folder: Path) -> None:
    shape, stored = _shape(folder), {}
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            stored[name] = tuple(file.get_slice(name).get_shape())
    assert dict(shape.tensors()) == stored
    assert shape.parameters == sum(math.prod(size) for size in stored.values())


def test_layers_with_and_without_experts_are_counted_as_what_they_are(reference: Callable[[str], Any]) -> None:
    shape = _shape(reference("qwen3_moe").folder)
    assert shape.kinds == ("dense", "experts", "experts", "experts")
    assert shape.expert_parameters == 3 * 4 * 3 * 32 * 32
    assert shape.active_parameters == shape.parameters - shape.expert_parameters // 2
    assert shape.shared_in_layer("dense") - shape.shared_in_layer("experts") == 3 * 32 * 64 - 4 * 32


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(name: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto as names

    record = ARCHITECTURES[name]
    theirs = AutoConfig.for_model(name).to_dict()
    theirs |= theirs.get("text_config", {})
    theirs |= theirs["rope_parameters"]
    assert record.defaults == {key: theirs[key] for key in record.defaults}
    classes = {**names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert record.class_name == classes[name]
    # A head that is not as wide as the heads divide the model: its width is a default of the family.
    other = AutoConfig.for_model(name, hidden_size=96, num_attention_heads=4)
    assert record.defaults.get("head_dim", 24) == (getattr(other, "head_dim", None) or 24)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "qwen3_next", "num_experts": 8, "full_attention_interval": 4},
            ["'qwen3_next'", "nearest there is qwen3_moe (", "in some layers (full_attention_interval)"],
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512, "n_shared_experts": 1},
            [
                "nearest there is qwen3_moe (",
                "What no model there has: multi-head latent attention (kv_lora_rank), shared experts (n_shared",
            ],
        ),
        (
            {"model_type": "mistral", "sliding_window": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
            [
                "nearest there is llama (LlamaForCausalLM). What no",
                "sliding-window attention (sliding_window). For this configuration llama says: rope type 'dynamic' is",
            ],
        ),
        (
            {"model_type": "phi3", "quantization_config": {"quant_method": "awq"}},
            ["nearest there is llama (", "quantised weights (quantization_config)"],
        ),
        (
            {"model_type": "qwen2_vl", "vision_config": {"depth": 2}, "use_sliding_window": False, "sliding_window": 9},
            ["nearest there is qwen2_5_vl (", "no model there has: a vision tower of another kind (vision_config)"],
        ),
        ({}, ["model_type None"]),
        ({"model_type": ["qwen3"]}, ["is not supported"]),
    ],
)
def test_an_unknown_family_is_named_with_what_is_missing_and_the_nearest(
    config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(
        ValueError, match=r"use one of llama, qwen2, qwen3, qwen3_moe, qwen2_5_vl\. It has no file in"
    ) as raised:
        model_shape(config)
    assert all(word in str(raised.value) for word in words), raised.value


# ---------------------------------------------------------------------- a new family is one record


@pytest.mark.usefixtures("with_mistral")
def test_a_new_family_is_counted_and_costed_by_its_record(reference: Callable[[str], Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder, length = reference("mistral").folder, 200
    _check_tensors(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert _shape(folder).parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None] % 96)
    cost = cost_model(_shape(folder))
    masked = cost.quadratic * length**2  # eager attention computes what the mask throws away, too
    assert counter.get_total_flops() == pytest.approx(float(cost(np.array(length))) + masked, rel=0.01)


def _compute(harness: Any, reference: Any, out: Path) -> Any:
    from relax_train.checkpoint.hf_export import save_hf

    run = harness(reference.folder, {})
    save_hf(run.model, out)
    return run.logits(reference.rows[0][0]).log_softmax(-1), run.weights()


@pytest.mark.usefixtures("with_mistral")
def test_a_new_family_computes_what_transformers_does_and_comes_back_bit_for_bit(
    run_ranks: Callable[..., Any], harness: Any, reference: Callable[[str], Any], tmp_path: Path
) -> None:
    oracle = reference("mistral")
    log_probs, weights = run_ranks(_compute, 1, harness, oracle, tmp_path / "out")[0]
    torch.testing.assert_close(log_probs, oracle.logits.log_softmax(-1), rtol=0, atol=1e-5)
    stored, exported = load_file(oracle.folder / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert set(stored) == set(weights) == set(exported)
    assert all(torch.equal(stored[name], weights[name]) for name in stored)
    assert all(torch.equal(stored[name], exported[name]) for name in stored)


def _train(harness: Any, reference: Any, parallel: dict[str, Any]) -> Any:
    run = harness(reference.folder, parallel)
    return [run.step(rows) for rows in reference.rows], run.weights()


@pytest.mark.usefixtures("with_mistral")
@pytest.mark.parametrize(
    "parallel",
    [{"tensor_model_parallel_size": 2, "sequence_parallel": True}, {"pipeline_model_parallel_size": 2}],
    ids=["tp2-sp", "pp2"],
)
def test_a_new_family_trains_under_parallel_layouts(
    parallel: dict[str, Any], run_ranks: Callable[..., Any], harness: Any, reference: Callable[[str], Any]
) -> None:
    oracle = reference("mistral")
    after = load_file(oracle.after / "model.safetensors")
    for steps, weights in run_ranks(_train, 2, harness, oracle, parallel):
        assert [loss for loss, _ in steps] == pytest.approx(oracle.losses, abs=1e-5)
        assert [norm for _, norm in steps] == pytest.approx(oracle.grad_norms, rel=1e-4)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, after[name], rtol=0, atol=2e-5)


# ---------------------------------------------------------------------- no other code knows a family

KNOWN = re.compile("|".join(ARCHITECTURES), re.IGNORECASE)
ROPE_TYPE = "llama3"
"""A way to scale rotary embeddings, which any family may use."""
ALLOWED = {"relax_rollout/engines/sglang/cpu.py": "the names of SGLang's own model files"}


def _offences(source: str) -> Iterator[str]:
    """Where code, which docstrings and comments are not, compares a model type or names a family."""
    tree = ast.parse(source)
    docs = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for line in body if isinstance(body, list) else ():
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
                docs.add(id(line.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and "model_type" in ast.unparse(node):
            yield ast.unparse(node)
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docs:
            continue
        if KNOWN.search(node.value) and node.value != ROPE_TYPE:
            yield node.value


def test_a_test_for_a_family_is_found() -> None:
    assert list(_offences('"""Qwen3."""\nqk_norm = config.model_type in KNOWN\n')) == ["config.model_type in KNOWN"]
    assert list(_offences('match kind:\n    case "qwen3_moe":\n        pass\n')) == ["qwen3_moe"]
    assert list(_offences('def f():\n    "As in Qwen2."\n    return 1  # qwen2\n')) == []


def test_no_code_beside_the_records_knows_a_family() -> None:
    found = {}
    for source in ROOT.glob("packages/*/src"):
        for path in source.rglob("*.py"):
            name = str(path.relative_to(source))
            if not name.startswith("relax_train/models/architectures/"):
                found[name] = list(_offences(path.read_text(encoding="utf-8")))
    assert len(found) > 100, "the sources were not found"
    assert {name for name, lines in found.items() if lines} == set(ALLOWED), found
