"""Configuration files: TOML and YAML in, TOML out. Both are flat and hold the options of the command line."""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_data.options import flag

from relax_cli.config.command_line import Given, Layer, Namespace
from relax_cli.config.schema import from_object

_PLACEHOLDER = re.compile(r"(\$+)\{config_dir\}")
_NOT_IN_FILES = ("config",)
_INPUTS = ("hf_checkpoint", "ref_load", "prompt_data", "eval_prompt_data")
_MAKERS = ("make", "prepare")
"""How the names of scripts begin that make the model and the data of a configuration."""
_LARGEST_FILE = 1_000_000
_LONG_NUMBER = re.compile(r"[0-9_]{1000}")
_TOML_KEY = re.compile(r"""\s*(?:\[\s*)?(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*[=.\]]""")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One key of a file, its value, its line where that is known, and why the value cannot be read."""

    key: str
    value: Any
    line: int | None
    unreadable: str = ""


def read_file(path: Path, namespace: Namespace) -> Layer:
    """Reads one configuration file; every error names the file, the line where it can be found, and the key.

    Keys are snake_case or kebab-case. ``${config_dir}`` in a string is the absolute folder of the file, and
    ``$${config_dir}`` that text itself. Other relative paths are relative to the current directory, as on the command
    line.
    """
    layer = Layer()
    try:
        entries = _entries(path)
    except (OSError, ValueError) as error:
        layer.errors.append(f"--config {path}: {_reason(error)}")
        return layer
    seen: dict[str, str] = {}
    for entry in entries:
        where = f"{path}:{entry.line}" if entry.line is not None else f"{path}"
        name = entry.key.replace("-", "_")
        try:
            if name in seen:
                also = f", also as {seen[name]}" if seen[name] != entry.key else ""
                raise ValueError(f"given twice in this file{also}")
            seen[name] = entry.key
            option = namespace.find(name)
            if option is None:
                hint = "; the file is flat, options do not stand in tables" if isinstance(entry.value, dict) else ""
                raise ValueError(str(layer.no_such_option(namespace, entry.key)) + hint)
            if name in _NOT_IN_FILES:
                raise ValueError("a configuration file cannot name another one")
            if entry.unreadable:
                raise ValueError(entry.unreadable)
            value = _expand(entry.value, str(path.resolve().parent))
            if option.owner is None and option.kind.base is str and type(value) in (int, float):
                value = str(value)  # the server's own parser reads more than its table says
            value = from_object(option.kind, value)
            layer.values[name] = Given(value, where)
        except ValueError as error:
            layer.errors.append(f"{where}: {entry.key}: {error}")
            layer.failed.add(name)
    return layer


def with_script_hint(errors: list[str], path: Path, given: Mapping[str, Given]) -> list[str]:
    """Says of a model or data that a configuration misses in its folder which script there makes it.

    That line takes the place of the errors about the same files: their advice, to download a model, would not help.

    The command is the one that the configuration's own comments show for the script, if they do.

    Args:
        errors: of the start.
        path: of the configuration.
        given: the options of the start.
    """
    folder = path.resolve().parent
    missing = {
        name: [v.partition("@[")[0] for v in _words(given[name].value) if _is_missing(v, folder)]
        for name in _INPUTS
        if name in given
    }
    missing = {name: places for name, places in missing.items() if places}
    scripts = sorted(script for script in folder.glob("*.py") if script.name.startswith(_MAKERS)) if missing else []
    if not scripts:
        return errors
    commands = " and ".join(_command(script, path) for script in scripts)
    hint = (
        f"{' and '.join(flag(name) for name in missing)}: not made yet; a script beside {path.name} makes what is "
        f"missing: {commands}"
    )
    others = [
        error
        for error in errors
        if not any(error.startswith(flag(name)) and place in error for name in missing for place in missing[name])
    ]
    return [hint, *others]


def _words(value: Any) -> list[str]:
    """The texts of a value, which may be anything: it is not known yet whether the option takes it."""
    if isinstance(value, str):
        return [value]
    return [v for v in value if isinstance(v, str)] if isinstance(value, Sequence) else []


def _is_missing(value: str, folder: Path) -> bool:
    """Whether a value names a place below ``folder`` where nothing is."""
    place = value.partition("@[")[0]
    return place.startswith(f"{folder}{os.sep}") and "*" not in place and not os.path.lexists(place)


def _command(script: Path, config: Path) -> str:
    shown = re.search(rf"^#[ \t]+(.*\bpython )(\S*{re.escape(script.name)})", config.read_text(encoding="utf-8"), re.M)
    if shown is None:
        return f"python {script}"
    return shown[1] + (shown[2] if Path(shown[2]).is_file() else str(script))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or str(error)) + "; name an existing TOML or YAML file"
    return str(error)


def _entries(path: Path) -> list[_Entry]:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError("the name must end in .toml, .yaml or .yml")
    if path.exists() and not path.is_file():  # reading a pipe or a device might never end
        raise ValueError("is not a regular file; name a TOML or YAML file")
    if path.stat().st_size > _LARGEST_FILE:
        raise ValueError(f"has {path.stat().st_size:,} bytes; a file of options has at most {_LARGEST_FILE:,}")
    text = path.read_text(encoding="utf-8-sig")
    return _toml_entries(text) if path.suffix == ".toml" else _yaml_entries(text)


def _toml_entries(text: str) -> list[_Entry]:
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python converts no integer of more than some thousand digits
        long = next((i for i, line in enumerate(text.split("\n"), 1) if _LONG_NUMBER.search(line)), None)
        where = f"line {long}: " if long is not None else ""
        raise ValueError(f"{where}a number has too many digits for any option") from None
    lines: dict[str, int] = {}
    for i, line in enumerate(text.split("\n"), 1):
        if (match := _TOML_KEY.match(line)) is not None:
            lines.setdefault(match[match.lastindex or 0], i)
    return [_Entry(key, value, lines.get(key)) for key, value in values.items()]


def _yaml_entries(text: str) -> list[_Entry]:
    import yaml

    try:
        return _compose(_yaml_loader()(text))
    except yaml.reader.ReaderError as error:
        line = f"line {text.count(chr(10), 0, error.position) + 1}: "
        raise ValueError(f"{line}unacceptable character #x{error.character:04x}: {error.reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{line}{getattr(error, 'problem', None) or error}") from None
    except ValueError:
        raise
    except Exception as error:  # what PyYAML raises for values that do not fit their tag, and for deep nesting
        raise ValueError(f"it holds a value that cannot be read ({type(error).__name__})") from None


def _compose(loader: Any) -> list[_Entry]:
    import yaml

    try:
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"line {node.start_mark.line + 1}: expected `key: value` lines")
        entries = []
        for key, value in node.value:
            name = loader.construct_object(key, deep=True)
            line = key.start_mark.line + 1
            if not isinstance(name, str):
                raise ValueError(f"line {line}: the key {name!r} is not a word")
            entries.append(_yaml_entry(loader, name, value, line))
        return entries
    finally:
        loader.dispose()


def _yaml_entry(loader: Any, name: str, node: Any, line: int) -> _Entry:
    import yaml

    try:
        return _Entry(name, loader.construct_object(node, deep=True), line)
    except (yaml.YAMLError, RecursionError):
        raise
    except Exception as error:  # what PyYAML raises for a value that does not fit its tag: `!!int x`
        if not isinstance(node, yaml.ScalarNode):
            return _Entry(name, None, line, f"holds a value that cannot be read ({type(error).__name__}: {error})")
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        length = f" of {len(node.value)} digits" if node.value.isdigit() else ""
        shown = node.value if len(node.value) <= 80 else f"{node.value[:60]}..."
        return _Entry(name, None, line, f"{shown!r}{length} cannot be read as !!{tag}")


def _yaml_loader() -> type:
    """A safe loader of YAML 1.2 scalars: ``1e-6`` is a number; ``yes``, ``12:30`` and dates are strings. No aliases."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # a few lines of them can stand for gigabytes
                line = self.peek_event().start_mark.line + 1
                raise ValueError(f"line {line}: aliases (*name) are not read; write the value itself")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep=deep)
            if len(mapping) < len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "a key stands twice in this table", node.start_mark)
            return mapping

    number = list("-+0123456789.")
    for tag, pattern, first in (
        ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
        ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
        ("int", r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$", number),
        ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$", number),
    ):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first)
    Loader.add_constructor("tag:yaml.org,2002:int", _yaml_int)
    return Loader


def _yaml_int(loader: Any, node: Any) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16) if text.startswith("0x") else int(text)


def _expand(value: Any, folder: str) -> Any:
    """Puts the folder in the place of ``${config_dir}``, in nested values too."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda m: folder if m[1] == "$" else m[0][1:], value)
    if isinstance(value, list):
        return [_expand(v, folder) for v in value]
    if isinstance(value, dict):
        return {_expand(k, folder): _expand(v, folder) for k, v in value.items()}
    return value


def to_toml(value: Any) -> str:
    """One value as TOML text that :func:`read_file` reads as the same value."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = _PLACEHOLDER.sub(lambda m: "$" + m[0], value)
        return json.dumps(escaped, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    assert isinstance(value, dict), f"no option holds a {type(value)}"
    if _has_none(value):
        return to_toml(json.dumps(value))
    return "{" + ", ".join(f"{to_toml(str(k))} = {to_toml(v)}" for k, v in value.items()) + "}"


def _has_none(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_none, inner))
