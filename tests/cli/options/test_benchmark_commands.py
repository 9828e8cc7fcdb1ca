"""The commands that `benchmarks/README.md` gives for four and eight GPUs, planned for such a machine."""

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from cli import gpu_engine_kill_check
from cli.gpu_layouts_check import REWARD
from cli.options.test_plan_dry_run import QWEN3_4B_8_GPUS
from relax_cli.config.resolution import resolve
from relax_cli.simulate.command import read_settings

ROOT = Path(__file__).parents[3]
SECTION = (
    (ROOT / "benchmarks" / "README.md")
    .read_text(encoding="utf-8")
    .partition("\n## On four and eight GPUs\n")[2]
    .partition("\n## ")[0]
)


def commands() -> list[list[str]]:
    """The commands of the section as a shell has their words, those that start something else left out."""
    script = "\n".join(re.findall(r"^    (.*)$", SECTION, re.M))
    said = 'python() { printf "%s\\n" python "$@" END; }; relax() { printf "%s\\n" relax "$@" END; }\n'
    said += "cd() { :; }; nvidia-smi() { :; }; kill() { :; }; sort() { :; }; tail() { :; }\n"
    script = script.replace("> memory.txt &", "")
    done = subprocess.run(["bash", "-c", said + script], capture_output=True, text=True, check=True, timeout=60)
    return [words.splitlines() for words in done.stdout.removesuffix("END\n").split("END\n")]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/fully_async.py`, which takes this for a machine with eight GPUs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("fully_async")
    partial_rollout = importlib.import_module("partial_rollout")
    for each in (module, partial_rollout):
        monkeypatch.setattr(each, "GPU", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    return module


@pytest.fixture
def parsed(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """What the benchmark reads from a command line."""

    def parse(*words: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["fully_async.py", *words])
        found = benchmark.parse()
        assert isinstance(found, argparse.Namespace)
        return found

    return parse


def test_every_way_of_the_commands_has_its_split(
    workspace: Path, benchmark: ModuleType, parsed: Callable[..., argparse.Namespace], gpus: Callable[..., None]
) -> None:
    gpus(8, memory=140e9)
    splits: dict[str, tuple[int, int]] = {}
    for _, script, *words in commands():
        if script != "benchmarks/fully_async.py":
            continue
        arguments = parsed(*words)
        out = str(arguments.out)
        arguments.out, arguments.shape, arguments.model_dir = workspace, None, workspace / "qwen3-4b"
        benchmark.prepare(arguments)
        for way in arguments.ways:
            assert benchmark.way_of_run(benchmark.run_name(way)) == way
            words = [*benchmark.words(way, arguments), "--tb-experiment-name", benchmark.run_name(way), "--dry-run"]
            config = resolve(words, {})
            placement = config.placement
            assert placement is not None
            assert placement.gpus == arguments.gpus
            assert placement.engines == (benchmark.generating_gpus(way, arguments) or arguments.gpus)
            assert config.rollout.recompute_kv_cache_after_weight_updates is not (":keep" in way)
            assert not [warning for warning in config.warnings if "idle" in warning], config.warnings
            if way != "colocate":
                assert config.cluster.max_staleness == benchmark.split(way)[1]
            run = f"{out} {way}"
            assert run not in splits, "a second run of that name would be refused"
            splits[run] = placement.train_ranks, placement.engines
    assert len(splits) == 2 + 2 * 9 + 3
    for staleness in (1, 2, 4):
        for keep in ("", ":keep"):
            found = [splits[f"results async:{staleness}{keep}@{generating}"] for generating in (6, 4, 2)]
            assert found == [(2, 6), (4, 4), (6, 2)]
    assert [splits[way] for way in ("push1 async:1@1", "push2 async:1@2", "push4 async:1@4")] == [
        (4, 1),
        (4, 2),
        (4, 4),
    ]


def test_ways_without_a_split_take_that_of_the_option(
    benchmark: ModuleType, parsed: Callable[..., argparse.Namespace]
) -> None:
    arguments = parsed("--ways", "colocate", "partial:1", "async:2", "async:2:keep@3")
    assert [benchmark.generating_gpus(way, arguments) for way in arguments.ways] == [0, 0, 4, 3]
    arguments = parsed("--rollout-num-gpus", "2", "--ways", "async:2", "async:2@5")
    assert [benchmark.generating_gpus(way, arguments) for way in arguments.ways] == [2, 5]
    ways = ["async:2@5", "async:1", "partial:1", "async:2:keep@2", "async:2@2", "colocate"]
    assert sorted(ways, key=lambda way: benchmark.order(way, arguments)) == [
        *("colocate", "partial:1", "async:1", "async:2:keep@2", "async:2@2", "async:2@5")
    ]


def test_the_table_has_a_column_for_each_split(
    tmp_path: Path,
    benchmark: ModuleType,
    parsed: Callable[..., argparse.Namespace],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also beside a run of something else, and one that has ended before its first step."""
    arguments = parsed("--ways", "async:1@2", "async:1:keep@6")
    for way, push_s in (("async:1@2", 0.25), ("async:1:keep@6", 0.5)):
        row = {"time/step": 4.0, "time/weight_update": push_s, "time/train": 2.0, "staleness/max": 1}
        row |= {"engines/serving": benchmark.generating_gpus(way, arguments), "rollout/response_length": 10}
        folder = tmp_path / "runs" / benchmark.run_name(way)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text((json.dumps(row) + "\n") * 9)
    (tmp_path / "runs" / "recommended").mkdir()
    (tmp_path / "runs" / "async-4@2").mkdir()
    found = benchmark.every_way(arguments, tmp_path)
    assert list(found) == ["async:1@2", "async:1:keep@6"]
    fewer = argparse.Namespace(**vars(arguments) | {"gpus": 4})
    assert list(benchmark.every_way(fewer, tmp_path)) == ["async:1@2"], "the other one leaves no GPU that trains"
    benchmark.report(found)
    lines = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines()}
    assert lines[""] == ["async:1@2", "async:1:keep@6"]
    assert lines["engines"] == ["2.00", "6.00"]
    assert lines["push alone, s"] == ["0.25", "0.50"]
    assert lines["step / (work + push)"] == ["1.78", "1.60"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ways", "async:2@8"], "async:2@8: 8 GPUs that generate leave none of --gpus 8 to train"),
        (["--gpus", "4", "--ways", "async:1:keep@6"], "async:1:keep@6: 6 GPUs that generate leave none of --gpus 4"),
        (["--rollout-num-gpus", "8", "--ways", "async:1"], "async:1: 8 GPUs that generate leave none"),
        (["--ways", "async:2@0"], "'async:2@0': colocate, partial:N"),
        (["--ways", "colocate@2"], "'colocate@2': colocate, partial:N"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    parsed: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert said in capsys.readouterr().err


def test_a_split_without_gpus_is_refused(
    benchmark: ModuleType,
    parsed: Callable[..., argparse.Namespace],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(benchmark, "GPU", False)
    with pytest.raises(SystemExit):
        parsed("--ways", "async:2@1")
    assert "async:2@1: there are no GPUs to divide" in capsys.readouterr().err


def test_the_recommended_configuration_runs_as_it_stands(
    workspace: Path, parsed: Callable[..., argparse.Namespace], benchmark: ModuleType, gpus: Callable[..., None]
) -> None:
    gpus(8, memory=140e9)
    every = commands()
    task = next(words[2:] for words in every if words[-2:] == ["--ways", "colocate"])
    arguments = parsed(*task)
    arguments.out, arguments.shape = workspace, None
    benchmark.prepare(arguments)
    (workspace / "qwen3-4b").rename(workspace / "model-4b")
    planned, run = (words[2:] for words in every if words[:2] == ["relax", "train"])
    assert planned == [*run, "--dry-run"]
    assert " ".join(run).count(" ".join(shlex.split(QWEN3_4B_8_GPUS))) == 1
    planned[planned.index("--prompt-data") + 1] = str(ROOT / "examples" / "arithmetic" / "data" / "train.jsonl")
    config = resolve(planned, {})
    placement = config.placement
    assert placement is not None
    assert (placement.gpus, placement.train_ranks, placement.engines, placement.tp) == (8, 8, 8, 2)
    assert config.run.num_rollout == 5
    assert not [note for note in config.notes if "has no weights" not in note and "has no tokenizer" not in note]
    assert f"runs/{config.name}" == next(words[2] for words in every if words[:2] == ["relax", "report"])


def test_the_check_of_a_lost_engine_has_two_of_them(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, gpus: Callable[..., None]
) -> None:
    gpus(4, memory=140e9)
    monkeypatch.setattr(gpu_engine_kill_check, "GPU", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    (command,) = (words[1:] for words in commands() if words[1].startswith("tests/"))
    monkeypatch.setattr(sys, "argv", command)
    arguments = gpu_engine_kill_check.parse()
    arguments.model_dir = workspace / "qwen3-4b"
    (workspace / "digits_reward.py").write_text(REWARD)
    placement = resolve([*gpu_engine_kill_check.words(arguments, workspace), "--dry-run"], {}).placement
    assert placement is not None
    assert (placement.train_ranks, placement.engines, placement.gpus) == (2, 2, 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit):
        gpu_engine_kill_check.parse()


def test_simulate_takes_the_run_and_splits_of_the_table() -> None:
    (words,) = (words[2:] for words in commands() if words[:2] == ["relax", "simulate"])
    settings = read_settings(words)
    assert settings.from_run == "results/runs/colocate"
    assert (settings.rollout_num_gpus, settings.max_staleness) == ((2, 4, 6), (1, 2, 4))
