"""Folders of checkpoints without a trainer: a crash while one is replaced, what is removed, what is damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_train.checkpoint import manifest
from relax_train.checkpoint.folders import (
    FILES,
    CheckpointError,
    latest_rollout,
    prune,
    publish,
    rollout_folder,
    set_latest,
)

MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
MANIFEST = {
    "format": manifest.FORMAT,
    "world_size": 1,
    "layout": {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
    },
    "optimizer": {"name": manifest.OPTIMIZER, "steps": 4},
    "dtype": "float32",
    "model": manifest.architecture(MODEL),
    "scheduler": {"num_steps": 3},
    "extra": {},
}

OLD = {key: value for key, value in MANIFEST.items() if key not in ("model", "optimizer")} | {"format": 1}


def save(directory: Path, rollout_id: int, content: str = "", keep: int | None = None) -> Path:
    """What the trainer does around its own files."""
    target = rollout_folder(directory, rollout_id)
    unfinished = target.with_name(target.name + ".tmp")
    unfinished.mkdir(parents=True)
    (unfinished / manifest.MANIFEST).write_text(json.dumps({**MANIFEST, "rollout_id": rollout_id}))
    (unfinished / "shard").write_text(content)
    (unfinished / ".metadata").write_bytes(b"\x80\x05 __0_0.distcp __0_0.distcp __11_3.distcp .")
    for name in ("__0_0.distcp", "__11_3.distcp", "common.pt", "metadata.json", "rng_0.pt"):
        (unfinished / name).touch()
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
    assert manifest.files_problem(*found) is None
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
    assert manifest.files_problem(folder, MANIFEST) is None
    os.truncate(folder / "shard", 40)
    assert f"{folder / 'shard'} was cut off or changed: it has 40 of 100 bytes" == manifest.files_problem(
        folder, MANIFEST
    )
    (folder / "shard").unlink()
    assert f"{folder / 'shard'} is missing" == manifest.files_problem(folder, MANIFEST)
    (folder / FILES).unlink()
    assert f"{folder / FILES} is missing: a save writes it last" in str(manifest.files_problem(folder, MANIFEST))


def test_the_first_checkpoints_of_format_1_had_no_list_of_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 0)
    (folder / FILES).unlink()
    assert manifest.files_problem(folder, OLD) is None
    (folder / "__11_3.distcp").unlink()
    assert manifest.files_problem(folder, OLD) == f"{folder / '__11_3.distcp'} is missing"


def _edit_list(key: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / FILES).read_text())
        change(content if key == "" else content[key])
        (folder / FILES).write_text(json.dumps(content))

    return edit


def _unlist(name: str) -> Callable[[Path], None]:
    def unlist(folder: Path) -> None:
        for key in ("files", "crc32"):
            _edit_list(key, lambda entries: entries.pop(name))(folder)

    return unlist


def _lose(name: str) -> Callable[[Path], None]:
    """Removes a file and its entries, as one does who wants a damaged checkpoint to look whole."""

    def lose(folder: Path) -> None:
        _unlist(name)(folder)
        (folder / name).unlink()

    return lose


LISTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no object": (lambda folder: (folder / FILES).write_text("[]"), "it holds no JSON object"),
    "no sizes": (_edit_list("", lambda content: content.pop("files")), "it has no entry 'files' with the sizes"),
    "sizes a text": (_edit_list("", lambda content: content.update(files="x")), "it has no entry 'files'"),
    "no checksums": (_edit_list("", lambda content: content.pop("crc32")), "it has no entry 'crc32' with the checks"),
    "empty checksums": (_edit_list("", lambda content: content.update(crc32={})), "its 'crc32' lacks '.metadata'"),
    "size of nothing": (_edit_list("files", lambda sizes: sizes.pop("shard")), "its 'files' lacks 'shard'"),
    "size a text": (_edit_list("files", lambda sizes: sizes.update(shard="0")), "'shard' has no whole number"),
    "other place": (
        _edit_list("files", lambda sizes: sizes.update({"../../../../etc/passwd": 1})),
        "names '../../../../etc/passwd', which is no name of a file of this folder",
    ),
    "absolute place": (_edit_list("crc32", lambda sums: sums.update({"/etc/passwd": 1})), "no name of a file of this"),
    "folder above": (_edit_list("files", lambda sizes: sizes.update({"..": 1})), "no name of a file of this folder"),
    "lost shard": (_lose("__11_3.distcp"), "__11_3.distcp is missing"),
    "lost index": (_lose(".metadata"), ".metadata is missing"),
    "lost manifest": (_lose("relax.json"), "relax.json is missing"),
    "lost random numbers": (_lose("rng_0.pt"), "rng_0.pt is missing"),
    "shard not listed": (
        _unlist("__0_0.distcp"),
        "it lacks '__0_0.distcp', which the checkpoint needs",
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_files_that_no_save_wrote_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 0)
    assert manifest.files_problem(folder, MANIFEST) is None
    damage, says = LISTS[name]
    damage(folder)
    problem = manifest.files_problem(folder, MANIFEST)
    assert problem is not None
    assert says in problem
    assert str(folder) in problem
    assert "Error(" not in problem


def test_one_checkpoint_given_as_the_folder_of_checkpoints(tmp_path: Path) -> None:
    folder = save(tmp_path, 7)
    with pytest.raises(CheckpointError, match=f"is one checkpoint itself: give its parent {tmp_path}"):
        manifest.find(folder)


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
