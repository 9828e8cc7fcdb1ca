"""A short round of the fuzzer, the same cases every time; ``tests/fuzz/run.py`` goes on for as long as you like."""

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, Target, run_case

SEED = 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RELAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("target", TARGETS, ids=[t.name for t in TARGETS])
@pytest.mark.parametrize("share", ["first quarter", pytest.param("rest", marks=pytest.mark.slow)])
def test_any_input_is_read_or_refused_with_an_error_for_users(target: Target, share: str, tmp_path: Path) -> None:
    """All cases together take about 20 s of CPU time."""
    quarter = target.cases // 4
    for number in range(quarter) if share == "first quarter" else range(quarter, target.cases):
        try:
            run_case(target, SEED, number, tmp_path / str(number))
        except Exception as error:
            again = f"uv run python tests/fuzz/run.py --target {target.name} --seed {SEED} --case {number}"
            raise AssertionError(f"{type(error).__name__}: {error}; again: {again}") from error
