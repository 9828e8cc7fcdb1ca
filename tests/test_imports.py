"""Who may import whom, read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {
    "relax_data": set(),
    "relax_profiling": set(),
    "relax_rollout": {"relax_data"},
    "relax_train": {"relax_data"},
    "relax_cli": {"relax_data", "relax_rollout", "relax_train", "relax_profiling"},
}


def imported_packages(file: Path) -> set[str]:
    """Top-level names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_package_imports_only_what_the_design_allows(package: str) -> None:
    source = ROOT / "packages" / package.replace("_", "-") / "src" / package
    files = list(source.rglob("*.py"))
    assert files, f"no sources under {source}"
    for file in files:
        ours = {n for n in imported_packages(file) if n.startswith("relax_")} - {package}
        assert ours <= ALLOWED[package], f"{file.relative_to(ROOT)} imports {sorted(ours - ALLOWED[package])}"


LIGHT = [
    "relax_data",
    "relax_data.types",
    "relax_data.weights",
    "relax_data.options",
    "relax_profiling",
    "relax_cli.main",
]


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_no_heavy_library(module: str) -> None:
    import subprocess
    import sys

    code = f"import {module}, sys; print([m for m in ('torch', 'ray', 'transformers', 'sglang') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
