"""Hugging Face folders: reading them in every form they come in, and writing what transformers loads."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def _weights(harness: Any, folder: Path, parallel: dict[str, Any]) -> dict[str, torch.Tensor]:
    return harness(folder, parallel).weights()


def test_shards_and_index(run_ranks: Callable[..., Any], harness: Any, reference: Any, tmp_path: Path) -> None:
    oracle = reference("qwen2")
    shutil.copy(oracle.folder / "config.json", tmp_path)
    tensors = load_file(oracle.folder / "model.safetensors")
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        files["ab"[i % 2] + ".safetensors"][name] = tensor
    for file, part in files.items():
        save_file(part, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for weights in run_ranks(_weights, 2, harness, tmp_path, SP):
        assert set(weights) == set(tensors)
        assert all(torch.equal(weights[name], tensors[name]) for name in tensors)


def test_stacked_experts(run_ranks: Any, harness: Any, reference: Any, tmp_path: Path) -> None:
    oracle = reference("qwen3_moe")
    shutil.copy(oracle.folder / "config.json", tmp_path)
    tensors = load_file(oracle.folder / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(1, 4):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = [[tensors[f"{prefix}{e}.{x}_proj.weight"] for e in range(4)] for x in ("gate", "up", "down")]
        gate_up = [torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)]
        stacked |= {f"{prefix}gate_up_proj": torch.stack(gate_up), f"{prefix}down_proj": torch.stack(parts[2])}
    save_file(stacked, tmp_path / "model.safetensors")
    for weights in run_ranks(_weights, 2, harness, tmp_path, {"expert_model_parallel_size": 2}):
        assert all(torch.equal(weights[name], tensors[name]) for name in tensors)


def _refused(harness: Any, folder: Path) -> str:
    try:
        harness(folder, {})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", ["missing", "short", "wide", "truncated", "none"])
def test_folders_that_do_not_fit(fault: str, run_ranks: Any, harness: Any, reference: Any, tmp_path: Path) -> None:
    oracle, name = reference("qwen3"), "model.layers.2.mlp.down_proj.weight"
    shutil.copy(oracle.folder / "config.json", tmp_path)
    tensors = load_file(oracle.folder / "model.safetensors")
    tensor = tensors.pop(name)
    if fault == "short":
        tensors[name] = tensor[:-1].clone()
    if fault == "wide":
        tensors[name] = torch.cat([tensor, tensor], 1)
    if fault != "none":
        save_file(tensors, tmp_path / "model.safetensors")
    if fault == "truncated":
        with open(tmp_path / "model.safetensors", "r+b") as file:
            file.truncate(1000)
    message = run_ranks(_refused, 1, harness, tmp_path)[0]
    expected = {"truncated": "download the file again", "none": "no model.safetensors"}.get(fault, name)
    assert expected in message
    assert str(tmp_path) in message


def _export(harness: Any, reference: Any, parallel: dict[str, Any], out: Path, shard: int) -> Any:
    from relax_train.checkpoint.hf_export import save_hf

    run = harness(reference.folder, parallel)
    run.step(reference.rows[0])
    save_hf(run.model, out, max_shard_bytes=shard, bucket_bytes=20_000)
    return run.weights()


@pytest.mark.parametrize(
    ("kind", "world", "parallel", "shard"),
    [
        ("qwen2", 2, SP, 1 << 30),
        ("qwen3", 2, {"pipeline_model_parallel_size": 2}, 60_000),
        ("qwen3_moe", 2, {"expert_model_parallel_size": 2}, 1 << 30),
        ("llama", 2, {"pipeline_model_parallel_size": 2}, 60_000),
        ("llama+llama3", 2, SP, 1 << 30),
    ],
    ids=["tp2-one-file", "pp2-shards", "ep2", "llama-pp2-shards", "llama3-tp2-one-file"],
)
def test_transformers_loads_what_is_exported(
    kind: str, world: int, parallel: Any, shard: int, run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    oracle, out = reference(kind), tmp_path / "hf" / "rollout_3"
    extra = oracle.folder / "tokenizer_config.json"
    extra.write_text("{}")
    weights = run_ranks(_export, world, harness, oracle, parallel, out, shard)[0]
    assert sorted(p.name for p in out.parent.iterdir()) == ["rollout_3"]
    assert (out / "tokenizer_config.json").read_text() == "{}"
    assert (out / "model.safetensors.index.json").exists() == (shard < 1 << 20)
    assert all(p.stat().st_size <= shard + 10_000 for p in out.glob("*.safetensors"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    assert json.loads((out / "config.json").read_text()) == json.loads((oracle.folder / "config.json").read_text())
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def _export_untrained(harness: Any, folder: Path, out: Path) -> None:
    from relax_train.checkpoint.hf_export import save_hf

    save_hf(harness(folder, {}).model, out)


def test_configuration_and_named_templates_of_an_export_are_those_that_were_given(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    """Programs with a transformers before version 5 read only the keys of their own version."""
    source = tmp_path / "source"
    shutil.copytree(reference("qwen3_moe").folder, source)
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"], config["num_local_experts"], config["dtype"]
    config |= {"rope_theta": 5e5, "num_experts": 4, "torch_dtype": "bfloat16", "transformers_version": "4.51.0"}
    (source / "config.json").write_text(json.dumps(config))
    templates = source / "additional_chat_templates"  # where transformers keeps those that have a name
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages[0].content }}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "tokenizer_config.json").chmod(0o400)  # as caches have it
    run_ranks(_export_untrained, 1, harness, source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "torch_dtype": "float32"}
    exported = tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja"
    assert exported.read_text() == "{{ messages[0].content }}"
    umask = os.umask(0)
    os.umask(umask)
    for path in (tmp_path / "out").rglob("*"):
        allowed = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == allowed & ~umask, f"{path.name}: the umask decides who may read it"


def _export_to_full_disk(harness: Any, reference: Any, out: Path) -> str:
    from relax_train.checkpoint.hf_export import save_hf
    from relax_train.checkpoint.sharded_io import CheckpointError

    run = harness(reference.folder, SP)
    save_hf(run.model, out)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if run.parallel.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, unlimited[1]))
    message = ""
    try:
        save_hf(run.model, out)
    except CheckpointError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return message


def test_full_disk_leaves_the_folder_that_was_there(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    oracle, out = reference("qwen3"), tmp_path / "hf"
    for message in run_ranks(_export_to_full_disk, 2, harness, oracle, out):
        assert f"cannot save {out}" in message
        assert "MB are free" in message
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    exported, stored = load_file(out / "model.safetensors"), load_file(oracle.folder / "model.safetensors")
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
