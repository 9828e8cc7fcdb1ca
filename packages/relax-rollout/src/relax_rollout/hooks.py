"""Functions of the user, named as ``module:function`` on the command line."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_rollout.values import describe


def hook_problem(flag: str, path: str) -> str | None:
    """What is wrong with ``path``, as far as it can be told without importing the user's code; None if nothing is."""
    module, colon, function = path.rpartition(":")
    if not colon or not module or not function.isidentifier():
        return f"{flag} {path!r} is not of the form module:function (for example my_rewards:score)"
    if module.endswith(".py"):
        return None if Path(module).is_file() else f"{flag} {path!r}: there is no file {module}"
    top = module.partition(".")[0]
    if top in sys.modules or Path(f"{top}.py").is_file() or Path(top).is_dir():
        return None
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
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(known)[:10]) or 'no function'}"
        raise ValueError(f"{flag} {path!r}: {module_name} has no function {name!r}{hint}")
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
