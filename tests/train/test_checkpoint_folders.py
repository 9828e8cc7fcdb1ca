"""Folders of checkpoints without a trainer: a crash while one is replaced, what is removed, what is damaged."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from relax_train.checkpoint import manifest
from relax_train.checkpoint.folders import CheckpointError, latest_rollout, prune, publish, rollout_folder, set_latest

MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
MANIFEST = {
    "format": manifest.FORMAT,
    "world_size": 1,
    "layout": {"tensor_model_parallel_size": 2, "data_parallel_size": 1},
    "optimizer": {"name": manifest.OPTIMIZER, "steps": 4},
    "dtype": "float32",
    "model": manifest.architecture(MODEL),
    "scheduler": {"num_steps": 3},
    "extra": {},
}


def save(directory: Path, rollout_id: int, content: str = "", keep: int | None = None) -> Path:
    """What the trainer does around its own files."""
    target = rollout_folder(directory, rollout_id)
    unfinished = target.with_name(target.name + ".tmp")
    unfinished.mkdir(parents=True)
    (unfinished / manifest.MANIFEST).write_text(json.dumps({**MANIFEST, "rollout_id": rollout_id}))
    (unfinished / "shard").write_text(content)
    manifest.record_files(unfinished)
    publish(unfinished, target)
    set_latest(directory, target.name)
    if keep is not None:
        prune(directory, keep)
    return target


class Crash(BaseException):
    """The process ends here."""


def crash_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The ``number``-th rename from now on does not happen any more."""
    done, rename = [0], Path.rename

    def counted(self: Path, target: Any) -> Path:
        done[0] += 1
        if done[0] == number:
            raise Crash
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", counted)


def test_a_first_checkpoint_that_nothing_points_to_is_found(tmp_path: Path) -> None:
    """The first save was killed just before it wrote ``latest``; with several checkpoints it is for the user to say."""
    assert latest_rollout(tmp_path) is None
    save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    assert latest_rollout(tmp_path) == 3
    assert manifest.find(tmp_path) is not None
    save(tmp_path, 5)
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="write one of rollout_3, rollout_5 into it"):
        manifest.find(tmp_path)


@pytest.mark.parametrize("number", [1, 2])
def test_a_crash_between_the_renames_loses_neither_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 3)
    save(tmp_path, 5, "first")
    with monkeypatch.context() as patch:
        crash_at_rename(patch, number)
        with pytest.raises(Crash):
            save(tmp_path, 5, "second")
    assert latest_rollout(tmp_path) == 5
    found = manifest.find(tmp_path)
    assert found is not None
    assert (found[0] / "shard").read_text() == "first"
    assert manifest.files_problem(found[0]) is None
    prune(tmp_path, 1)
    assert latest_rollout(tmp_path) == 5
    for left in tmp_path.glob("*.tmp"):  # as the next save does
        for file in left.iterdir():
            file.unlink()
        left.rmdir()
    save(tmp_path, 5, "third")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rollout_5"]
    assert (tmp_path / "rollout_5" / "shard").read_text() == "third"


def test_after_a_resume_from_an_earlier_one_the_newest_written_are_kept(tmp_path: Path) -> None:
    for rollout_id in (3, 7, 11):
        save(tmp_path, rollout_id)
    for rollout_id in (4, 5, 6):
        save(tmp_path, rollout_id, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rollout_5", "rollout_6"]


def test_the_one_to_resume_from_is_kept_whenever_it_was_written(tmp_path: Path) -> None:
    for rollout_id in (3, 7, 11):
        save(tmp_path, rollout_id)
    set_latest(tmp_path, "rollout_3")
    prune(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rollout_11", "rollout_3"]


def test_half_a_checkpoint_is_known_as_such(tmp_path: Path) -> None:
    folder = save(tmp_path, 0, "x" * 100)
    assert manifest.files_problem(folder) is None
    os.truncate(folder / "shard", 40)
    assert f"{folder / 'shard'} was cut off or changed: it has 40 of 100 bytes" == manifest.files_problem(folder)
    (folder / "shard").unlink()
    assert f"{folder / 'shard'} is missing" == manifest.files_problem(folder)
    (folder / manifest.FILES).write_text("[]")
    assert "cannot be read" in str(manifest.files_problem(folder))
    (folder / manifest.FILES).unlink()
    assert manifest.files_problem(folder) is None, "written by an earlier version"


def test_another_model_is_named_with_what_differs(tmp_path: Path) -> None:
    folder = save(tmp_path, 0)
    saved = {**MANIFEST, "rollout_id": 0}
    spelled_out = {**MODEL, "head_dim": 16, "num_key_value_heads": 4, "tie_word_embeddings": False}
    assert manifest.architecture_problem(saved, spelled_out, folder) is None
    problem = manifest.architecture_problem(saved, {**MODEL, "num_hidden_layers": 4}, folder)
    assert problem is not None
    assert "num_hidden_layers 2 instead of 4" in problem
    assert "--hf-checkpoint" in problem


@pytest.mark.parametrize("content", [b"\xff", b"{", b'{"a":' * 100_000, b"[]", b'{"format": 1}'])
def test_a_manifest_that_is_none_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    folder = save(tmp_path, 0)
    (folder / manifest.MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=str(folder / manifest.MANIFEST)):
        manifest.find(tmp_path)
