"""The driver calls its workers by typed methods: read from the sources."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import relax_cli
from relax_cli.config.settings import ClusterSettings
from relax_cli.controllers.modes import CONTROLLERS, mode_refusal
from relax_cli.workers.trainer import TrainActor
from relax_train.settings import AlgorithmSettings, ModelSettings, TrainSettings

SOURCE = Path(relax_cli.__file__).parent


def nodes(folder: str) -> list[tuple[str, ast.AST]]:
    files = sorted((SOURCE / folder).glob("*.py"))
    assert files
    return [(f"{f.name}:{getattr(n, 'lineno', 0)}", n) for f in files for n in ast.walk(ast.parse(f.read_text()))]


@pytest.mark.parametrize("folder", ["controllers", "workers", "run"])
def test_no_call_of_an_actor_goes_around_its_class(folder: str) -> None:
    """``handle.method.remote`` and ``getattr(handle, name)`` are ``Any`` to the type checker."""
    for place, node in nodes(folder):
        assert not (isinstance(node, ast.Attribute) and node.attr == "remote"), f"{place}: use Actor.call"


def test_controllers_know_no_ray_and_call_no_method_by_its_name() -> None:
    for place, node in nodes("controllers"):
        assert not (isinstance(node, ast.Name) and node.id == "getattr"), place
        if isinstance(node, ast.Import):
            assert "ray" not in [alias.name for alias in node.names], place


@pytest.mark.parametrize("folder", ["controllers", "workers", "cluster", "run", "checks"])
def test_the_settings_of_a_run_have_their_type_everywhere(folder: str) -> None:
    for place, node in nodes(folder):
        if isinstance(node, ast.arg) and node.arg == "config" and node.annotation is not None:
            assert ast.unparse(node.annotation) != "Any", place


def test_a_mode_without_a_controller_is_refused_with_the_modes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asynchronous = ClusterSettings(colocate=False, fully_async=True)
    assert mode_refusal(ClusterSettings()) is None
    assert mode_refusal(asynchronous) is None
    monkeypatch.delitem(CONTROLLERS, "fully_async")
    assert mode_refusal(asynchronous) == (
        "--fully-async is planned and checked by this version, but it runs --colocate only: remove --fully-async"
    )


@pytest.mark.parametrize("flag", ["--advantage-estimator", "--loss-type"])
def test_an_own_algorithm_that_is_not_there_ends_the_start_while_engines_load(flag: str, tmp_path: Path) -> None:
    """Where trainer and engines share a GPU, the trainer is set up after the engines have loaded."""
    (tmp_path / "own.py").write_text("from json import *\n")  # which names it has shows only its import
    own = f"{tmp_path}/own.py:missing"
    chosen = {
        "--advantage-estimator": AlgorithmSettings(advantage_estimator=own),
        "--loss-type": AlgorithmSettings(loss_type=own),
    }
    algorithm = chosen[flag]
    assert algorithm.problems() == []
    rank = object.__new__(TrainActor)  # a rank without Ray
    rank._config = SimpleNamespace(train=TrainSettings(model=ModelSettings(hf_checkpoint="m"), algorithm=algorithm))  # type: ignore[assignment]
    with pytest.raises(ValueError, match=f"{flag} .* has no function 'missing'"):
        rank.prepare()
