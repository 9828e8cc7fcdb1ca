"""Folders with the configuration of a Qwen3 without weights, which benchmarks draw themselves."""

import json
from pathlib import Path
from typing import Any

_LARGE: dict[str, Any] = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
_SMALL: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(_SMALL, vocab_size=512, hidden_size=64, intermediate_size=128, head_dim=16),
    "60m": dict(_SMALL, vocab_size=46_000, hidden_size=1024, intermediate_size=2048, head_dim=64),
    "0.6b": dict(_LARGE, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16),
    "4b": dict(_LARGE, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
}


def config_folder(folder: Path, shape: str, *, dtype: str, positions: int) -> Path:
    """Makes a folder with a ``config.json``.

    Args:
        folder: is not there yet.
        shape: one of :data:`SHAPES`.
        dtype: of the weights, in torch's words.
        positions: the longest text.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        **SHAPES[shape],
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder
