"""The driver calls its workers by typed methods: read from the sources."""

import ast
from pathlib import Path

import pytest
import relax_cli
from relax_cli.config.settings import ClusterSettings
from relax_cli.controllers.modes import CONTROLLERS, mode_refusal

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


def test_a_mode_without_a_controller_is_refused_with_the_modes_there_are() -> None:
    assert ClusterSettings().mode in CONTROLLERS
    assert mode_refusal(ClusterSettings()) is None
    assert mode_refusal(ClusterSettings(colocate=False, fully_async=True)) == (
        "--fully-async is planned and checked by this version, but it runs --colocate only: remove --fully-async"
    )
