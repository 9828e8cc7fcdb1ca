"""The structure that the documentation draws, read from the sources, so that it cannot quietly become untrue."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 13
"""Source files of one folder, beside its ``__init__.py`` and names that are only kept for users."""
KEPT = ("A name that users import", "Names that users import")
"""How the docstring of a module begins that holds nothing but a name from elsewhere."""

OWN_TYPES = {
    "address": "EngineAddress",
    "addresses": "EngineAddress",
    "batch": "TrainBatch",
    "bucket": "Bucket",
    "buckets": "Bucket",
    "engine": "Engine",
    "engines": "Engine",
    "engine_info": "EngineAddress",
    "group": "SampleGroup",
    "groups": "SampleGroup",
    "ledger": "PromptLedger",
    "manifest": "StepManifest",
    "outcome": "Outcome",
    "parallel": "ParallelState",
    "placement": "Placement",
    "progress": "Progress",
    "prompt": "Prompt",
    "prompts": "Prompt",
    "reward": "RewardFunction",
    "rows": "RowSource",
    "run_config": "RunConfig",
    "sample": "Sample",
    "samples": "Sample",
    "settings": "a settings class",
    "source": "PromptSource",
    "trackers": "Trackers",
    "trainer": "Trainer",
    "workers": "WorkerGroups",
}
"""Parameters that have a type of ours wherever they occur."""

JSON = r"(dict|Mapping)\[str, Any\]"
"""A table of a file, which may hold anything."""

FOREIGN = {
    ("relax_cli.cluster.slots", "group"): "a placement group of Ray",
    ("relax_train.backend.optimizer", "groups"): "torch's parameter groups",
    ("relax_train.algorithms.logprobs", "group"): "a process group of torch",
}
"""Parameters of these names that are somebody else's."""


