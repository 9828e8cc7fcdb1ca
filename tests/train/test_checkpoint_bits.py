"""A checkpoint of which bits have changed is refused, and none runs code, whoever wrote it."""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from relax_train.checkpoint import manifest
from relax_train.checkpoint.folders import CheckpointError
from relax_train.checkpoint.no_code import read_index


class Program:
    """A pickle of it makes the folder ``path`` when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def _flip(file: Path, place: float = 0.5) -> None:
    """Changes one bit, so that the file stays as long as it was."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(content)


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _object_in_a_shard(folder: Path, program: Program) -> None:
    """Lets the index name bytes at the end of a shard for one of the objects that are no tensors."""
    index = read_index(folder / ".metadata")
    key = next(k for k in index.storage_data if type(index.state_dict_metadata[k.fqn]).__name__.startswith("Bytes"))
    part = index.storage_data[key]
    with (folder / part.relative_path).open("ab") as shard:
        part.offset = shard.tell()
        torch.save(program, shard)
        part.length = shard.tell() - part.offset
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def _change_moment(folder: Path, change: Callable[[dict[str, Any], str], object]) -> None:
    """Changes what the index says of a moment that two data-parallel ranks have parts of."""
    index = read_index(folder / ".metadata")
    stored = index.state_dict_metadata
    change(stored, next(name for name in stored if name.startswith("exp_avg.") and len(stored[name].chunks) > 1))
    (folder / ".metadata").write_bytes(pickle.dumps(index))


LACKING: dict[str, tuple[Callable[[dict[str, Any], str], object], str]] = {
    "no moment": (lambda stored, name: stored.pop(name), r"it has exp_avg\.model\.\S+ of shape None, this model takes"),
    "a part of a moment": (lambda stored, name: stored[name].chunks.pop(), r"it does not have all of exp_avg\.model"),
    "another shape": (lambda stored, name: setattr(stored[name], "size", torch.Size([7])), r"of shape \(7,\), this"),
}
"""Checkpoints of two ranks whose checksums are right, and whose optimizer state is not whole."""

DAMAGES: dict[str, Callable[[Path, Program], object]] = {
    "bit of a shard": lambda folder, _: _flip(folder / "__0_0.distcp"),
    "bit of the last object of a shard": lambda folder, _: _flip(folder / "__0_0.distcp", 0.999),
    "bit of the small objects": lambda folder, _: _flip(folder / "common.pt"),
    "bit of the index": lambda folder, _: _flip(folder / ".metadata"),
    "bit of the random numbers": lambda folder, _: _flip(folder / "rng_0.pt"),
    "pipe as marker": lambda folder, _: _pipe(folder.parent / "latest"),
    "pipe as manifest": lambda folder, _: _pipe(folder / "relax.json"),
    "pipe as list of files": lambda folder, _: _pipe(folder / "files.json"),
    "pipe as small objects": lambda folder, _: _pipe(folder / "common.pt"),
    "pipe as index": lambda folder, _: _pipe(folder / ".metadata"),
    "pipe as random numbers": lambda folder, _: _pipe(folder / "rng_0.pt"),
}

PROGRAMS: dict[str, Callable[[Path, Program], object]] = {
    "index": lambda folder, program: (folder / ".metadata").write_bytes(pickle.dumps(program)),
    "small objects": lambda folder, program: torch.save(program, folder / "common.pt"),
    "random numbers": lambda folder, program: torch.save({"python": program}, folder / "rng_0.pt"),
    "object in a shard": _object_in_a_shard,
}


def _load_damaged(harness: Any, reference: Any, folder: Path) -> dict[str, tuple[str, bool]]:
    """The error of each damage, and whether a program has run."""
    import shutil

    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    run = harness(reference.folder, {})
    run.step(reference.rows[0])
    save_checkpoint(folder / "whole", 0, run.model, run.optimizer, extra={"cursor": 1})
    results = {}
    for name, damage in {**DAMAGES, **PROGRAMS}.items():
        shutil.copytree(folder / "whole", folder / name)
        ran = folder / f"{name} ran"
        damage(folder / name / "rollout_0", Program(ran))
        if name in PROGRAMS:
            manifest.record_files(folder / name / "rollout_0")  # a stranger gives the right checksums with it
        try:
            load_checkpoint(folder / name, run.model, run.optimizer)
            error = ""
        except CheckpointError as caught:
            error = str(caught)
        results[name] = error, ran.exists()
    loaded = load_checkpoint(folder / "whole", run.model, run.optimizer)
    assert loaded is not None
    assert loaded.extra == {"cursor": 1}
    return results


