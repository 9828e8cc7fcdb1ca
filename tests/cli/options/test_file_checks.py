"""Damaged, foreign and impossible files are found before anything loads them."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_words import changed
from relax_cli.checks.plan import plan_text
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_data.prompts.ledger import PromptLedger
from relax_data.prompts.saved_groups import SAMPLES_FILE
from relax_data.serialization import STATE_FORMAT
from relax_data.types import Prompt, SampleGroup
from relax_train.checkpoint import manifest

WeightStatus = Callable[[dict[str, list[int]]], bytes]


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        resolve(words, {})
    return refused.value.problems


# ---------------------------------------------------------------------- weights

SMALL_SHAPES = {
    "model.embed_tokens.weight": [128, 64],
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in (0, 1)
        for name, shape in (
            ("self_attn.q_proj", [64, 64]),
            ("self_attn.k_proj", [32, 64]),
            ("mlp.gate_proj", [128, 64]),
        )
    },
}
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off in the data": (lambda whole: whole[:-1], "was cut off or changed: it has"),
    "cut off in the header": (lambda whole: whole[:100], "was cut off: it has 100 bytes"),
    "empty": (lambda whole: b"", "was cut off: it has 0 bytes"),
    "longer": (lambda whole: whole + b"x", "was cut off or changed"),
    "header of rubbish": (lambda whole: whole[:8] + b"x" * (len(whole) - 8), "header cannot be read"),
    "header of nesting": (lambda whole: (10**6).to_bytes(8, "little") + b"[" * 10**6, "recursion"),
    "pointer": (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "pointer of Git LFS"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("option", ["--hf-checkpoint", "--ref-load"])
def test_damaged_weights_are_named(
    workspace: Path, start: list[str], weights: WeightStatus, name: str, option: str
) -> None:
    damage, expected = DAMAGES[name]
    (workspace / "other").mkdir()
    (workspace / "other" / "config.json").write_text((workspace / "small" / "config.json").read_text())
    (workspace / "other" / "tokenizer.json").write_text("{}")
    file = workspace / "other" / "model.safetensors"
    words = changed(start, ["--use-kl-loss", "--kl-loss-coef", "0.1", option, "other"])
    file.write_bytes(weights(SMALL_SHAPES))
    resolve(words, {})
    file.write_bytes(damage(weights(SMALL_SHAPES)))
    for more in ([], ["--dry-run"]):
        (problem,) = problems(*words, *more)
        assert problem.startswith(f"{option}: {file} ")
        assert expected in problem


def test_a_shard_that_the_index_names_and_is_not_there(workspace: Path, start: list[str]) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (workspace / "small" / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = problems(*start)
    assert f"{workspace / 'small' / 'model-2.safetensors'} is missing" in problem


def test_a_file_that_the_index_does_not_name_is_left_alone(
    workspace: Path, start: list[str], weights: WeightStatus
) -> None:
    small = workspace / "small"
    (small / "model.safetensors").rename(small / "model-00001-of-00001.safetensors")
    (small / "model-00001-of-00001.safetensors").write_bytes(weights(SMALL_SHAPES))
    index = {"weight_map": dict.fromkeys(SMALL_SHAPES, "model-00001-of-00001.safetensors")}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    (small / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    resolve(start, {})


@pytest.mark.parametrize("text", ["", "[", "{}", "[]", '{"weight_map": 7}', "[" * 100_000])
def test_an_index_that_cannot_be_read_is_named(workspace: Path, start: list[str], text: str) -> None:
    index = workspace / "small" / "model.safetensors.index.json"
    index.write_text(text)
    (problem,) = problems(*start, "--dry-run")
    assert problem.startswith(f"--hf-checkpoint: {index} cannot be read (")


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"vocab_size": 256}, "model.embed_tokens.weight [256, 64], but the weights have"),
        ({"num_key_value_heads": 4}, "k_proj.weight [64, 64], but the weights have"),
        ({"num_hidden_layers": 4}, "but the weights have no model.layers.3."),
        ({"num_hidden_layers": 1}, "1 layers, but the weights have model.layers.1."),
    ],
)
def test_weights_of_another_model_than_the_configuration(
    workspace: Path, start: list[str], weights: WeightStatus, changes: dict[str, int], part: str
) -> None:
    (workspace / "small" / "model.safetensors").write_bytes(weights(SMALL_SHAPES))
    file = workspace / "small" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (problem,) = problems(*start)
    assert "--hf-checkpoint" in problem
    assert part in problem


def test_quantised_weights_are_for_generation_only(workspace: Path, start: list[str], weights: WeightStatus) -> None:
    small = workspace / "small"
    (small / "model.safetensors").write_bytes(weights({"model.layers.0.self_attn.q_proj.qweight": [8, 8]}))
    settings = {**json.loads((small / "config.json").read_text()), "quantization_config": {"quant_method": "awq"}}
    (small / "config.json").write_text(json.dumps(settings))
    (problem,) = problems(*start)
    assert problem.startswith(f"--hf-checkpoint: {small} is quantised")
    resolve([*start, "--debug-rollout-only"], {})


# ---------------------------------------------------------------------- config.json

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4}
ODD_SIZES: list[Any] = [0, -1, 10**30, "64", 6.4, True, [64], {}]
ABSURD: list[tuple[dict[str, Any], str]] = [
    *(({key: value}, f"{key} should be") for key in SIZES for value in ODD_SIZES),
    ({"hidden_size": 10**8, "num_hidden_layers": 10**8}, "sizes make a model of"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
    ({"max_position_embeddings": "x"}, "max_position_embeddings should be"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps should be a number"),
    ({"rope_theta": -1}, "rope_theta should be a number"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ({"attention_bias": True}, "attention_bias True is not supported"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope type 'dynamic' is not supported"),
    ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs factor"),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, "SGLang stops at factor 4"),
    ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
    ({"rope_parameters": 7}, "rope_parameters should be an object"),
    # As a model card says how to stretch the context, in a file that transformers 5 wrote.
    (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "rope_scaling": {"rope_type": "yarn", "factor": 4},
        },
        "rope_parameters and rope_scaling are both there and differ",
    ),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "only full_attention in every layer is"),
    ({"layer_types": 3}, "layer_types 3 is not supported"),
    (
        {"model_type": "qwen3_moe", "num_experts": 10**9, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        "a layer of 1,000,000,000 experts; num_experts is wrong",
    ),
    (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 8},
        "8 of only 4",
    ),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}, "moe_intermediate_size should be"),
]


@pytest.mark.parametrize(("changes", "part"), ABSURD, ids=[str(changes) for changes, _ in ABSURD])
def test_an_absurd_configuration_is_one_problem(
    workspace: Path, start: list[str], changes: dict[str, Any], part: str
) -> None:
    file = workspace / "small" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (problem,) = problems(*start, "--dry-run")
    assert problem.startswith(f"--hf-checkpoint {workspace / 'small'}: config.json: ")
    assert part in problem


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not supported; use one of llama, qwen2, qwen3, qwen3_moe"),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window attention (sliding_window)"),
    (
        {"model_type": "deepseek_v3", "kv_lora_rank": 512, "num_experts": 4},
        "multi-head latent attention (kv_lora_rank)",
    ),
    ({"model_type": "phi3", "quantization_config": {"quant_method": "awq"}}, "quantised weights (quantization_config)"),
]


@pytest.mark.parametrize(("changes", "part"), UNSUPPORTED, ids=[str(changes) for changes, _ in UNSUPPORTED])
def test_a_family_that_is_not_built_is_one_problem_with_the_nearest_that_is(
    workspace: Path, start: list[str], changes: dict[str, Any], part: str
) -> None:
    file = workspace / "small" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (problem,) = problems(*start, "--dry-run")
    assert problem.startswith("--hf-checkpoint: model_type ")
    assert part in problem
    assert re.search(r"the nearest there is \w+ \(\w+ForCausalLM\)", problem)


# ---------------------------------------------------------------------- what is written

WRITTEN = [
    ["--save", "{}/checkpoints"],
    ["--save-hf", "{}/{{rollout_id}}"],
    ["--save-debug-rollout-data", "{}/{{rollout_id}}.pkl"],
    ["--sglang-profile", "--sglang-profile-output-dir", "{}"],
    ["--record-memory-history", "--memory-snapshot-dir", "{}"],
]


@pytest.mark.parametrize("words", WRITTEN, ids=lambda words: words[-2])
def test_a_folder_that_cannot_be_made_is_a_problem_of_the_start(
    workspace: Path, start: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "file").write_text("")
    (workspace / "locked").mkdir()
    allowed = os.access

    def access(path: Any, mode: int) -> bool:  # the tests may run as root, who may write everywhere
        return allowed(path, mode) and not (mode & os.W_OK and Path(path).name == "locked")

    monkeypatch.setattr(os, "access", access)
    for folder, part in (("file/x", "file is not a folder"), ("locked/x", "may not write into")):
        chosen = [*start, *(word.format(workspace / folder) for word in words)]
        (problem,) = problems(*chosen)
        assert words[-2] in problem
        assert part in problem
        assert problem in resolve([*chosen, "--dry-run"], {}).notes


def test_a_run_directory_that_cannot_be_made(workspace: Path, start: list[str]) -> None:
    (workspace / "runs").write_text("")
    (problem,) = problems(*start)
    assert f"{workspace / 'runs'} is not a folder" in problem


# ---------------------------------------------------------------------- what is resumed from


def edit(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / manifest.MANIFEST
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        manifest.record_files(folder)

    return change


def samples(damage: Callable[[Path], object] | None) -> Callable[[Path], None]:
    """Saves a rollout with a group, and damages the file of its samples before its checksum is taken."""

    def change(folder: Path) -> None:
        ledger = PromptLedger()
        ledger.hand_out([SampleGroup.start(Prompt(0, 0, "prompts.jsonl:1", "1+1=", [1]), 8)])
        (folder / SAMPLES_FILE).write_bytes(ledger.state_dict()["samples"])
        if damage is not None:
            damage(folder / SAMPLES_FILE)
        edit(extra={"rollout": {"format": STATE_FORMAT}})(folder)

    return change


def flip(file: Path) -> None:
    """A bit of the numbers."""
    content = bytearray(file.read_bytes())
    content[content.index(b"group_sizes.npy") + 150] ^= 16
    file.write_bytes(content)


def make_pipe(file: Path) -> None:
    """A reader would wait for ever."""
    file.unlink()
    os.mkfifo(file)


def pipe_of_samples(folder: Path) -> None:
    """In a checkpoint of format 1 without a list of files."""
    edit(format=1)(folder)
    (folder / "files.json").unlink()
    make_pipe(folder / SAMPLES_FILE)


def lose_shard(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    manifest.record_files(folder)


def list_another(folder: Path) -> None:
    content = json.loads((folder / "files.json").read_text())
    for key in ("files", "crc32"):
        content[key]["../../prompts.jsonl"] = 1
    (folder / "files.json").write_text(json.dumps(content))


def test_one_checkpoint_given_to_load(start: list[str], checkpoint: Path) -> None:
    (problem,) = problems(*start, "--load", "checkpoints/rollout_4", "--dry-run")
    assert f"it is one checkpoint; give its parent {checkpoint.parent}" in problem


UNFIT: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "cut off": (
        lambda f: os.truncate(f / "__0_0.distcp", 7),
        [],
        "__0_0.distcp was cut off or changed: it has 7 of",
    ),
    "half": (lambda f: (f / "__0_0.distcp").unlink(), [], "__0_0.distcp is missing"),
    "no manifest": (lambda f: (f / "relax.json").unlink(), [], "relax.json cannot be read"),
    "odd list of files": (
        lambda f: (f / "files.json").write_text("{"),
        [],
        "files.json cannot be read",
    ),
    "no list of files": (lambda f: (f / "files.json").unlink(), [], "files.json is missing: a save writes it last"),
    "lost shard": (lose_shard, [], "__0_0.distcp is missing"),
    "list of another folder": (list_another, [], "names '../../prompts.jsonl', which is no name of a file of this"),
    "layout of nothing": (edit(layout={}), [], "relax.json is damaged: its layout is not"),
    "odd model": (edit(model=5), [], "relax.json is damaged: its model is not"),
    "empty manifest": (lambda f: (f / "relax.json").write_text("{}"), [], "relax.json has format None"),
    "odd layout": (edit(layout=7), [], "relax.json is damaged"),
    "odd schedule": (edit(scheduler={"steps": 3}), [], "relax.json is damaged: its scheduler is not"),
    "no prompts": (edit(extra={}), [], "does not say which prompts come next"),
    "flipped bit": (
        lambda f: (f / "__0_0.distcp").write_bytes(bytes(99) + b"\x01"),
        [],
        "__0_0.distcp has changed since it was written",
    ),
    "latest a pipe": (
        lambda f: make_pipe(f.parent / "latest"),
        [],
        "is not a regular file; write the name",
    ),
    "latest of nothing": (lambda f: (f.parent / "latest").write_text("rollout_9"), [], "names 'rollout_9'"),
    "odd state": (edit(extra=7), [], "relax.json is damaged"),
    "odd state of the rollout": (edit(extra={"rollout": 7}), [], "is damaged: it is no object, but '7'"),
    "older state of the rollout": (edit(extra={"rollout": {"loop": {"format": 1}}}), [], "has format 1, this version"),
    "no samples": (samples(Path.unlink), [], "samples.npz'. Copy the checkpoint again"),
    "samples cut off": (samples(lambda f: os.truncate(f, 99)), [], "samples.npz cannot be read: "),
    "samples with a flipped bit": (samples(flip), [], "samples.npz cannot be read: BadZipFile: Bad CRC-32"),
    "samples that are a pipe": (
        pipe_of_samples,
        [],
        "samples.npz is not a regular file",
    ),
    "other layout in format 1": (
        edit(format=1),
        ["--pipeline-model-parallel-size", "2"],
        "by an earlier version with --pipeline-model-parallel-size 1",
    ),
    "other optimizer": (edit(optimizer={"name": "muon", "steps": 1}), [], "with the optimizer 'muon'"),
    "other precision": (lambda f: None, ["--bf16"], "resume with --no-bf16"),
    "other model": (edit(model={"num_hidden_layers": 28}), [], "num_hidden_layers 28 instead of 2"),
}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "saved with these sizes"),
        (["--pipeline-model-parallel-size", "2"], "resharded: PP 1 -> PP 2"),
        (["--tensor-model-parallel-size", "2"], "resharded: TP 1 -> TP 2"),
    ],
)
def test_a_plan_says_that_a_checkpoint_is_resharded(
    start: list[str], checkpoint: Path, words: list[str], says: str
) -> None:
    samples(None)(checkpoint)
    config = resolve([*start, "--load", "checkpoints", "--save", "checkpoints", "--dry-run", *words], {})
    assert f"  resumes            {checkpoint}, {says}\n" in plan_text(config)


@pytest.mark.parametrize("name", UNFIT)
def test_a_checkpoint_that_the_run_cannot_go_on_with(
    workspace: Path, start: list[str], checkpoint: Path, name: str
) -> None:
    damage, words, part = UNFIT[name]
    samples(None)(checkpoint)
    argv = [*start, "--load", "checkpoints", "--save", "checkpoints"]
    assert resolve(argv, {}).train.checkpoint.load == str(checkpoint.parent)
    damage(checkpoint)
    (problem,) = problems(*argv, *words, "--dry-run")
    assert problem.startswith("--load: ")
    assert part in problem


# ---------------------------------------------------------------------- what was not made yet


@pytest.mark.parametrize(
    ("example", "command"),
    [
        ("shapes", "uv run python {}make_task.py"),
        ("smollm2", "uv run --group smollm2 python {}prepare.py"),
    ],
)
def test_an_example_that_was_not_prepared_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, command: str
) -> None:
    """The one of its own comments, with the place of the script where it is started elsewhere."""
    source, clone = Path(__file__).parents[3] / "examples" / example, tmp_path / "clone"
    folder = clone / "examples" / example
    folder.mkdir(parents=True)
    for file in [*source.glob("*.py"), source / "train.toml"]:
        (folder / file.name).write_text(file.read_text())
    for where, place in ((clone, f"examples/{example}/"), (tmp_path, f"{folder}/")):
        monkeypatch.chdir(where)
        # The advice of the other checks, to download a model, would not help.
        (only,) = problems("--dry-run", "--config", str(folder / "train.toml"))
        assert only == (
            "--hf-checkpoint and --prompt-data and --eval-prompt-data: not made yet; a script beside train.toml makes "
            f"what is missing: {command.format(place)}"
        )
    # What is missing elsewhere is not made by that script.
    (hint, other) = problems("--config", str(folder / "train.toml"), "--hf-checkpoint", "nowhere")
    assert hint.startswith("--prompt-data and --eval-prompt-data: not made yet")
    assert other.startswith("--hf-checkpoint: ")
    assert "download the model first" in other
    elsewhere = ["--hf-checkpoint", "nowhere", "--prompt-data", "no.jsonl", "--eval-prompt-data", "a", "b.jsonl"]
    assert not [p for p in problems("--config", str(folder / "train.toml"), *elsewhere) if "not made yet" in p]


def test_a_configuration_that_names_no_command_names_its_script(workspace: Path) -> None:
    (workspace / "train.toml").write_text('hf-checkpoint = "${config_dir}/model"\nprompt-data = ["prompts.jsonl"]\n')
    assert not [p for p in problems("--config", "train.toml") if "not made yet" in p], "no script"
    (workspace / "reward.py").touch()
    (workspace / "make_model.py").touch()
    (found,) = [p for p in problems("--config", "train.toml") if "not made yet" in p]
    assert found == (
        "--hf-checkpoint: not made yet; a script beside train.toml makes what is missing: "
        f"python {workspace / 'make_model.py'}"
    )


def test_a_folder_without_a_tokenizer_is_not_said_to_have_no_chat_template(workspace: Path, start: list[str]) -> None:
    (workspace / "small" / "tokenizer.json").unlink()
    words = [*start, "--apply-chat-template"]
    lacks = (
        "has no tokenizer: it must hold one of tokenizer.json, tokenizer.model, vocab.json; download the whole model"
    )
    (note,) = [n for n in resolve([*words, "--dry-run"], {}).notes if "token" in n]
    (problem,) = problems(*words)
    assert lacks in note
    assert lacks in problem
