"""An option that no code reads has no effect, however well it is declared, checked and documented.

The source of all packages is searched for places that read an option: ``settings.lr``, ``config.train.optimizer.lr``,
``self._settings.lr``. What only checks, prints or copies options is no reader. A method of a settings class passes on
what it reads when somebody reads the method: ``algorithm.upper_clip`` reads ``eps_clip`` and ``eps_clip_high``.
"""

import ast
import dataclasses
import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from relax_cli.config.options import attributes, namespace, part_class, settings_classes
from relax_cli.config.run_config import RunConfig
from relax_data.options import Settings, option
from relax_train.settings import TrainSettings

PACKAGES = Path(__file__).parents[3] / "packages"

NO_READERS = (
    "relax_cli/checks/validate.py",
    "relax_cli/checks/file_checks.py",
    "relax_cli/checks/staleness_checks.py",
    "relax_cli/checks/plan.py",
    "relax_cli/checks/doctor.py",
    "relax_cli/config/command_line.py",
    "relax_cli/config/derive.py",
    "relax_cli/config/export.py",
    "relax_cli/config/files.py",
    "relax_cli/config/run_config.py",
    "relax_cli/config/schema.py",
)
"""Files that check, print or copy options: an option that only they read changes nothing in a run."""

READ_BY_KEY = ("relax_cli/config/resolution.py",)
"""Files that have the options as a dictionary: ``values["tb_experiment_name"]`` reads one there."""

GENERIC = {"settings", "options", "flags", "s"}
"""What a settings object of any class is called, also as the end of a name: ``self._settings``, ``train_settings``."""

CHECKS = {"problems", "_problems"}
"""Methods of a settings class that check it; what only they call is a check too."""

KNOWN: dict[str, str] = {}
"""Options that nothing reads, each with the reason why that is right. Whoever makes one of them work removes it here:
the test holds that the list is exact."""


def test_every_option_is_read() -> None:
    unread = unread_options(settings_classes(), sources(), places())
    assert unread == set(KNOWN), (
        f"read by nobody: {sorted(unread - set(KNOWN))}; read, but still listed as KNOWN: {sorted(set(KNOWN) - unread)}"
    )


def test_options_that_are_listed_as_unread_exist() -> None:
    assert set(KNOWN) <= set(namespace().options)


def sources() -> dict[str, str]:
    """Python source of all packages by path, for example ``relax_cli/main.py``."""
    return {
        file.relative_to(package / "src").as_posix(): file.read_text()
        for package in PACKAGES.iterdir()
        for file in sorted((package / "src").rglob("*.py"))
    }


def places() -> dict[type, str]:
    """The attribute of the run's configuration that holds each settings class: ``checkpoint``, ``cluster``."""
    found = {cls: name for name, cls in attributes(RunConfig).items()}
    for field in dataclasses.fields(TrainSettings):
        cls = part_class(TrainSettings, field.name)
        assert cls is not None
        found[cls] = field.name
    return found


parsed = functools.cache(ast.parse)


def unread_options(classes: Iterable[type], files: Mapping[str, str], where: Mapping[type, str]) -> set[str]:
    """Names of the options that nobody reads.

    Args:
        classes: the settings classes.
        files: source by path.
        where: the name of the variable or attribute that holds a settings class, beside the generic ones.
    """
    trees = {path: parsed(text) for path, text in files.items()}
    bodies = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    settings_nodes = {id(bodies[cls.__name__]) for cls in classes}
    reads: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        if not path.endswith(NO_READERS):
            reads |= {(owner, name) for owner, name in _attributes(tree, settings_nodes)}
            if path.endswith(READ_BY_KEY):
                reads |= {("settings", name) for name in _keys(tree)}
    unread: set[str] = set()
    for cls in classes:
        seen = {name for owner, name in reads if _is_settings(owner, where.get(cls))}
        seen |= _passed_on(bodies[cls.__name__], seen)
        unread |= {field.name for field in dataclasses.fields(cls)} - seen - {"sglang_extra"}
    return unread


def _is_settings(owner: str, place: str | None) -> bool:
    words = owner.strip("_").split("_")
    return owner.strip("_") in (GENERIC | {place}) or words[-1] == "settings"


def _attributes(tree: ast.AST, skipped: set[int]) -> Iterator[tuple[str, str]]:
    """(last word of the object, attribute) of every attribute that is read; settings classes are left out."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if id(node) in skipped:
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Name | ast.Attribute):
                yield (owner.id if isinstance(owner, ast.Name) else owner.attr), node.attr


def _keys(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _passed_on(body: ast.ClassDef, seen: set[str]) -> set[str]:
    """What the methods of a settings class read of it, of those methods that somebody reads, and of those they use."""
    methods = {node.name: node for node in body.body if isinstance(node, ast.FunctionDef) and node.name not in CHECKS}
    found, pending = set[str](), sorted(seen & methods.keys())
    while pending:
        for owner, name in _attributes(methods.pop(pending.pop()), set()):
            if owner == "self":
                found.add(name)
                if name in methods and name not in pending:
                    pending.append(name)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class DummySettings(Settings):
    """One option for the search to find or to miss; the code of the cases below stands in for the packages."""

    TITLE: ClassVar[str] = "Dummy"

    dummy: int = option(1, ge=1)


DECLARED = """
    class DummySettings(Settings):
        dummy: int = option(1)

        @property
        def doubled(self):
            return self._twice()

        def _twice(self):
            return 2 * self.dummy

        def _problems(self, given):
            return self._dummy_problems()

        def _dummy_problems(self):
            return ["--dummy"] if self.dummy else []
"""


@pytest.mark.parametrize(
    ("path", "code", "read"),
    [
        ("relax_train/step.py", "", False),
        ("relax_train/step.py", "def f(settings): return settings.dummy", True),
        ("relax_train/step.py", "class A:\n    def f(self): return self._settings.dummy", True),
        ("relax_train/step.py", "def f(train_settings): return train_settings.dummy", True),
        ("relax_train/step.py", "def f(config): return config.train.place.dummy", True),
        ("relax_train/step.py", "def f(settings): return settings.doubled", True),
        # Another object's attribute of that name, an assignment, a word, the checks and what only they call.
        ("relax_train/step.py", "def f(model): return model.dummy", False),
        ("relax_train/step.py", "def f(self): return self.dummy", False),
        ("relax_train/step.py", "def f(settings): settings.dummy = 1", False),
        ("relax_train/step.py", "def f(values): return values['dummy']", False),
        ("relax_train/step.py", "def f(settings): return settings.problems()", False),
        ("relax_cli/checks/validate.py", "def f(settings): return settings.dummy", False),
        ("relax_cli/config/derive.py", "def f(settings): return settings.dummy", False),
        ("relax_cli/config/resolution.py", "def f(values): return values['dummy'], values.get('other')", True),
    ],
)
def test_the_search_tells_reading_from_checking(path: str, code: str, read: bool) -> None:
    files = {"relax_train/settings/dummy.py": textwrap.dedent(DECLARED), path: code}
    assert unread_options([DummySettings], files, {DummySettings: "place"}) == (set() if read else {"dummy"})


def test_an_option_that_is_declared_and_not_read_is_found_among_the_real_ones() -> None:
    files = {**sources(), "relax_train/settings/dummy.py": textwrap.dedent(DECLARED)}
    found = unread_options([*settings_classes(), DummySettings], files, places())
    assert found == {*KNOWN, "dummy"}
