"""Each wheel builds, installs and imports alone in a clean virtual environment."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# What is imported, and what must not have been installed with it.
PACKAGES = {
    "relax-data": ("import relax_data.types, relax_data.packing.pack", {"torch", "ray", "sglang", "transformers"}),
    "relax-profiling": (
        "import relax_profiling.recorders.sglang, relax_profiling.settings, relax_profiling.report.build",
        {"torch", "ray", "sglang"},
    ),
    "relax-rollout": (
        "import relax_rollout.loop.rollout_loop, relax_rollout.engines.sglang.client",
        {"ray", "megatron-core"},
    ),
    "relax-train": ("import relax_train.trainer", {"ray", "sglang"}),
    "relax-cli": ("import relax_cli.run.launch, relax_cli.workers.group", set()),
}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def uv() -> str:
    found = shutil.which("uv")
    assert found is not None, "the tests run through `uv run`, so uv is there"
    return found


@pytest.fixture(scope="module")
def wheels(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    run(uv, "build", "--all-packages", "--wheel", "--quiet", "--out-dir", folder)
    assert sorted(w.name.split("-")[0] for w in folder.glob("*.whl")) == [p.replace("-", "_") for p in sorted(PACKAGES)]
    return folder


@pytest.fixture(scope="module")
def constraints(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of the lock, so that what is installed is what everything else was tested with."""
    path = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    flags = ("--frozen", "--all-extras", "--all-packages", "--no-emit-workspace", "--no-hashes", "--quiet")
    run(uv, "export", *flags, "--output-file", path)
    return path


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_installable_and_importable_alone(
    package: str, uv: str, wheels: Path, constraints: Path, tmp_path: Path
) -> None:
    statement, absent = PACKAGES[package]
    python = tmp_path / "venv" / "bin" / "python"
    run(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    # Run in the workspace, whose pyproject.toml says what of SGLang's requirements a CPU machine needs.
    run(uv, "pip", "install", "--quiet", "--python", python, "--find-links", wheels, "-c", constraints, package)
    run(python, "-c", statement, cwd=tmp_path)
    listed = run(uv, "pip", "list", "--python", python, "--format", "freeze")
    installed = {line.split("==")[0].lower() for line in listed.splitlines()}
    assert package in installed
    assert not installed & absent, f"{package} pulled in {sorted(installed & absent)}"
    ours = {p for p in installed if p.startswith("relax-")}
    assert package == "relax-cli" or ours <= {package, "relax-data"}
    # Hard links to uv's cache: cheap to make, but there is no reason to keep gigabytes of them.
    shutil.rmtree(tmp_path / "venv")
