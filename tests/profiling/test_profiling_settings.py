"""The profiling flags: names, defaults and every refusal."""

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from relax_profiling.recorders.memory import RECORDERS
from relax_profiling.recorders.trace_files import RankTag
from relax_profiling.recorders.training import build_observer
from relax_profiling.settings import SETTINGS, MemoryProfileSettings, SGLangProfileSettings, TrainProfileSettings


def test_names_and_defaults_are_those_of_the_flags() -> None:
    defaults = {f.name: f.default for s in SETTINGS for f in dataclasses.fields(s)}
    assert defaults == {
        "sglang_profile": False,
        "sglang_profile_step_start": None,
        "sglang_profile_step_end": None,
        "sglang_profile_steps": None,
        "sglang_profile_num_steps": 3,
        "sglang_profile_activities": ("CPU", "GPU"),
        "sglang_profile_by_stage": False,
        "sglang_profile_with_stack": False,
        "sglang_profile_record_shapes": False,
        "sglang_profile_output_dir": None,
        "use_pytorch_profiler": False,
        "profile_step_start": 10,
        "profile_step_end": 12,
        "profile_target": ("train_overall",),
        "profile_with_stack": False,
        "profile_with_memory": False,
        "profile_with_flops": False,
        "record_memory_history": False,
        "memory_snapshot_num_steps": None,
        "memory_snapshot_path": "snapshot.pickle",
        "memory_snapshot_dir": None,
        "memory_recorder": "torch",
    }


def test_every_option_has_help_and_every_group_a_title() -> None:
    for group in SETTINGS:
        assert getattr(group, "TITLE", "")
        assert all(f.metadata["help"] for f in dataclasses.fields(group)), group


@pytest.mark.parametrize("group", SETTINGS)
def test_defaults_have_no_problems(group: type) -> None:
    assert group().problems() == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_num_steps=0), "--sglang-profile-num-steps 0"),
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_num_steps=-2), "or -1 for the whole rollout"),
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_step_start=-1), "-1 is negative"),
        (
            SGLangProfileSettings(sglang_profile=True, sglang_profile_step_start=4, sglang_profile_step_end=2),
            "ends at 2 before it starts at 4",
        ),
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_steps=()), "--sglang-profile-steps"),
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_steps=(1, -3)), "-3 is negative"),
        (SGLangProfileSettings(sglang_profile=True, sglang_profile_activities=()), "--sglang-profile-activities"),
        (TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=13), "--profile-step-end"),
        (TrainProfileSettings(use_pytorch_profiler=True, profile_target=()), "--profile-target is empty"),
        (
            TrainProfileSettings(use_pytorch_profiler=True, profile_target=("train_actor", "train_actor")),
            "names one target twice",
        ),
        (MemoryProfileSettings(record_memory_history=True, memory_snapshot_num_steps=0), "give at least 1"),
        (MemoryProfileSettings(record_memory_history=True, memory_snapshot_path="a/b.pickle"), "--memory-snapshot-dir"),
    ],
)
def test_refusals_name_the_flag_and_the_fix(settings: SGLangProfileSettings, said: str) -> None:
    assert any(said in p for p in settings.problems()), settings.problems()


def test_an_option_of_a_profiler_that_is_off_is_an_error() -> None:
    given = frozenset({"sglang_profile_steps", "sglang_profile_by_stage"})
    found = SGLangProfileSettings(sglang_profile_steps=(1,), sglang_profile_by_stage=True).problems(given)
    assert found == [
        "--sglang-profile-steps has no effect without --sglang-profile: add --sglang-profile or drop it",
        "--sglang-profile-by-stage has no effect without --sglang-profile: add --sglang-profile or drop it",
    ]
    assert TrainProfileSettings(profile_with_stack=True).problems(frozenset({"profile_with_stack"}))
    assert MemoryProfileSettings(memory_recorder="memray").problems(frozenset({"memory_recorder"}))


def test_all_problems_are_reported_together() -> None:
    bad = SGLangProfileSettings(
        sglang_profile=True, sglang_profile_num_steps=0, sglang_profile_step_start=-1, sglang_profile_activities=()
    )
    assert len(bad.problems()) == 3


def test_a_missing_memray_is_refused_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = MemoryProfileSettings(record_memory_history=True, memory_recorder="memray").problems()
    assert found == ["--memory-recorder memray needs the package memray: pip install memray"]


def test_an_unknown_recorder_is_refused_with_the_names_of_the_table() -> None:
    found = MemoryProfileSettings(record_memory_history=True, memory_recorder="valgrind").problems()
    assert found == ["--memory-recorder 'valgrind': choose one of torch, memray"]


def test_a_new_memory_recorder_is_one_class_and_one_line_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Counting:
        def __init__(self, directory: Path, tag: RankTag, suffix: str) -> None:
            told.append(f"{directory.name} {tag} {suffix}")

        @staticmethod
        def missing() -> str | None:
            return None

        def start(self) -> None:
            told.append("start")

        def dump(self) -> Path | None:
            told.append("dump")
            return None

        def close(self) -> None:
            told.append("close")

    monkeypatch.setitem(RECORDERS, "counting", Counting)
    observer = build_observer(
        TrainProfileSettings(),
        MemoryProfileSettings(record_memory_history=True, memory_recorder="counting", memory_snapshot_num_steps=1),
        trace_dir=tmp_path,
        rank=3,
    )
    observer.before_model()
    with observer.phase("train_overall", 0):
        pass
    observer.close()
    assert told == ["memory_snapshot rank3_dp0_tp0_pp0 snapshot.pickle", "start", "dump", "close"]


def test_the_package_imports_neither_torch_nor_anything_of_ours() -> None:
    code = (
        "import sys, relax_profiling.settings, relax_profiling.recorders.training, relax_profiling.recorders.sglang,"
        "relax_profiling.cli, relax_profiling.report.build, relax_profiling.trace.merge\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'memray', 'numpy', 'ray', 'sglang',"
        "'relax_data', 'relax_train', 'relax_rollout', 'relax_cli')]\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
