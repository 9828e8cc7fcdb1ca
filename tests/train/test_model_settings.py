"""Settings of model, layout and checkpoints: every mistake is found at once, and its message has the fix."""

import json
from pathlib import Path
from typing import Any

import pytest
from relax_train.settings import SETTINGS, CheckpointSettings, ModelSettings, ParallelSettings
from relax_train.settings.model import read_hf_config

DENSE = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64, "num_hidden_layers": 6}
MOE = {**DENSE, "num_experts": 6, "moe_intermediate_size": 32}


def test_the_recommended_layouts_have_no_problem() -> None:
    small = ParallelSettings(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert small.problems() == []
    assert small.model_problems(DENSE, 8) == []
    large = ParallelSettings(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, optimizer_cpu_offload=True
    )
    assert large.problems() == []
    assert large.model_problems(MOE, 16) == []
    assert large.resolved_expert_tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sequence_parallel": True}, ["--sequence-parallel has no effect"]),
        ({"tensor_model_parallel_size": 0}, ["--tensor-model-parallel-size must be 1 or more, not 0"]),
        ({"recompute_granularity": "full"}, ["--recompute-method", "--recompute-num-layers"]),
        ({"recompute_granularity": "selective", "recompute_method": "uniform"}, ["--recompute-method needs"]),
        ({"recompute_num_layers": 2}, ["--recompute-num-layers needs"]),
        ({"recompute_modules": ("mlp",)}, ["--recompute-modules needs --recompute-granularity selective"]),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "mlp_act")},
            ["--recompute-modules mlp_act has no effect beside mlp"],
        ),
        ({"expert_tensor_parallel_size": 0}, ["--expert-tensor-parallel-size must be 1 or more, not 0"]),
    ],
)
def test_layouts_that_contradict_themselves(wrong: dict[str, Any], words: list[str]) -> None:
    text = "\n".join(ParallelSettings(**wrong).problems())
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("sizes", "model", "world", "words"),
    [
        ({"tensor_model_parallel_size": 3}, DENSE, 3, ["num_attention_heads 8", "num_key_value_heads 4"]),
        ({"tensor_model_parallel_size": 8}, DENSE, 8, ["num_key_value_heads 4"]),
        ({"pipeline_model_parallel_size": 4}, DENSE, 4, ["num_hidden_layers 6"]),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2}, DENSE, 6, ["6 ranks", "2 x 1 x 2 = 4"]),
        ({"expert_model_parallel_size": 2}, DENSE, 2, ["--expert-model-parallel-size has no effect"]),
        ({"expert_tensor_parallel_size": 2}, DENSE, 2, ["--expert-tensor-parallel-size has no effect"]),
        ({"expert_model_parallel_size": 4}, MOE, 4, ["num_experts 6"]),
        ({"recompute_granularity": "selective", "recompute_modules": ("moe",)}, DENSE, 1, ["moe has no effect"]),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, MOE, 1, ["mlp has no effect"]),
        ({"tensor_model_parallel_size": 2}, MOE, 2, ["needs --sequence-parallel"]),
        ({"expert_model_parallel_size": 2}, MOE, 3, ["EP x ETP x PP = 2 x 1 x 1 = 2; change"]),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "sequence_parallel": True},
            MOE,
            2,
            ["2 x 2 x 1 = 4 (ETP is TP = 2 unless --expert-tensor-parallel-size is set, and 1 is allowed); change"],
        ),
    ],
)
def test_layouts_that_do_not_fit_the_model(
    sizes: dict[str, Any], model: dict[str, Any], world: int, words: list[str]
) -> None:
    text = "\n".join(ParallelSettings(**sizes).model_problems(model, world))
    assert all(word in text for word in words), text


def test_all_checkpoint_mistakes_come_together(tmp_path: Path) -> None:
    found = CheckpointSettings(
        load=str(tmp_path / "nowhere"), save_interval=0, save_hf="out", max_actor_ckpt_to_keep=0, start_rollout_id=-1
    ).problems()
    text = "\n".join(found)
    assert len(found) == 6
    for flag in ("--load", "--save-interval", "--save-hf", "--max-actor-ckpt-to-keep", "--start-rollout-id"):
        assert flag in text


def test_resuming_from_the_save_folder_is_fine_before_it_exists(tmp_path: Path) -> None:
    folder = str(tmp_path / "later")
    assert CheckpointSettings(load=folder, save=folder, save_interval=1).problems() == []


@pytest.mark.parametrize(
    ("export", "problems"), [("rollout_{rollout_id}", 1), ("rollout_{rollout_id}/", 1), ("hf/rollout_{rollout_id}", 0)]
)
def test_an_export_does_not_replace_the_checkpoint_of_its_name(tmp_path: Path, export: str, problems: int) -> None:
    found = CheckpointSettings(save=str(tmp_path), save_hf=f"{tmp_path}/{export}").problems()
    assert len(found) == problems
    assert all("would replace the checkpoints of --save" in p for p in found)


def test_a_folder_without_checkpoints_is_no_place_to_resume_from(tmp_path: Path) -> None:
    """Else a mistyped path would train from the start weights."""
    [problem] = CheckpointSettings(load=str(tmp_path), save=str(tmp_path / "other")).problems()
    assert f"--load {tmp_path}: no checkpoint there" in problem
    assert "--hf-checkpoint" in problem
    assert CheckpointSettings(load=str(tmp_path), save=str(tmp_path)).problems() == []
    (tmp_path / "latest").write_text("rollout_3")
    assert CheckpointSettings(load=str(tmp_path), save=str(tmp_path / "other")).problems() == []


def test_checkpoint_folder_must_be_a_model(tmp_path: Path) -> None:
    missing = ModelSettings(hf_checkpoint=str(tmp_path / "nowhere"), ref_load=str(tmp_path)).problems()
    assert "--hf-checkpoint" in missing[0]
    assert "hf download" in missing[0]
    assert "--ref-load" in missing[1]
    assert "config.json" in missing[1]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert "'mistral' is not supported" in ModelSettings(hf_checkpoint=str(tmp_path)).problems()[0]


def test_every_option_has_help() -> None:
    import dataclasses

    for cls in SETTINGS:
        for field in dataclasses.fields(cls):
            assert field.metadata.get("help"), f"{cls.__name__}.{field.name}"


def test_checkpoints_of_another_run_are_not_replaced_by_accident(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("rollout_7")
    [problem] = CheckpointSettings(save=str(tmp_path)).problems()
    assert "--save" in problem
    assert f"--load {tmp_path}" in problem
    assert CheckpointSettings(save=str(tmp_path), load=str(tmp_path)).problems() == []
