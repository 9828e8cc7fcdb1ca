"""A name used again: a run that goes on keeps what its earlier starts wrote, any other one is told to take another."""

from pathlib import Path

import pytest
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_cli.run import folder as run_folder


def test_what_belongs_to_one_start_is_kept_under_a_number(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "demo"
    for start in ("first", "second", "third"):
        run_folder.prepare(folder, start)
        if start != "second":  # that one was killed before its end
            (folder / "summary.json").write_text(f"summary of the {start}")
    found = {p.name: p.read_text() for p in folder.iterdir() if p.is_file()}
    assert found == {
        "config.1.toml": "first",
        "summary.1.json": "summary of the first",
        "config.2.toml": "second",
        "config.toml": "third",
        "summary.json": "summary of the third",
    }


def test_another_run_of_the_same_name_is_refused_unless_it_goes_on(workspace: Path, start: list[str]) -> None:
    words = [*start, "--tb-experiment-name", "demo", "--save", "checkpoints"]
    run_folder.prepare(workspace / "runs" / "demo", "")
    assert resolve(words, {}).name == "demo", "a start that measured nothing may be made again"
    (workspace / "runs" / "demo" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as refused:
        resolve(words, {})
    (problem,) = refused.value.problems
    assert "--tb-experiment-name, for example demo-2" in problem
    assert "--load" in problem
    assert resolve([*words, "--dry-run"], {}).notes == (problem,)
    assert resolve([*words, "--load", "checkpoints"], {}).name == "demo"


def test_the_key_of_the_engines_is_new_each_time_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / run_folder.ENGINE_KEY
    first = run_folder.make_engine_key(path.parent)
    assert path.read_text() == first + "\n"
    path.chmod(0o644)  # left by a start that was killed, and copied about
    second = run_folder.make_engine_key(path.parent)
    assert second != first
    assert path.read_text() == second + "\n"
    assert path.stat().st_mode & 0o777 == 0o600
    run_folder.remove_engine_key(path.parent)
    run_folder.remove_engine_key(path.parent)
    assert not path.exists()
