"""Checkpoints: a resumed run continues bit for bit, a failed save harms nothing."""

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "one": ("qwen3", 1, {}),
    "offload": ("qwen3", 1, {"optimizer_cpu_offload": True}),
    "dp2": ("qwen3", 2, {}),
    "pp2": ("qwen3", 2, {"pipeline_model_parallel_size": 2}),
    "ep2": ("qwen3_moe", 2, {"expert_model_parallel_size": 2}),
    "tp2-dp2": ("qwen3", 4, SP),
}


def _save(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    from relax_train.checkpoint.save_load import save_checkpoint

    run = harness(reference.folder, parallel, lr_decay_style="linear", lr_decay_iters=10)
    run.step(reference.rows[0])
    torch.manual_seed(99)
    save_checkpoint(folder, 4, run.model, run.optimizer, extra={"cursor": [1, 2]})
    drawn = torch.rand(3)
    after = [run.step(rows) for rows in reference.rows[1:]]
    return after, drawn, run.weights()


def _resume(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint

    run = harness(reference.folder, parallel, lr_decay_style="linear", lr_decay_iters=10)
    loaded = load_checkpoint(folder, run.model, run.optimizer)
    drawn = torch.rand(3)
    after = [run.step(rows) for rows in reference.rows[1:]]
    return loaded, after, drawn, run.weights()


@pytest.mark.parametrize("case", LAYOUTS)
def test_resumed_run_is_the_same_run(
    case: str, run_ranks: Callable[..., Any], harness: Any, reference: Any, tmp_path: Path
) -> None:
    kind, world, parallel = LAYOUTS[case]
    straight = run_ranks(_save, world, harness, reference(kind), parallel, tmp_path)
    resumed = run_ranks(_resume, world, harness, reference(kind), parallel, tmp_path)
    for (steps, drawn, weights), (loaded, steps2, drawn2, weights2) in zip(straight, resumed, strict=True):
        assert (loaded.rollout_id, loaded.extra, loaded.optimizer) == (4, {"cursor": [1, 2]}, True)
        assert steps == steps2
        assert torch.equal(drawn, drawn2)
        assert all(torch.equal(weights[name], weights2[name]) for name in weights)


def _resume_with_other_flags(harness: Any, reference: Any, folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    first = harness(reference.folder, {}, lr_decay_style="linear", lr_decay_iters=10)
    first.step(reference.rows[0])
    save_checkpoint(folder, 0, first.model, first.optimizer)
    from relax_train.backend.optimizer import build_optimizer

    flags = dataclasses.replace(first.settings.optimizer, lr=0.5, adam_beta2=0.5, weight_decay=0.25)
    other = build_optimizer(dataclasses.replace(first.settings, optimizer=flags), first.model)
    load_checkpoint(folder, first.model, other)
    group = other.megatron.param_groups[-1]
    moments = [state["step"].item() for part in other.parts for state in part.optimizer.state.values()]
    return other.lr, group["betas"][1], max(g["weight_decay"] for g in other.megatron.param_groups), moments


def test_flags_of_the_new_start_win_over_those_of_the_checkpoint(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    lr, beta2, decay, steps = run_ranks(_resume_with_other_flags, 1, harness, reference("qwen3"), tmp_path)[0]
    assert lr == pytest.approx(0.5 * 9 / 10)  # one of ten steps of the new schedule is done
    assert (beta2, decay) == (0.5, 0.25)
    assert set(steps) == {1.0}


def _weights_only(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint

    run = harness(reference.folder, parallel)
    return load_checkpoint(folder, run.model, None), run.weights()


def _save_weights(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    from relax_train.checkpoint.save_load import save_checkpoint

    run = harness(reference.folder, parallel)
    run.step(reference.rows[0])
    save_checkpoint(folder, 0, run.model, run.optimizer)
    return run.weights()


@pytest.mark.parametrize(
    ("kind", "saved", "loaded", "world"),
    [
        ("qwen2", SP, {}, 1),
        ("qwen2", SP, {"pipeline_model_parallel_size": 2}, 2),
        ("qwen3_moe", {"expert_model_parallel_size": 2}, {}, 1),
    ],
    ids=["padded tp2 to one", "padded tp2 to pp2", "ep2 to one"],
)
def test_weights_load_under_another_layout(
    kind: str, saved: Any, loaded: Any, world: int, run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    expected = run_ranks(_save_weights, 2, harness, reference(kind), saved, tmp_path)[0]
    for result, weights in run_ranks(_weights_only, world, harness, reference(kind), loaded, tmp_path):
        assert (result.rollout_id, result.optimizer) == (0, False)
        assert all(torch.equal(expected[name], weights[name]) for name in expected)


def _save_in_format_1(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    """As versions before this one saved: megatron's own optimizer state, and a manifest without an optimizer."""
    from relax_train.checkpoint import manifest, save_load, sharded_io

    run = harness(reference.folder, parallel)
    run.step(reference.rows[0])

    def with_optimizer(model: Any) -> Any:
        state = sharded_io.sharded_weights(model)
        return state | {"optimizer": sharded_io.old_sharded_optimizer(model, run.optimizer, state)}

    def old_manifest(*args: Any) -> Any:
        return {k: v for k, v in new_manifest(*args).items() if k != "optimizer"} | {"format": manifest.OLD_FORMAT}

    new_manifest, patch = save_load._manifest, pytest.MonkeyPatch()
    with patch.context() as changed:
        changed.setattr(save_load, "sharded_weights", with_optimizer)
        changed.setattr(save_load, "pieces", lambda *_: [])
        changed.setattr(save_load, "_manifest", old_manifest)
        save_load.save_checkpoint(folder, 0, run.model, run.optimizer)
    return [run.step(rows) for rows in reference.rows[1:]]


def _resume_from_format_1(harness: Any, reference: Any, parallel: dict[str, Any], folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    run = harness(reference.folder, parallel)
    try:
        load_checkpoint(folder, run.model, run.optimizer)
    except ValueError as error:
        return str(error)
    save_checkpoint(folder, 1, run.model, run.optimizer)
    return [run.step(rows) for rows in reference.rows[1:]]


def test_a_checkpoint_of_format_1_resumes_with_its_own_sizes(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    straight = run_ranks(_save_in_format_1, 2, harness, reference("qwen3"), SP, tmp_path)
    assert "optimizer" not in json.loads((tmp_path / "rollout_0" / "relax.json").read_text())
    [refused] = run_ranks(_resume_from_format_1, 1, harness, reference("qwen3"), {}, tmp_path)
    assert f"--load: {tmp_path / 'rollout_0'} was saved by an earlier version" in refused
    assert "--tensor-model-parallel-size 2" in refused
    assert run_ranks(_resume_from_format_1, 2, harness, reference("qwen3"), SP, tmp_path) == straight
    # What it saved itself resumes with other sizes.
    for resumed, expected in zip(
        run_ranks(_resume_from_format_1, 1, harness, reference("qwen3"), {}, tmp_path)[0], straight[0], strict=True
    ):
        assert resumed == pytest.approx(expected, rel=1e-5)


def _other_precision(harness: Any, reference: Any, folder: Path) -> list[str]:
    from relax_train.checkpoint.save_load import MANIFEST, load_checkpoint, save_checkpoint

    run = harness(reference.folder, {})
    path = save_checkpoint(folder, 0, run.model, run.optimizer)
    manifest = json.loads((path / MANIFEST).read_text())
    messages = []
    for change in ({"dtype": "bfloat16"}, {"optimizer": {"name": "muon", "steps": 1}}):
        (path / MANIFEST).write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ValueError, match="was saved") as error:
            load_checkpoint(folder, run.model, run.optimizer)
        messages.append(str(error.value))
    return messages


def test_resuming_in_another_precision_or_optimizer_is_refused(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    [[precision, optimizer]] = run_ranks(_other_precision, 1, harness, reference("qwen3"), tmp_path)
    assert "saved by a run in bfloat16, this one is in float32" in precision
    assert "resume with --bf16" in precision
    assert "saved with the optimizer 'muon', whose state 'adam' cannot take" in optimizer


def _resume_dp(harness: Any, reference: Any, folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint

    run = harness(reference.folder, {})
    load_checkpoint(folder, run.model, run.optimizer)
    return [run.step(rows) for rows in reference.rows[1:]]


def _two_steps_and_save(harness: Any, reference: Any, folder: Path) -> Any:
    from relax_train.checkpoint.save_load import save_checkpoint

    run = harness(reference.folder, {})
    run.step(reference.rows[0])
    save_checkpoint(folder, 0, run.model, run.optimizer)
    return [run.step(rows) for rows in reference.rows[1:]]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_optimizer_state_loads_with_more_or_fewer_data_parallel_ranks(
    before: int, after: int, run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    straight = run_ranks(_two_steps_and_save, before, harness, reference("qwen3"), tmp_path)[0]
    for resumed in run_ranks(_resume_dp, after, harness, reference("qwen3"), tmp_path):
        for got, expected in zip(resumed, straight, strict=True):
            assert got == pytest.approx(expected, rel=1e-5)


def _files_beside(folder: Path, rollout_id: int, rank: int) -> Path:
    """A side folder with a file of another process; called by every rank."""
    import torch.distributed as dist
    from relax_train.checkpoint.folders import side_folder

    files = side_folder(folder, rollout_id)
    if rank == 0:
        files.mkdir(parents=True)
        (files / "samples.npz").write_bytes(bytes([rollout_id]) * 1000)
    dist.barrier()
    return files


def _full_disk(harness: Any, reference: Any, folder: Path, limits: list[int], failing_rank: int) -> Any:
    import torch.distributed as dist
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint
    from relax_train.checkpoint.sharded_io import CheckpointError

    run = harness(reference.folder, {})
    run.step(reference.rows[0])
    rank = run.parallel.rank
    save_checkpoint(folder, 0, run.model, run.optimizer, files=_files_beside(folder, 0, rank))
    before = run.weights()
    run.step(reference.rows[1])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails as on a full disk
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    for limit in limits:
        files = _files_beside(folder, 1, rank)
        if run.parallel.rank == failing_rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        try:
            save_checkpoint(folder, 1, run.model, run.optimizer, files=files, keep=1)
        except CheckpointError as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    there = sorted(p.name for p in folder.iterdir())
    loaded = load_checkpoint(folder, run.model, run.optimizer)
    same = all(torch.equal(before[n], t) for n, t in run.weights().items())
    same = same and (folder / "rollout_0" / "samples.npz").read_bytes() == bytes(1000)
    dist.barrier()
    save_checkpoint(folder, 1, run.model, run.optimizer, keep=1)
    return errors, there, loaded, same, sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_full_disk_leaves_the_previous_checkpoint(
    failing_rank: int, run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    limits = [16, 40_000] if failing_rank == 0 else [40_000]
    results = run_ranks(_full_disk, 2, harness, reference("qwen3"), tmp_path, limits, failing_rank)
    for errors, files, loaded, same, finally_there in results:
        assert len(errors) == len(limits)
        for error in errors:
            assert str(tmp_path / "rollout_1") in error
            assert "MB are free" in error
            assert "checkpoint of rollout 0 is as it was" in error.lower()
        assert files == ["latest", "rollout_0"]
        assert loaded.rollout_id == 0
        assert same
        assert finally_there == ["latest", "rollout_1"]


def _keep(harness: Any, reference: Any, folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    run = harness(reference.folder, {})
    for stale in ("rollout_7.tmp", "rollout_9.rollout.tmp"):  # left by runs that were killed while they saved
        (folder / stale).mkdir(parents=True)
    for rollout_id in (3, 7, 11, 11):
        files = _files_beside(folder, rollout_id, 0) if rollout_id == 7 else None
        save_checkpoint(folder, rollout_id, run.model, run.optimizer, keep=2, extra={"id": rollout_id}, files=files)
    loaded = load_checkpoint(folder, run.model, run.optimizer, rollout_id=7)
    missing = load_checkpoint(folder / "nothing here", run.model, run.optimizer)
    return loaded, missing


def test_keeps_the_newest(run_ranks: Any, harness: Any, reference: Any, tmp_path: Path) -> None:
    loaded, missing = run_ranks(_keep, 1, harness, reference("qwen3"), tmp_path)[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "rollout_11", "rollout_7"]
    assert (tmp_path / "latest").read_text() == "rollout_11\n"
    assert (loaded.rollout_id, loaded.extra) == (7, {"id": 7})
    assert loaded.folder == tmp_path / "rollout_7"
    assert (loaded.folder / "samples.npz").read_bytes() == b"\x07" * 1000
    written = json.loads((loaded.folder / "files.json").read_text())
    assert (written["files"]["samples.npz"], "samples.npz" in written["crc32"]) == (1000, True)
    assert not (tmp_path / "rollout_11" / "samples.npz").exists()
    assert missing is None
    assert json.loads((tmp_path / "rollout_11" / "relax.json").read_text())["layout"]["data_parallel_size"] == 1


def _without_start_weights(harness: Any, reference: Any, folder: Path) -> Any:
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint

    start = folder / "start"
    shutil.copytree(reference.folder, start)
    run = harness(start, {})
    shutil.rmtree(start)
    save_checkpoint(folder, 0, run.model, run.optimizer)
    return load_checkpoint(folder, run.model, run.optimizer)


def test_a_save_needs_nothing_of_the_folder_of_start_weights(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    """A run takes days, in which what it started from may be tidied away."""
    (loaded,) = run_ranks(_without_start_weights, 1, harness, reference("qwen3"), tmp_path)
    assert loaded.rollout_id == 0


def _make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _edit_manifest(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    # What is damaged, how, and what the message says of it.
    "shard cut off": ("rollout_1/__1_0.distcp", lambda f: os.truncate(f, 100), "was cut off: it has 100 of "),
    "shard missing": ("rollout_1/__0_0.distcp", Path.unlink, "is missing"),
    "shard of rubbish": (
        "rollout_1/__0_0.distcp",
        lambda f: f.write_bytes(b"x" * f.stat().st_size),
        "has changed since it was written",
    ),
    "index": ("rollout_1/.metadata", lambda f: f.write_bytes(b"x"), "cannot be read: UnpicklingError"),
    "common part": ("rollout_1/common.pt", lambda f: os.truncate(f, 9), "cannot be read: "),
    "kind": ("rollout_1/metadata.json", lambda f: f.write_text("{"), "cannot be read: JSONDecodeError"),
    "random numbers of one rank": ("rollout_1/rng_1.pt", lambda f: os.truncate(f, 9), "was cut off or changed: "),
    "random numbers missing": ("rollout_1/rng_1.pt", Path.unlink, "is missing"),
    "samples cut off": (
        "rollout_1/samples.npz",
        lambda f: os.truncate(f, 9),
        "was cut off or changed: it has 9 of 1000",
    ),
    "samples missing": ("rollout_1/samples.npz", Path.unlink, "is missing"),
    "samples with a flipped bit": (
        "rollout_1/samples.npz",
        lambda f: f.write_bytes(b"\x01" * 500 + b"\x03" + b"\x01" * 499),
        "has changed since it was written",
    ),
    "manifest": ("rollout_1/relax.json", lambda f: f.write_bytes(b"\xff"), "cannot be read: 'utf-8'"),
    "manifest missing": ("rollout_1/relax.json", Path.unlink, "cannot be read: .*No such file"),
    "manifest no object": ("rollout_1/relax.json", lambda f: f.write_text("[]"), "has format None, .* reads format 1"),
    "manifest in parts": ("rollout_1/relax.json", lambda f: f.write_text('{"format": 1}'), "lacks dtype, extra"),
    "other rollout": ("rollout_1/relax.json", lambda f: _edit_manifest(f, rollout_id=7), "is of rollout 7"),
    "marker": ("latest", lambda f: f.write_bytes(b"\xff"), "cannot be read: .*write the name of a checkpoint"),
    "marker a folder": ("latest", _make_folder, "cannot be read: .*write the name"),
    "marker of nothing": (
        "latest",
        lambda f: f.write_text("rollout_9"),
        "'rollout_9', not .*rollout_0, rollout_1",
    ),
    "marker missing": ("latest", Path.unlink, "no file 'latest': write one of rollout_0, rollout_1 into it"),
}


def _damaged(harness: Any, reference: Any, folder: Path, damages: dict[str, Any]) -> dict[str, str]:
    import torch.distributed as dist
    from relax_train.checkpoint.save_load import load_checkpoint, save_checkpoint
    from relax_train.checkpoint.sharded_io import CheckpointError

    run = harness(reference.folder, {})
    for rollout_id in (0, 1):
        files = _files_beside(folder / "whole", rollout_id, run.parallel.rank)
        save_checkpoint(folder / "whole", rollout_id, run.model, run.optimizer, files=files)
    messages = {}
    for name, (file, damage, _) in damages.items():
        if run.parallel.rank == 0:
            shutil.copytree(folder / "whole", folder / name)
            damage(folder / name / file)
        dist.barrier()
        try:
            load_checkpoint(folder / name, run.model, run.optimizer)
        except CheckpointError as error:
            messages[name] = str(error)
    return messages


def test_a_damaged_checkpoint_is_named_on_every_rank_with_the_way_out(
    run_ranks: Any, harness: Any, reference: Any, tmp_path: Path
) -> None:
    first, second = run_ranks(_damaged, 2, harness, reference("qwen3"), tmp_path, DAMAGES)
    assert first == second
    for name, (file, _, expected) in DAMAGES.items():
        assert re.match(rf"--load: .*{re.escape(name)}", first[name])
        assert re.search(expected, first[name]), first[name]
        if "missing" not in name:
            assert str(tmp_path / name / file) in first[name]
        if file.startswith("rollout_1/"):
            assert f"or resume from rollout_0: write its name into {tmp_path / name / 'latest'}" in first[name]
