"""The whole loop with the other families, tiny and random: push, checkpoint, resume with other sizes, export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 64.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    # So short a length that prompt and answer are beyond it.
    "Llama": {"rope_parameters": LLAMA3},
}
RESHARDED: dict[str, tuple[dict[str, int], str]] = {
    "Qwen3Moe": ({"expert_model_parallel_size": 2}, "DP 1, EP 1 -> DP 2, EP 2"),
    "Llama": ({"tensor_model_parallel_size": 2}, "TP 1 -> TP 2"),
}
"""Parallel sizes of the second launch, which the first had not, and how a run tells of them."""


def make_model(family: str, folder: Path) -> Path:
    from char_tokenizer import char_tokenizer
    from tiny_models import SHAPE, random_model

    shape = SHAPE | {"max_position_embeddings": 256, "tie_word_embeddings": False}
    model = random_model(family, shape | FAMILIES[family])
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_its_resume_push_and_export(
    family: str, task: Any, relax: Callable[..., Any], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    start = make_model(family, tmp_path / "start")

    def words(num_rollout: int, **changes: Any) -> list[str]:
        return task.flags(
            hf_checkpoint=start,
            num_rollout=num_rollout,
            rm_type=None,
            custom_rm_path=f"{tmp_path}/first.py:score",
            rollout_max_context_len=128,
            save=tmp_path / "checkpoints",
            save_interval=1,
            save_hf=tmp_path / "hf_{rollout_id}",
            tb_experiment_name=f"run{num_rollout}",
            **changes,
        )

    (tmp_path / "first.py").write_text("def score(sample):\n    return sample.tokens[0] / 128\n")
    metrics: list[dict[str, Any]] = []
    sizes, change = RESHARDED[family]
    for number, more in ((2, {}), (3, {"load": tmp_path / "checkpoints", **sizes})):
        run = relax("train", *words(number, **more))
        assert run.finish() == 0, run.output
        assert (f"resumed from rollout 1 of {tmp_path / 'checkpoints'}, resharded: {change}" in run.output) == bool(
            more
        )
        assert run.survivors() == []
        lines = (run.folder / "runs" / f"run{number}" / "metrics.jsonl").read_text().splitlines()
        metrics += [m for m in map(json.loads, lines) if "time/step" in m]
    assert [m["step"] for m in metrics] == [0, 1, 2], "the second launch goes on after the first"
    # After each push, also that of a resumed run, the engine computes what the trainer does.
    assert max(m["train/logprob_diff_max"] for m in metrics) < 1e-4
    assert all(m["train/grad_norm"] > 0 for m in metrics)

    last: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf_2", dtype=torch.float32, output_loading_info=True)
    model, info = last
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    again, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "hf_2"))
    assert set(again) == set(exported) == set(load_file(start / "model.safetensors"))
    assert all(torch.equal(again[name], exported[name]) for name in exported)
    before = load_file(start / "model.safetensors")
    assert max((exported[name] - before[name]).abs().max().item() for name in before) > 1e-4
