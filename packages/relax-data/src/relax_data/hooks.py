"""Functions of the user, named as ``module:function`` on the command line."""

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from relax_data.errors import describe, did_you_mean


def hook_problem(flag: str, path: str) -> str | None:
    """Says what is wrong with ``path``, as far as that shows without importing the user's code; None if nothing is."""
    module, colon, function = path.rpartition(":")
    named = module.endswith(".py") or not {"/", "\\"} & set(module)
    if not colon or not module or not function.isidentifier() or not named:
        return (
            f"{flag} {path!r} is not of the form module:function (for example my_rewards:score or my_rewards.py:score)"
        )
    if module.endswith(".py"):
        if not Path(module).is_file():
            return f"{flag} {path!r}: there is no file {module}"
        return _text_problem(flag, path, Path(module))
    top = module.partition(".")[0]
    if top in sys.modules or Path(top).is_dir():
        return None
    if Path(f"{top}.py").is_file():
        return _text_problem(flag, path, Path(f"{top}.py")) if top == module else None
    try:
        found = importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return (
            f"{flag} {path!r}: there is no module {top!r} in the Python path or the current folder; "
            f"set PYTHONPATH to the folder that holds {top}.py, or write {top}.py:{function} with its path"
        )
    return None


def _text_problem(flag: str, path: str, file: Path) -> str | None:
    """A mistake that the text of a module shows: it is no Python, or binds no such name."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as e:
        return f"{flag} {path!r}: {file} is no Python: {e}"
    except (OSError, MemoryError, RecursionError):
        return None
    functions, others, pending = set[str](), set[str](), list[ast.AST](tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            functions.add(node.name)
            continue  # what is in it is not the module's
        if isinstance(node, ast.Import | ast.ImportFrom):
            others |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name):
            others.add(node.id)
        pending += ast.iter_child_nodes(node)
    # A module can make its names in ways that its text does not show.
    if {"*", "globals", "locals", "vars", "exec", "setattr", "__getattr__"} & (functions | others):
        return None
    name = path.rpartition(":")[2]
    return None if name in functions | others else _no_function(flag, path, functions)


def _no_function(flag: str, path: str, known: Collection[str]) -> str:
    module, _, name = path.rpartition(":")
    public = sorted(n for n in known if not n.startswith("_"))
    hint = did_you_mean(name, public) or f"; it has {', '.join(public[:10]) or 'no function'}"
    return f"{flag} {path!r}: {module} has no function {name!r}{hint}"


def load_function(flag: str, path: str) -> Callable[..., Any]:
    """Imports the function that ``path`` (``module:function`` or ``folder/file.py:function``) names.

    Modules are looked for in the Python path, then in the current folder.

    Raises:
        ValueError: it cannot be imported or is no function; the message names ``flag`` and what exists instead.
    """
    problem = hook_problem(flag, path)
    if problem is not None:
        raise ValueError(problem)
    module_name, _, name = path.rpartition(":")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a module may call sys.exit(), too
        raise ValueError(f"{flag} {path!r}: importing {module_name} failed: {describe(e)}") from e
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_") and callable(getattr(module, n))]
        raise ValueError(_no_function(flag, path, known))
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{flag} {path!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also of an object with an async ``__call__``."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _import_module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script has its own folder in sys.path, not the one the user works in. Last, so it hides nothing.
        sys.path.append(here)
    return importlib.import_module(name)


def _import_file(file: Path) -> Any:
    name = f"relax_hook_{file.stem}_{abs(hash(file.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, f"{file} ends in .py"
    assert spec.loader is not None, f"{file} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