def source_files() -> dict[str, Path]:
    """Every module of the five packages by its name."""
    found = {}
    for source in sorted(ROOT.glob("packages/*/src/*")):
        for file in sorted(source.rglob("*.py")):
            if "cpu_stand_in" not in file.parts:  # stands for a package of SGLang's, in a path of its own
                name = ".".join(file.relative_to(source.parent).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = file
    return found


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(module: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of ours that a module imports, wherever in it: at its head, in a function, for types only."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module)
    return (found & modules.keys()) - {module}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan 1972, strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    modules = source_files()
    assert circles({name: imports_of(name, file, modules) for name, file in modules.items()}) == []


def test_megatron_is_imported_in_one_module() -> None:
    importers = set()
    for name, file in source_files().items():
        for node in ast.walk(tree_of(file)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            if any(n.split(".")[0] == "megatron" for n in names):
                importers.add(name)
    assert importers == {"relax_train.backend.mcore"}


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    counts: dict[Path, int] = defaultdict(int)
    for file in source_files().values():
        kept = (ast.get_docstring(tree_of(file)) or "").startswith(KEPT)
        counts[file.parent] += file.name != "__init__.py" and not kept
    crowded = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > MOST_FILES}
    assert crowded == {}, f"at most {MOST_FILES} files a folder"


def test_every_folder_and_file_says_what_lives_there() -> None:
    texts = {file: ast.get_docstring(tree_of(file)) or "" for file in source_files().values()}
    assert [str(file.relative_to(ROOT)) for file, text in texts.items() if not text] == []
    folders = {file: text for file, text in texts.items() if file.name == "__init__.py" and not text.startswith(KEPT)}
    assert [str(f.parent.relative_to(ROOT)) for f, text in folders.items() if not re.search("Doors?:", text)] == []


@pytest.mark.parametrize("name", ["Bucket", "zigzag_positions", "WeightBucket"])
def test_what_several_packages_use_is_defined_once(name: str) -> None:
    places = []
    for module, file in source_files().items():
        for node in tree_of(file).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            named = isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
            if named or any(isinstance(t, ast.Name) and t.id == name for t in targets):
                places.append(module)
    assert len(places) <= 1, places


# ---------------------------------------------------------------------- calls of workers


def calls_by_string(tree: ast.AST) -> Iterator[int]:
    """Lines in which a method of a worker is chosen by its name as text: ``getattr(actor, name)...remote``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("remote", "options"):
            owner = node.value
            if not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "getattr"):
                continue
            if not ast.unparse(owner.args[1]).endswith(".__name__"):  # the name of a function that is passed itself
                yield node.lineno


def names_of_methods_passed_on(tree: ast.AST) -> Iterator[int]:
    """Lines that define a function whose parameter ``method`` is a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                if argument.arg == "method" and argument.annotation and ast.unparse(argument.annotation) == "str":
                    yield node.lineno


def test_calls_by_string_are_found() -> None:
    assert list(calls_by_string(ast.parse("getattr(a, m).remote(1)"))) == [1]
    assert list(calls_by_string(ast.parse("a.train.remote(1)"))) == []
    assert list(calls_by_string(ast.parse("getattr(a, f.__name__).remote(1)"))) == []
    assert list(names_of_methods_passed_on(ast.parse("def f(method: str): pass"))) == [1]


def test_no_worker_is_called_by_a_text() -> None:
    found = [
        f"{name}:{line}"
        for name, file in source_files().items()
        if name.startswith("relax_cli.")
        for line in [*calls_by_string(tree_of(file)), *names_of_methods_passed_on(tree_of(file))]
    ]
    assert found == []


# ---------------------------------------------------------------------- types of ours


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods without an underscore, constructors too, of the module and its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and (
                    inner.name == "__init__" or not inner.name.startswith("_")
                ):
                    yield inner


def untyped_parameters(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(function, parameter) where something of ours is called ``Any``."""
    for function in public_functions(tree):
        for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
            known = argument.arg in OWN_TYPES or argument.arg == "config"
            if known and argument.annotation and "Any" in re.sub(JSON, "", ast.unparse(argument.annotation)):
                yield function.name, argument.arg


def test_untyped_parameters_are_found() -> None:
    code = (
        "class A:\n def __init__(self, config: Any, hf: Any, batch: list[Any]): pass\n def _b(self, batch: Any): pass"
    )
    assert list(untyped_parameters(ast.parse(code))) == [("__init__", "config"), ("__init__", "batch")]


def test_no_public_signature_hides_a_type_of_ours() -> None:
    found = [
        f"{name}.{function}({parameter}: Any), is it not {OWN_TYPES.get(parameter, 'RunConfig')}?"
        for name, file in source_files().items()
        for function, parameter in untyped_parameters(tree_of(file))
        if (name, parameter) not in FOREIGN
    ]
    assert found == []


def test_what_workers_and_controllers_return_has_a_type() -> None:
    found = [
        f"{name}.{function.name}"
        for name, file in source_files().items()
        if name.startswith(("relax_cli.workers", "relax_cli.controllers"))
        for function in public_functions(tree_of(file))
        if function.returns is not None and ast.unparse(function.returns) == "Any"
    ]
    assert found == []


# ---------------------------------------------------------------------- names in texts

ROLE = re.compile(r":(?:func|class|mod|meth|attr|data|exc):`~?([\w.]+)`")
DOTTED = re.compile(r"\brelax_(?:cli|data|profiling|rollout|train)(?:\.\w+)+")


def bound_names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """Names that a module or class binds: imports, functions, classes and their members, constants, ``self.name``."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (owner + (alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (owner + n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from bound_names([*node.body, *node.orelse], owner)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name
            if isinstance(node, ast.ClassDef):
                yield from bound_names(node.body, f"{owner}{node.name}.")
            elif owner:
                stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
                yield from (owner + n.attr for n in stored)


def is_there(name: str, names: dict[str, set[str]]) -> bool:
    """Whether a dotted name is a module, or is bound in one, or is a member of a class that a module re-exports."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        if (module := ".".join(parts[:i])) in names:
            rest = ".".join(parts[i:])
            exported = rest.partition(".")[0] in names[module] and any(rest in bound for bound in names.values())
            return not rest or rest in names[module] or exported
    return False


def test_every_name_in_a_text_exists() -> None:
    """References of docstrings, and names of ours in them, in comments and in pages: code moves, texts stay behind."""
    files = source_files()
    names = {module: set(bound_names(tree_of(file).body)) for module, file in files.items()}
    missing = []
    for module, file in files.items():
        text = file.read_text(encoding="utf-8")
        own = names[module] | {name.partition(".")[2] for name in names[module]}
        missing += [f"{module}: {n}" for n in ROLE.findall(text) if n not in own and not is_there(n, names)]
        missing += [f"{module}: {n}" for n in DOTTED.findall(text) if not is_there(n, names)]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/*.md")]
    for page in pages:
        if page.name == "extending.md":  # its recipes name the files that a reader writes
            continue
        found = DOTTED.findall(page.read_text(encoding="utf-8"))
        missing += [f"{page.relative_to(ROOT)}: {n}" for n in found if not is_there(n, names)]
    assert sorted(set(missing)) == []
    assert not is_there("relax_data.nothing", names)
    assert not is_there("relax_data.types.Sample.nothing", names)
