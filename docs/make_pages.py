"""Writes the pages that are made from the code: `uv run python docs/make_pages.py`; `--check` only compares.

A page that is written by hand beside a table in the code is wrong after the first change. CI and the tests compare.
"""

import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def configuration() -> str:
    """Every option of ``relax train``, by topic, from the declarations that the command line is made of."""
    from relax_cli.config.options import namespace, settings_classes
    from relax_cli.config.schema import Option

    options = namespace().options
    lines = [
        "# Configuration",
        "",
        "Every option of `relax train`, made from the declarations that the command line itself is made of",
        "(`docs/make_pages.py`). Options come from defaults, then `--config FILE` (TOML or YAML), then the environment",
        "(`RELAX_LR=1e-6`), then the command line; all errors of one start are reported together. Every other argument",
        "of SGLang's server is `--sglang-<name>`. In each of these places an option stands once.",
    ]
    for cls in settings_classes():
        own: list[Option] = [option for option in options.values() if option.owner is cls]
        if not own:
            continue
        lines += ["", f"## {cls.TITLE}", "", "| option | takes | default | |", "|---|---|---|---|"]  # type: ignore[attr-defined]
        lines += [_option_row(option) for option in own]
    return "\n".join(lines) + "\n"


def _option_row(option: object) -> str:
    from relax_cli.config.schema import Option

    assert isinstance(option, Option)
    if option.required:
        default = "required"
    elif option.default is None or option.default == ():
        default = "not set"
    else:
        value = option.default
        default = f"`{str(value).lower() if isinstance(value, bool) else value}`"
    takes = option.kind.noun + (f": {option.range}" if option.range else "")
    cells = (f"`{option.flag}`", takes, default, " ".join(option.help.split()))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


PAGES: dict[str, Callable[[], str]] = {"configuration.md": configuration}


def main(arguments: list[str]) -> int:
    """Writes the pages, or says which of them are not what the code says."""
    stale = []
    for name, make in PAGES.items():
        page, text = DOCS / name, make()
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    for name in stale:
        print(
            f"docs/{name} "
            + ("is not what the code says: run docs/make_pages.py" if "--check" in arguments else "written")
        )
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
