"""What a run writes: names that a file system takes, and nothing in the place of what the run itself needs."""

import os
import shutil
from pathlib import Path

import pytest
from command_words import changed
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_cli.run.debug_data import path_for


def problems(argv: list[str]) -> list[str]:
    try:
        resolve(argv, {})
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("words", "replaced"),
    [
        ("--save x0 --save-hf x{rollout_id}", "--save-hf {folder}/x{rollout_id}: rollout 0 would replace"),
        (
            "--save x1/deep/er --save-hf x{rollout_id}",
            "rollout 1 would replace {folder}/x1/deep/er (--save)",
        ),
        ("--hf-checkpoint exports/1 --save-hf exports/{rollout_id}", "exports/1 (--hf-checkpoint)"),
        ("--hf-checkpoint exports/rollout_1 --save exports", "--save {folder}/exports/rollout_"),
        ("--prompt-data d1.jsonl --save-debug-rollout-data d{rollout_id}.jsonl", "d1.jsonl (prompts)"),
        ("--prompt-data d01.jsonl --save-debug-rollout-data d{rollout_id:02d}.jsonl", "(prompts)"),
        (
            "--eval-interval 1 --eval-prompt-data a d1.jsonl --save-debug-rollout-data d{rollout_id}.jsonl",
            "d1.jsonl (prompts)",
        ),
        ("--tb-experiment-name 1 --save-hf runs/{rollout_id}", "runs/1 (the run directory)"),
        ("--hf-checkpoint link/1 --save-hf exports/{rollout_id}", "link/1 (--hf-checkpoint)"),
        ("--hf-checkpoint exports/1 --save-hf link/{rollout_id}", "exports/1 (--hf-checkpoint)"),
    ],
)
def test_a_run_does_not_replace_what_it_needs(workspace: Path, start: list[str], words: str, replaced: str) -> None:
    for folder in ("exports/1", "exports/rollout_1"):
        shutil.copytree("small", folder)
    os.symlink("exports", "link")
    for name in ("d1.jsonl", "d01.jsonl"):
        shutil.copy("prompts.jsonl", name)
    (problem,) = problems(changed(start, words.split()))
    assert "would replace" in problem
    assert replaced.replace("{folder}", str(workspace)) in problem


@pytest.mark.parametrize(
    "words",
    [
        "--save x --save-hf x{rollout_id}",
        "--save x --load x --save-hf x/hf_{rollout_id}",
        "--save x00 --save-hf x{rollout_id}",
        # The run ends before that rollout, or begins after it.
        "--hf-checkpoint exports/1 --save-hf exports/{rollout_id} --num-rollout 1",
        "--hf-checkpoint exports/1 --save-hf exports/{rollout_id} --num-rollout 9 --start-rollout-id 2",
        "--hf-checkpoint exports/1 --save-hf exports/next-{rollout_id}",
        "--prompt-data d1.jsonl --save-debug-rollout-data d{rollout_id:02d}.jsonl",
        "--save-debug-rollout-data samples/{rollout_id}/all.jsonl",
    ],
)
def test_what_lies_beside_is_left_alone(workspace: Path, start: list[str], words: str) -> None:
    shutil.copytree("small", "exports/1")
    shutil.copy("prompts.jsonl", "d1.jsonl")
    assert problems(changed(start, words.split())) == []


LONG = "é" * 128  # 256 bytes


@pytest.mark.parametrize(
    "words",
    [
        ["--save", "a" * 300],
        ["--save", f"a/{LONG}/b"],
        ["--save", "/".join(["a" * 100] * 50)],
        ["--save-hf", "a" * 250 + "{rollout_id}"],
        ["--save-debug-rollout-data", "a" * 250 + "{rollout_id}"],
        ["--use-pytorch-profiler", "--sglang-profile", "--sglang-profile-output-dir", LONG],
        ["--record-memory-history", "--memory-snapshot-dir", LONG],
    ],
)
def test_a_name_that_no_file_system_takes_is_refused(workspace: Path, start: list[str], words: list[str]) -> None:
    flag = next(word for word in reversed(words) if word.startswith("--"))
    found = problems([*start, "--dry-run", *words])
    assert any(p.startswith(flag) and "a name in it is too long" in p for p in found), found


def test_the_longest_names_are_right(workspace: Path, start: list[str]) -> None:
    words = ["--save", "a" * 251, "--save-hf", "a" * 200 + "{rollout_id}", "--tb-experiment-name", "é" * 127 + "a"]
    assert problems([*start, *words]) == []


def test_the_name_of_a_run_is_the_name_of_a_folder(workspace: Path, start: list[str]) -> None:
    (problem,) = problems([*start, "--tb-experiment-name", LONG])
    assert problem.startswith("--tb-experiment-name has 256 bytes")


def test_the_end_of_a_snapshots_name_leaves_room_for_its_beginning(workspace: Path, start: list[str]) -> None:
    words = [*start, "--record-memory-history", "--memory-snapshot-path"]
    assert problems([*words, "a" * 150]) == []
    (problem,) = problems([*words, "a" * 151])
    assert problem.startswith("--memory-snapshot-path has 151 bytes")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("a", "must hold {rollout_id}"),
        ("a{{rollout_id}}", "must hold {rollout_id}"),
        ("{rollout_id!r:>99999999999}", "and nothing else"),
        ("{rollout_id:99999999999d}", "and nothing else"),
        ("{rollout_id:x}", "and nothing else"),
        ("{rollout_id}{rollout_id!s}", "and nothing else"),
        ("{rollout_id}{0}", "and nothing else"),
        ("{rollout_id.real}", "and nothing else"),
        ("{rollout_id:{rollout_id}}", "and nothing else"),
        ("a{rollout_id", "is no path with {rollout_id}"),
    ],
)
def test_a_path_with_more_than_a_rollout_id_is_refused(workspace: Path, start: list[str], path: str, part: str) -> None:
    for words in (
        ["--save-debug-rollout-data", path],
        ["--debug-train-only", "--load-debug-rollout-data", path],
    ):
        (problem,) = problems([*start, *words])
        assert problem.startswith(words[-2])
        assert part in problem


@pytest.mark.parametrize(
    ("path", "third"),
    [
        ("a{rollout_id}.jsonl", "a3.jsonl"),
        ("a{rollout_id:04d}.jsonl", "a0003.jsonl"),
        ("a{rollout_id:d}", "a3"),
        ("{rollout_id:04}/{rollout_id}", "0003/3"),
    ],
)
def test_a_path_may_have_leading_zeros(workspace: Path, start: list[str], path: str, third: str) -> None:
    config = resolve([*start, "--save-debug-rollout-data", path], {})
    template = config.debug.save_debug_rollout_data
    assert template is not None
    assert path_for(template, 3) == workspace / third