def test_what_has_changed_is_refused_and_no_program_runs(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    results = run_ranks(_load_damaged, 1, harness, reference("qwen3"), tmp_path)[0]
    assert [name for name, (error, _) in results.items() if not error] == [], "these were loaded"
    assert [name for name, (_, ran) in results.items() if ran] == [], "these ran code"
    for name, (error, _) in results.items():
        assert error.startswith(f"--load: {tmp_path / name}") or str(tmp_path / name) in error, error


def _load_lacking(harness: Any, reference: Any, folder: Path) -> dict[str, str]:
    import shutil

    import torch.distributed as dist
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    run = harness(reference.folder, {})
    save_checkpoint(folder / "whole", 0, run.model, run.optimizer)
    results = {}
    for name, (damage, _) in LACKING.items():
        if run.parallel.rank == 0:
            shutil.copytree(folder / "whole", folder / name)
            _change_moment(folder / name / "rollout_0", damage)
            manifest.record_files(folder / name / "rollout_0")
        dist.barrier()
        with pytest.raises(CheckpointError, match="cannot read") as error:
            load_checkpoint(folder / name, run.model, run.optimizer)
        results[name] = str(error.value)
    return results


def test_optimizer_state_that_is_not_whole_is_refused_on_every_rank(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    first, second = run_ranks(_load_lacking, 2, harness, reference("qwen3"), tmp_path)
    assert first == second
    for name, (_, expected) in LACKING.items():
        assert re.search(expected, first[name]), first[name]


LAYOUT = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "data_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}


def _written(directory: Path, **changes: Any) -> Path:
    """A folder with a checkpoint of one shard and this manifest."""
    folder = directory / "rollout_3"
    folder.mkdir(parents=True)
    content = {
        "format": manifest.FORMAT,
        "rollout_id": 3,
        "world_size": 1,
        "layout": LAYOUT,
        "model": {},
        "dtype": "float32",
        "optimizer": {"name": manifest.OPTIMIZER, "steps": 4},
        "scheduler": {"num_steps": 4},
        "extra": {},
    }
    (folder / manifest.MANIFEST).write_text(json.dumps(content | changes))
    (folder / "shard").write_bytes(bytes(1000))
    for name in (".metadata", "common.pt", "metadata.json", "rng_0.pt"):
        (folder / name).touch()
    manifest.record_files(folder)
    return folder


def _content(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / manifest.MANIFEST).read_text())
    return content


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduler", []),
        ("scheduler", {}),
        ("scheduler", {"num_steps": "4"}),
        ("scheduler", {"num_steps": -1}),
        ("extra", None),
        ("extra", [1]),
        ("layout", [1]),
        ("layout", {}),
        ("layout", {"tensor_model_parallel_size": 1}),
        ("layout", {**LAYOUT, "tensor_model_parallel_size": "1"}),
        ("model", 5),
        ("model", None),
        ("world_size", 0),
        ("world_size", True),
        ("optimizer", None),
        ("optimizer", {"name": "adam", "steps": 0.5}),
        ("dtype", "int8"),
        ("dtype", ["float32"]),
    ],
)
def test_an_odd_entry_of_the_manifest_is_named(tmp_path: Path, name: str, value: Any) -> None:
    _written(tmp_path, **{name: value})
    with pytest.raises(CheckpointError, match=rf"relax\.json is damaged: its {name} is not"):
        manifest.find(tmp_path)


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_what_format_1_never_had_is_not_asked_of_it(tmp_path: Path, name: str) -> None:
    folder = _written(tmp_path)
    content = json.loads((folder / manifest.MANIFEST).read_text())
    del content[name]
    (folder / manifest.MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        manifest.find(tmp_path)
    (folder / manifest.MANIFEST).write_text(json.dumps(content | {"format": manifest.OLD_FORMAT}))
    assert manifest.find(tmp_path) is not None


def test_sizes_that_do_not_make_the_number_of_ranks(tmp_path: Path) -> None:
    _written(tmp_path, layout={**LAYOUT, "data_parallel_size": 3})
    with pytest.raises(CheckpointError, match="its world_size is 1, the sizes in its layout make 3 ranks"):
        manifest.find(tmp_path)


@pytest.mark.parametrize("content", [b"", b"rollout_\xd9\xa3", b"rollout_" + b"3" * 5000, b"../rollout_3", b"\0" * 9])
def test_a_marker_of_nonsense_is_one_error(tmp_path: Path, content: bytes) -> None:
    _written(tmp_path)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest .*write the name of"):
        manifest.find(tmp_path)


def test_a_changed_bit_is_found_by_its_checksum_wherever_it_is(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    assert manifest.files_problem(folder, _content(folder)) is None
    content = _content(folder)
    for file in (folder / "shard", folder / manifest.MANIFEST):
        _flip(file)
        assert f"{file} has changed since it was written" in str(manifest.files_problem(folder, content))
        _flip(file)
    assert manifest.files_problem(folder, _content(folder)) is None


def test_ranks_share_the_reading(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    _flip(folder / "shard")
    found = [manifest.files_problem(folder, _content(folder), part, 3) for part in range(3)]
    assert [problem is not None for problem in found] == [False, False, True], "shard is the last of six files"


def test_a_checkpoint_of_format_1_with_sizes_alone_still_loads(tmp_path: Path) -> None:
    folder = _written(tmp_path)
    recorded = json.loads((folder / "files.json").read_text())
    del recorded["crc32"]
    (folder / "files.json").write_text(json.dumps(recorded))
    assert manifest.files_problem(folder, _content(folder) | {"format": manifest.OLD_FORMAT}) is None
