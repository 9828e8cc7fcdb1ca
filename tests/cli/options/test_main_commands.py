"""`relax`: its commands, its exit codes, and what it imports to say them."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from relax_cli.checks import doctor
from relax_cli.config.run_config import RunConfig
from relax_cli.main import main

HEAVY = ("torch", "ray", "transformers", "sglang", "megatron", "tensorboard", "matplotlib", "datasets")

PROBE = """
import json, sys
from relax_cli.main import main
code = main(json.loads(sys.argv[1]))
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print("PROBE", json.dumps([code, heavy]))
"""


def run_in_a_process(argv: list[str], folder: Path) -> tuple[int, list[str], str]:
    """(exit code, heavy modules it imported, stdout and stderr) of `relax ARGV`."""
    command = [sys.executable, "-c", PROBE, json.dumps(argv), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, check=False)
    last = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert last, done.stderr
    code, heavy = json.loads(last[0].removeprefix("PROBE "))
    return code, heavy, done.stdout + done.stderr


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code, heavy, text = run_in_a_process(["train", "--help"], tmp_path)
    assert (code, heavy) == (0, [])
    assert "--max-tokens-per-gpu" in text


def test_errors_come_before_anything_heavy_is_imported(workspace: Path) -> None:
    code, heavy, text = run_in_a_process(["train", "--colocat", "--hf-checkpoint", "nowhere"], workspace)
    assert (code, heavy) == (2, [])
    assert "--colocat: no such option; did you mean --colocate?" in text
    assert "is not a folder" in text


def test_a_plan_and_a_printed_config_import_nothing_heavy(workspace: Path, start: list[str]) -> None:
    for word in ("--dry-run", "--print-config"):
        code, heavy, text = run_in_a_process(["train", word, *start], workspace)
        assert (code, heavy) == (0, []), text


def test_without_a_command_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "relax train --help" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"relax {version('relax-cli')}\n"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian'; did you mean train?" in capsys.readouterr().err


def test_errors_are_listed_and_exit_2(workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *start, "--lr", "x", "--seed", "y"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "relax train: 2 errors, nothing was started",
        "  - --lr: expected a number, found 'x'",
        "  - --seed: expected an integer, found 'y'",
    ]


def test_print_config_is_toml(workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *start, "--print-config", "--lr", "1e-5"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["lr"] == 1e-5
    assert printed["rm_type"] == "exact-match"
    assert "print_config" not in printed


def test_a_start_hands_the_resolved_configuration_to_the_controller(
    workspace: Path,
    start: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[RunConfig] = []

    def run(config: RunConfig) -> int:
        seen.append(config)
        return 7

    monkeypatch.setattr("relax_cli.run.launch.run", run)
    assert main(["train", *start, "--balance-data"]) == 7
    assert seen[0].run.num_rollout == 2
    assert seen[0].notes == ()
    assert "relax train: warning: --balance-data" in capsys.readouterr().err


def test_report_and_profile_are_the_profiling_package(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, list[str]]] = []

    def profiling(argv: list[str], program: str) -> int:
        seen.append((program, argv))
        return 3

    monkeypatch.setattr("relax_profiling.cli.main", profiling)
    assert main(["report", "traces/a", "--json"]) == 3
    assert main(["profile", "merge", "traces/a"]) == 3
    assert seen == [("relax", ["report", "traces/a", "--json"]), ("relax profile", ["merge", "traces/a"])]


def test_doctor_lists_every_check(capsys: pytest.CaptureFixture[str], gpus: Callable[[int], None]) -> None:
    code = main(["doctor"])
    text = capsys.readouterr().out
    for name in ("python", "cores", "memory", "GPU", "ray", "torch", "sglang", "megatron-core", "disk"):
        assert any(line.split()[1].startswith(name) for line in text.splitlines() if line.strip()), name
    assert code == (1 if "\nfail" in text else 0)


def test_doctor_levels() -> None:
    def level(finding: doctor.Finding) -> str:
        assert (finding.level == "ok") == (finding.fix == ""), finding
        return finding.level

    assert level(doctor.check_python((3, 11, 9))) == "ok"
    assert level(doctor.check_python((3, 10, 1))) == "fail"
    assert level(doctor.check_python((3, 14, 0))) == "fail"
    assert level(doctor.check_cores(1)) == "warn"
    assert level(doctor.check_cores(2)) == "ok"
    assert [level(doctor.check_memory(gb * 1e9)) for gb in (1, 4, 8)] == ["fail", "warn", "ok"]
    assert level(doctor.check_memory(None)) == "warn"
    free = doctor.shutil.disk_usage("/").free
    space: dict[str, Any] = {"name": "disk", "folder": Path("/"), "fix": "free some"}
    assert level(doctor.check_space(**space, warn=2 * free, fail=free / 2)) == "warn"
    assert level(doctor.check_space(**space, warn=4 * free, fail=2 * free)) == "fail"
    assert level(doctor.check_space(**space, warn=free / 2, fail=free / 4)) == "ok"


def test_doctor_packages() -> None:
    def have(**versions: str) -> dict[str, str]:
        named = {name.replace("_", "-"): v for name, v in versions.items()}
        return {f.name: f.level for f in doctor.check_packages(named.get, has_gpu="sglang-kernel" in named)}

    assert have(torch="2.11.0+cpu")["torch"] == "ok"
    assert have(torch="2.11.0+cpu")["ray"] == "fail"
    with_gpu = have(torch="2.11.0+cpu", sglang_kernel="0.4.5")
    assert with_gpu["torch"] == "fail"
    assert with_gpu["sglang-kernel"] == "ok"
    assert with_gpu["flashinfer-python"] == "fail"


def script(path: Path, body: str) -> str:
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


def test_doctor_reads_nvidia_smi(tmp_path: Path) -> None:
    rows = "0, NVIDIA H200, 143771, 4, 570.1\\n1, NVIDIA H200, 143771, 90000, 570.1\\n"
    free, used = doctor.check_gpus(script(tmp_path / "two", f"printf '{rows}'\n"))
    assert (free.level, free.name, free.detail) == ("ok", "GPU 0", "NVIDIA H200, 140 GiB, driver 570.1")
    assert (used.level, used.name) == ("warn", "GPU 1")
    (broken,) = doctor.check_gpus(script(tmp_path / "broken", "echo 'Failed to initialize NVML'; exit 9\n"))
    assert broken.level == "fail"
    assert "Failed to initialize NVML" in broken.detail
    (none,) = doctor.check_gpus(script(tmp_path / "none", "exit 0\n"))
    assert none.level == "ok"
