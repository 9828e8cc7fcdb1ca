"""A model folder without weights, a prompt file, and a machine whose number of GPUs the test chooses."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_train.checkpoint import manifest
from relax_train.checkpoint.folders import set_latest

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
SMALL: dict[str, Any] = {
    **QWEN3_4B,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


def safetensors(shapes: dict[str, list[int]]) -> bytes:
    """A file of float32 zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def weights() -> Callable[[dict[str, list[int]]], bytes]:
    """Makes the content of a safetensors file of zeros from shapes."""
    return safetensors


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``gpus(n, memory=None)``: how many GPUs this machine has, and of how many bytes each; none to begin with."""

    def choose(n: int, memory: float | None = None) -> None:
        monkeypatch.setattr("relax_cli.cluster.placement._driver_gpus", lambda: n)
        monkeypatch.setattr("relax_cli.checks.memory.gpu_memory", lambda: memory)
        if memory is not None:  # the host of such GPUs is no laptop
            monkeypatch.setattr("relax_cli.checks.memory.machine_memory", lambda: 2e12)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    choose(0)
    return choose


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Callable[..., None]) -> Path:
    """The current directory of a test.

    It holds the model folders ``small`` (complete), ``qwen3-4b`` and ``qwen3-30b-a3b`` (only their published
    hyper-parameters), and ``prompts.jsonl``.
    """
    for name, config in (("small", SMALL), ("qwen3-4b", QWEN3_4B), ("qwen3-30b-a3b", QWEN3_30B_A3B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "small" / "model.safetensors").write_bytes(safetensors({}))
    (tmp_path / "small" / "tokenizer.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model() -> list[str]:
    """The options every start needs: the model and the data."""
    return ["--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl"]


@pytest.fixture
def start(model: list[str]) -> list[str]:
    """Options that are enough for a real start."""
    reward = ["--rm-type", "exact-match", "--label-key", "label"]
    return [*model, "--num-rollout", "2", *reward, "--n-samples-per-prompt", "4"]


@pytest.fixture
def checkpoint(workspace: Path) -> Path:
    """A checkpoint of the small model on CPU, as far as a plan looks at it."""
    folder = workspace / "checkpoints" / "rollout_4"
    folder.mkdir(parents=True)
    sizes = dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"), 1
    )
    content = {
        "format": manifest.FORMAT,
        "rollout_id": 4,
        "world_size": 1,
        "layout": {**sizes, "context_parallel_size": 1, "data_parallel_size": 1, "expert_tensor_parallel_size": 1},
        "dtype": "float32",
        "model": manifest.architecture(json.loads((workspace / "small" / "config.json").read_text())),
        "optimizer": {"name": manifest.OPTIMIZER, "steps": 5},
        "scheduler": {"num_steps": 5},
        "extra": {"rollout": None},
    }
    (folder / manifest.MANIFEST).write_text(json.dumps(content))
    (folder / "__0_0.distcp").write_bytes(bytes(100))
    (folder / ".metadata").write_bytes(b"... __0_0.distcp ...")
    for name in ("common.pt", "metadata.json", "rng_0.pt"):
        (folder / name).touch()
    manifest.record_files(folder)
    set_latest(folder.parent, folder.name)
    return folder
