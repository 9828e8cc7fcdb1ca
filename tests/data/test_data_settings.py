"""Options of the prompt data: defaults and what is refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_data.settings import SETTINGS, DataSettings


def problems(**options: Any) -> list[str]:
    return DataSettings(**options).problems(frozenset(options))


def test_defaults_are_accepted_with_a_file(write_jsonl: Callable[..., str]) -> None:
    assert problems(prompt_data=(write_jsonl([{}]),)) == []
    assert (DataSettings,) == SETTINGS


def test_prompt_data_is_required_unless_rollouts_are_loaded() -> None:
    assert "--prompt-data is required" in problems()[0]
    assert DataSettings().problems(frozenset({"load_debug_rollout_data"})) == []


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.jsonl").write_text('{"input": "x"}\n')
    assert problems(prompt_data=("",)) == ["--prompt-data holds an empty path: is a shell variable in it not set?"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system_prompt": "x"}, "--system-prompt has no effect without --apply-chat-template"),
        ({"tool_key": "x"}, "--tool-key has no effect"),
        ({"apply_chat_template_kwargs": {}}, "--apply-chat-template-kwargs has no effect"),
        ({"streaming_buffer_size": 5}, "--streaming-buffer-size has no effect without --use-streaming-dataset"),
        (
            {"streaming_buffer_size": 0, "use_streaming_dataset": True},
            "--streaming-buffer-size must be 1 or more, not 0",
        ),
        ({"rollout_max_prompt_len": 0}, "--rollout-max-prompt-len must be 1 or more, not 0"),
        ({"rollout_seed": -1}, "--rollout-seed must be 0 or more, not -1"),
        ({"rollout_seed": 2**31}, "--rollout-seed must be 2147483647 or less, not 2147483648"),
        ({"mm_processor_pool_size": 2}, "--mm-processor-pool-size has no effect without --multimodal-keys"),
        ({"mm_processor_pool_size": -2}, "--mm-processor-pool-size must be 0 or more, not -2"),
        ({"multimodal_keys": {"smell": "s"}}, "unknown modality 'smell'"),
        ({"multimodal_keys": {"image": 3}}, "image must name the key"),
        (
            {"apply_chat_template": True, "apply_chat_template_kwargs": {"tokenize": True, "thinking": False}},
            "--apply-chat-template-kwargs: 'tokenize' is no argument of the template",
        ),
        ({"num_data_storage_units": 0}, "--num-data-storage-units must be 1 or more, not 0"),
    ],
)
def test_each_problem_is_named(write_jsonl: Callable[..., str], options: dict[str, Any], message: str) -> None:
    found = problems(prompt_data=(write_jsonl([{}]),), **options)
    assert any(message in p for p in found), found
    assert len(found) == 1


def test_all_problems_are_reported_together() -> None:
    found = problems(prompt_data=("missing.jsonl",), system_prompt="x", rollout_seed=-1)
    assert len(found) == 3
    assert any("--prompt-data: missing.jsonl does not exist" in problem for problem in found)


def test_settings_and_types_import_nothing_heavy() -> None:
    code = (
        "import sys, relax_data.settings, relax_data.types, relax_data.prompts.source, relax_data.packing.pack\n"
        "heavy = {'torch', 'transformers', 'ray', 'datasets', 'transfer_queue'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
