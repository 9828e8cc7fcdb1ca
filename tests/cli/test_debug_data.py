"""Saved rollouts read back as they were, and unreadable ones say where."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_cli.run.debug_data import FileRows, load_groups, path_for, read_manifest, save_groups
from relax_data.types import ROW_COLUMNS, BatchRows, Prompt, SampleGroup, SampleStatus, StepManifest, TrainBatch


def group(prompt_id: int) -> SampleGroup:
    prompt = Prompt(
        prompt_id=prompt_id, epoch=0, source=f"a.jsonl:{prompt_id + 1}", text="1+1=", input_ids=[4, 5], label="2"
    )
    made = SampleGroup.start(prompt, 2)
    for i, sample in enumerate(made.samples):
        sample.append([7, 1], [-0.5, -0.25], 3, loss_mask=[1, 0])
        sample.status, sample.reward, sample.response = SampleStatus.COMPLETED, float(i), "2"
    return made


def test_groups_read_back_equal(tmp_path: Path) -> None:
    path = path_for(str(tmp_path / "deep" / "rollout_{rollout_id}.jsonl"), 12)
    assert path.name == "rollout_12.jsonl"
    groups = [group(0), group(1)]
    save_groups(groups, path)
    assert load_groups(path) == groups
    assert [p.name for p in path.parent.iterdir()] == ["rollout_12.jsonl"]


def test_a_missing_file_names_the_flag_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--load-debug-rollout-data: .*r_0 does not exist.*--save-debug-rollout-data"):
        load_groups(tmp_path / "r_0")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    save_groups([group(0), group(1)], path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][: len(lines[1]) // 2])
    with pytest.raises(ValueError, match=r"r\.jsonl:2 is not a saved group"):
        load_groups(path)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("loss_mask", [1]),
        ("loss_mask", [1, 7]),
        ("log_probs", [None, None]),
        ("log_probs", [-1.0]),
        ("versions", [0]),
        ("tokens", [1.5, 2.0]),
        ("reward", "1"),
    ],
)
def test_a_column_that_does_not_fit_is_named_with_its_line(tmp_path: Path, column: str, values: Any) -> None:
    path = tmp_path / "r.jsonl"
    save_groups([group(0), group(1)], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["samples"][1][column] = values
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for read in (load_groups, lambda file: read_manifest(file, 0), lambda file: FileRows(file, 0).fetch([3])):
        with pytest.raises(ValueError, match=rf"r\.jsonl:2 .*a\.jsonl:2 response 1: .*\b{column}\b"):
            read(path)


def test_each_rollout_has_a_file_of_its_own_in_whatever_format() -> None:
    """``{rollout_id:04d}`` passes the check of the option, so it has to work."""
    assert path_for("r_{rollout_id}.jsonl", 12) == Path("r_12.jsonl")
    assert path_for("r_{rollout_id:04d}.jsonl", 12) == Path("r_0012.jsonl")


def test_manifest_and_rows_of_a_file_are_those_of_the_whole_batch(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    groups = [group(0), group(1), group(2)]
    groups[1].samples[0].append([9], [-1.5], 4)
    save_groups(groups, path)
    batch = TrainBatch.from_groups(groups, 8)

    manifest, reward = read_manifest(path, 8)
    assert reward == 0.5
    expected = dataclasses.asdict(StepManifest.of(batch))
    for name, values in dataclasses.asdict(manifest).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        assert type(values) is type(expected[name]), name
        assert str(getattr(values, "dtype", "")) == str(getattr(expected[name], "dtype", "")), name

    wanted = [4, 2, 1]
    rows, same = FileRows(path, 8).for_rank(1, manifest).fetch(wanted), BatchRows(batch).fetch(wanted)
    assert list(rows) == list(ROW_COLUMNS)
    for name in ROW_COLUMNS:
        for got, value in zip(rows[name], same[name], strict=True):
            np.testing.assert_array_equal(got, value)


def test_a_saved_sample_without_a_token_cannot_be_trained_on(tmp_path: Path) -> None:
    empty = group(0)
    empty.samples[1].restart()
    empty.samples[1].status, empty.samples[1].reward = SampleStatus.COMPLETED, 0.0
    save_groups([empty], tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 response 1 cannot be trained on"):
        read_manifest(tmp_path / "r.jsonl", 0)
