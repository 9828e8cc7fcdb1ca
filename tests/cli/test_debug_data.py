"""Saved rollouts read back as they were, and unreadable ones say where."""

from pathlib import Path

import pytest
from relax_cli.run.debug_data import load_groups, path_for, save_groups
from relax_data.types import Prompt, SampleGroup, SampleStatus


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


def test_each_rollout_has_a_file_of_its_own_in_whatever_format() -> None:
    """``{rollout_id:04d}`` passes the check of the option, so it has to work."""
    assert path_for("r_{rollout_id}.jsonl", 12) == Path("r_12.jsonl")
    assert path_for("r_{rollout_id:04d}.jsonl", 12) == Path("r_0012.jsonl")
