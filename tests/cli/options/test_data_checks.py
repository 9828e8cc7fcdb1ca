"""The first rows of the prompt data, and small files of the model folder: what is wrong is told before a start."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from char_tokenizer import char_tokenizer
from command_words import changed
from relax_cli.checks.plan import plan_text
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_data.prompts.ledger import PromptLedger
from relax_data.prompts.open import open_prompts
from relax_data.prompts.preview import FolderTokenizer, first_rows
from relax_data.prompts.saved_groups import SAMPLES_FILE
from relax_data.readers.files import FileSlice
from relax_data.serialization import STATE_FORMAT
from relax_data.settings import DataSettings
from relax_train.checkpoint import manifest
from transformers import AutoTokenizer


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        resolve(words, {})
    return refused.value.problems


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------- files beside the weights


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", ['{"version": "1.0", "added_tok', "", "[1]", "version https://git-lfs.github.com/x"]
)
def test_a_damaged_file_of_the_model_folder_is_named(
    workspace: Path, start: list[str], name: str, content: str
) -> None:
    (workspace / "small" / name).write_text(content)
    for more in ([], ["--dry-run"]):
        (problem,) = problems(*start, *more)
        assert problem.startswith(f"--hf-checkpoint: {workspace / 'small' / name} cannot be read (") or (
            problem.startswith(f"--hf-checkpoint: small/{name} cannot be read (")
        )


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("row", "words", "said"),
    [
        ({"prompt": "1"}, [], "prompts.jsonl:2: key 'input' is missing (the row has 'prompt'); --input-key names it"),
        ({"input": "1", "answer": 2}, [], "prompts.jsonl:2: key 'label' is missing"),
        ({"input": "1", "label": None}, [], "key 'label' is null"),
        ({"input": ["1"], "label": "1"}, [], "key 'input' must be a string, not list; add --apply-chat-template"),
        ({"input": "1", "label": "1", "metadata": 5}, [], "key 'metadata' must be a JSON object"),
        ({"input": "1", "label": {"value": 3}}, [], "prompts.jsonl:2: --rm-type exact-match compares text"),
        ({"input": "1", "label": [1]}, ["--rm-type", "math"], "prompts.jsonl:2: --rm-type math compares with a text"),
        (
            {"input": "1", "label": "first 3 then 4 apples"},
            ["--rm-type", "math"],
            "prompts.jsonl:2: --rm-type math cannot compare with it",
        ),
    ],
)
def test_a_row_that_would_end_the_run_is_told_at_the_start(
    workspace: Path, start: list[str], row: dict[str, Any], words: list[str], said: str
) -> None:
    write(workspace / "prompts.jsonl", {"input": "1+1=", "label": "2"}, row)
    for more in ([], ["--dry-run"]):
        (problem,) = problems(*changed(start, words), *more)
        assert problem.startswith("--prompt-data: ")
        assert said in problem


def test_a_line_that_is_no_json_is_told_and_skipped_when_that_is_asked(workspace: Path, start: list[str]) -> None:
    (workspace / "prompts.jsonl").write_text('{"input": "1", "label": "1"}\n\n{"input": \n')
    (problem,) = problems(*start)
    assert "prompts.jsonl:3: not valid JSON" in problem
    resolve([*start, "--skip-bad-rows"], {})
    (workspace / "prompts.jsonl").write_text('{"input": \n' * 40)
    assert "prompts.jsonl:1: not valid JSON" in problems(*start, "--skip-bad-rows")[0]


def test_the_evaluation_data_is_looked_at_too(workspace: Path, start: list[str]) -> None:
    write(workspace / "eval.jsonl", {"question": "1"})
    (problem,) = problems(*start, "--eval-interval", "1", "--eval-prompt-data", "held", "eval.jsonl")
    assert problem.startswith("--eval-prompt-data held: ")
    assert "eval.jsonl:1: key 'input' is missing" in problem


def test_a_reward_that_compares_needs_the_key_of_the_label(workspace: Path, model: list[str]) -> None:
    words = [*model, "--num-rollout", "2", "--n-samples-per-prompt", "4", "--rm-type", "math"]
    (problem,) = problems(*words)
    assert problem == "the key of the label in a row (--label-key): --rm-type math compares with it"
    assert problem in plan_text(resolve([*words, "--dry-run"], {}))
    resolve([*changed(words, ["--rm-type", "none"]), "--custom-rm-path", "json:dumps"], {})


@pytest.mark.parametrize("slice_", ["", "@[2:]", "@[-3:]", "@[0:-1]", "@[20000:]"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet"])
def test_the_first_rows_are_those_that_the_source_reads(tmp_path: Path, name: str, slice_: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(40)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif name.endswith(".zst"):
        path.write_bytes(pa.Codec("zstd").compress(text, asbytes=True))
    else:
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    bounds = {
        "": (None, None),
        "@[2:]": (2, None),
        "@[-3:]": (-3, None),
        "@[0:-1]": (0, -1),
        "@[20000:]": (20000, None),
    }
    start, stop = bounds[slice_]
    found = first_rows(FileSlice(str(path), start, stop), 16)
    expected = {"": rows[:16], "@[2:]": rows[2:18]}.get(slice_, [])
    assert [r.row for r in found] == expected
    assert [r.source for r in found] == [f"{path}:{(start or 0) + i + 1}" for i in range(len(expected))]


def test_long_lines_are_not_read_without_end(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"input": "x" * (1 << 20)})
    path.write_text((row + "\n") * 10)
    assert 1 <= len(first_rows(FileSlice(str(path)), 16)) < 10


# ---------------------------------------------------------------------- chat template and lengths


@pytest.fixture
def chat_folder(workspace: Path) -> Path:
    """The small model with a real tokenizer, one token a character, and a chat template."""
    (workspace / "small" / "tokenizer.json").unlink()
    char_tokenizer().save_pretrained(workspace / "small")
    return workspace / "small"


def test_a_template_that_does_not_render_is_told(workspace: Path, chat_folder: Path, start: list[str]) -> None:
    words = [*start, "--apply-chat-template"]
    assert "4 looked at, 22 to 22 tokens" in plan_text(resolve([*words, "--dry-run"], {}))
    (chat_folder / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    (problem,) = problems(*words)
    assert "prompts.jsonl:1: the chat template failed: TemplateError: no system role" in problem
    (chat_folder / "chat_template.jinja").write_text("{% if %}")
    (problem,) = problems(*words, "--dry-run")
    assert "prompts.jsonl:1: the chat template failed: TemplateSyntaxError" in problem
    (chat_folder / "chat_template.jinja").unlink()
    (problem,) = problems(*words)
    assert "--apply-chat-template: the tokenizer has no chat template" in problem


def test_the_preview_renders_and_counts_as_transformers_does(chat_folder: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}|{{ m.content | tojson }}{{ eos_token }}{% endfor %}"
    (chat_folder / "chat_template.jinja").write_text(template + "{% if tools %}{{ tools[0].name }}{% endif %}{{ x }}")
    real, ours = AutoTokenizer.from_pretrained(chat_folder), FolderTokenizer(str(chat_folder))
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    arguments: dict[str, Any] = {"tools": [{"name": "t"}], "x": 3, "add_generation_prompt": True, "tokenize": False}
    text = real.apply_chat_template(messages, **arguments)
    assert text == ours.apply_chat_template(messages, **arguments)
    assert ours.counts([text, "ab"], add_special_tokens=True) == [len(ids) for ids in real([text, "ab"])["input_ids"]]
    assert ours.chat_template == real.chat_template
    # Where the template stands in the other file, and where there is none.
    (chat_folder / "chat_template.jinja").unlink()
    fields = json.loads((chat_folder / "tokenizer_config.json").read_text())
    for template_field in ({"chat_template": template}, {}):
        (chat_folder / "tokenizer_config.json").write_text(json.dumps({**fields, **template_field}))
        real = AutoTokenizer.from_pretrained(chat_folder)
        assert (
            FolderTokenizer(str(chat_folder)).chat_template == real.chat_template == template_field.get("chat_template")
        )


def test_a_template_in_an_unusual_place_is_found_by_transformers(
    workspace: Path, chat_folder: Path, start: list[str]
) -> None:
    text = (chat_folder / "chat_template.jinja").read_text()
    (chat_folder / "chat_template.jinja").unlink()
    fields = json.loads((chat_folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": text}]
    (chat_folder / "tokenizer_config.json").write_text(json.dumps({**fields, "chat_template": named}))
    resolve([*start, "--apply-chat-template"], {})


def test_prompts_that_are_all_too_long_are_a_warning(workspace: Path, chat_folder: Path, start: list[str]) -> None:
    assert resolve([*start, "--rollout-max-prompt-len", "4"], {}).warnings == ()
    (warning,) = resolve([*start, "--rollout-max-prompt-len", "3"], {}).warnings
    assert "the first 4 prompts have 4 tokens and more, and --rollout-max-prompt-len 3 drops them" in warning
    (warning,) = resolve([*start, "--rollout-max-context-len", "4"], {}).warnings
    assert "leaves no room for a response in the 4 tokens" in warning


# ---------------------------------------------------------------------- resume


@pytest.fixture
def resumed(workspace: Path, chat_folder: Path, checkpoint: Path, start: list[str]) -> list[str]:
    """Words of a resume from a checkpoint that holds the place in ``prompts.jsonl``, with a chat template."""
    words = [*start, "--apply-chat-template", "--load", str(checkpoint.parent)]
    settings = DataSettings(prompt_data=("prompts.jsonl",), label_key="label", apply_chat_template=True)
    state = open_prompts(settings, AutoTokenizer.from_pretrained(chat_folder)).state_dict()
    file = checkpoint / manifest.MANIFEST
    content = json.loads(file.read_text())
    ledger = PromptLedger().state_dict()
    (checkpoint / SAMPLES_FILE).write_bytes(ledger.pop("samples"))
    content["extra"]["rollout"] = {"format": STATE_FORMAT, "source": state, "ledger": ledger, "dropped": []}
    file.write_text(json.dumps(content))
    manifest.record_files(checkpoint)
    resolve(words, {})
    return words


def test_a_resume_with_other_data_is_told_before_anything_starts(workspace: Path, resumed: list[str]) -> None:
    shutil.copy("prompts.jsonl", "other.jsonl")
    for more in ([], ["--dry-run"]):
        (problem,) = problems(*changed(resumed, ["--prompt-data", "other.jsonl"]), *more)
        assert problem.startswith("--load: ")
        assert "has read prompts.jsonl where --prompt-data now names other.jsonl" in problem
    (workspace / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 5)
    (problem,) = problems(*resumed)
    assert "prompts.jsonl has" in problem


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout-shuffle"], "--rollout-shuffle was False at the checkpoint"),
        (["--use-streaming-dataset"], "use the flag as it was"),
        (["--system-prompt", "Be brief."], "--system-prompt is 'Be brief.' and was None at the checkpoint"),
        (["--label-key", "input"], "--label-key is 'input' and was 'label' at the checkpoint"),
    ],
)
def test_a_resume_with_other_prompts_is_told(resumed: list[str], words: list[str], said: str) -> None:
    (problem,) = problems(*changed(resumed, words))
    assert problem.startswith("--load: ")
    assert said in problem


def test_a_resume_with_another_chat_template_is_told(chat_folder: Path, resumed: list[str]) -> None:
    file = chat_folder / "chat_template.jinja"
    before = file.read_text()
    file.write_text(before + " ")
    (problem,) = problems(*resumed)
    assert problem.startswith("--load: the chat template of --hf-checkpoint is another than at the checkpoint")
    file.write_text(before)
    resolve(resumed, {})
