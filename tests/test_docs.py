"""What the documentation says of the code is so: its links, paths, modules, flags and examples, and the site builds."""

import ast
import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("packages/*/README.md")])
SITE = sorted(DOCS.glob("*.md"))
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

OTHERS = {
    "--address": "ray start",
    "--advantage-clip": "a recipe of extending.md adds it",
    "--all-files": "pre-commit",
    "--by-stage": "relax profile",
    "--duration": "relax profile",
    "--experts": "examples/arithmetic/make_task.py",
    "--extra": "uv",
    "--frozen": "uv",
    "--group": "uv",
    "--head": "ray start",
    "--help": "every command",
    "--html": "relax report",
    "--in-turn": "a recipe of extending.md adds it",
    "--json": "relax report",
    "--local-dir": "hf download",
    "--max-token-per-gpu": "a misspelt flag, as an example",
    "--no-deps": "uv",
    "--no-dev": "uv",
    "--no-emit-workspace": "uv",
    "--no-hashes": "uv",
    "--no-x": "stands for any flag",
    "--node-ip-address": "ray start",
    "--nproc-per-node": "torchrun",
    "--num-cpus": "ray start",
    "--num-steps": "relax profile",
    "--only": "a script of the tests",
    "--out": "relax profile",
    "--peak-tflops": "relax report",
    "--port": "ray start",
    "--python": "uv",
    "--sglang-": "begins the flags that go to SGLang's server",
    "--untaught": "examples/arithmetic/make_task.py",
    "--url": "relax profile",
    "--x": "stands for any flag",
}
"""Flags in the pages that are not of ``relax train``, and whose they are."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_blocks(text: str) -> str:
    """A page without its fenced and indented code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return re.sub(r"^(?: {4}|\t).*$", "", text, flags=re.M)


def spans(page: Path) -> list[str]:
    """What stands in backticks."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", without_blocks(text_of(page)))]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and Python-Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(text_of(page)), re.M)
    words = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", word) for word in words} | {re.sub(r"[-\s]+", "-", word) for word in words}


# ---------------------------------------------------------------------- what is made from the code


@pytest.mark.parametrize("script", ["make_pages.py", "drawings/make.py"])
def test_what_is_made_by_a_script_is_up_to_date(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(DOCS / script))["main"](["--check"]) == 0, capsys.readouterr().out


def test_every_drawing_is_shown_and_made_by_the_script() -> None:
    drawn = {file.name for file in (DOCS / "drawings").glob("*.svg")}
    shown = {name for page in SITE for name in re.findall(r"!\[[^\]]+\]\(drawings/([^)]+)\)", text_of(page))}
    made = set(re.findall(r'"([\w-]+\.svg)": \w+', text_of(DOCS / "drawings" / "make.py")))
    assert drawn == shown == made


def test_files_that_the_drawings_name_exist() -> None:
    """Each is a file of the packages, and the types that stand in backticks in the script are defined somewhere."""
    script = text_of(DOCS / "drawings" / "make.py")
    named = set(re.findall(r"[\w/]+\.py\b", script)) - {"make_pages.py", "docs/drawings/make.py"}
    files = [file.as_posix() for file in ROOT.glob("packages/*/src/**/*.py")]
    assert len(named) > 25
    assert [name for name in sorted(named) if not any(file.endswith("/" + name) for file in files)] == []
    types = set(re.findall(r"`([A-Z]\w+)", script))
    assert len(types) > 10
    assert types - defined() == set()


@functools.cache
def defined() -> set[str]:
    """Names of all classes, functions and variables of the packages."""
    names = set()
    for file in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


# ---------------------------------------------------------------------- links, paths, modules, flags


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(page))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(target)
    assert wrong == []


def flag_is_known(flag: str) -> bool:
    """Whether it is a flag of ``relax train`` or ``simulate``, one that goes to SGLang, or one of :data:`OTHERS`."""
    from relax_cli.config.options import namespace
    from relax_cli.simulate.command import options

    name = flag.removeprefix("--").replace("-", "_")
    names = (name, name.removeprefix("no_"))
    return flag in OTHERS or any(known in options() or namespace().find(known) is not None for known in names)


def flags_of(page: Path) -> set[str]:
    """Flags that a page names in backticks and in commands; not in Python and in changes of files."""
    text = re.sub(r"^```(?:python|diff|toml).*?^```$", "", text_of(page), flags=re.M | re.S)
    commands = re.findall(r"^(?: {4}|\t).*$", text, re.M)
    return {flag for part in [*spans(page), *commands] for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", part)}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_flag_that_is_named_exists(page: Path) -> None:
    assert [flag for flag in sorted(flags_of(page)) if not flag_is_known(flag)] == []


def test_flags_that_are_others_are_named_somewhere() -> None:
    named = {flag for page in PAGES for flag in flags_of(page)}
    assert set(OTHERS) - named == set()


def name_is_known(dotted: str) -> bool:
    """Whether a dotted name is a module of ours, or something that one holds."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        folder = ROOT / "packages" / parts[0].replace("_", "-") / "src" / Path(*parts[:end])
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not file.is_file() and not folder.is_dir():
            continue
        rest = parts[end:]
        if not rest or not file.is_file():
            return not rest
        return rest[0] in text_of(file) and all(name in defined() for name in rest)
    return False


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_module_that_is_named_exists(page: Path) -> None:
    names = {n for span in spans(page) for n in re.findall(r"(?<![\w./-])relax_[a-z]+(?:\.\w+)+", span)}
    assert [name for name in sorted(names) if not name_is_known(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_class_that_is_named_exists(page: Path) -> None:
    word = r"(?:[A-Z][a-z]+){2,}\b"
    names = {found[0] for span in spans(page) if (found := re.match(word, span))}
    assert names - defined() - {"TensorBoard", "TransferQueue", "ValueError"} == set()


@pytest.mark.parametrize("page", SITE, ids=[page.name for page in SITE])
def test_every_function_and_field_that_is_named_exists(page: Path) -> None:
    words = {w for file in ROOT.glob("packages/*/src/**/*.py") for w in re.findall(r"\w+", text_of(file))}
    names = {span for span in spans(page) if re.fullmatch(r"[a-z]+(?:_[a-z]+)+", span)}
    assert names - words == set()


def path_is_known(path: str) -> bool:
    """Whether a path is there: from the root, or within the sources of a package."""
    places = [ROOT, *ROOT.glob("packages/*/src"), *ROOT.glob("packages/*/src/*")]
    return any(next(iter(place.glob(path.rstrip("/"))), None) is not None for place in places)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_path_of_the_repository_that_is_named_exists(page: Path) -> None:
    ours = r"(?:packages|docs|tests|benchmarks|examples|\.ci|relax_[a-z]+)/[\w./*-]*"
    paths = {found for span in spans(page) for found in re.findall(rf"(?<![\w/.-]){ours}", span)}
    assert [path for path in sorted(paths) if not path_is_known(path)] == []


def test_the_checks_find_what_is_not_there() -> None:
    assert not flag_is_known("--no-such-flag")
    assert flag_is_known("--no-colocate")
    assert flag_is_known("--sglang-attention-backend")
    assert not name_is_known("relax_data.nothing")
    assert not name_is_known("relax_data.types.Nothing")
    assert name_is_known("relax_data.types.Sample")
    assert name_is_known("relax_rollout.rewards")
    assert not path_is_known("tests/nothing.py")
    assert path_is_known("relax_cli/config")


# ---------------------------------------------------------------------- examples


def python_blocks() -> Iterator[tuple[str, str, bool]]:
    """Name, code, and whether it is marked as runnable."""
    for page in SITE:
        for number, found in enumerate(
            re.finditer(r"(<!-- runnable -->\n)?^```python[^\n]*\n(.*?)^```$", text_of(page), re.M | re.S), start=1
        ):
            yield f"{page.name}:{number}", found[2], found[1] is not None


@pytest.mark.parametrize(("name", "code"), [pytest.param(n, c, id=n) for n, c, _ in python_blocks()])
def test_python_of_the_pages_compiles(name: str, code: str) -> None:
    compile(code, name, "exec")


@pytest.mark.parametrize("code", [pytest.param(c, id=n) for n, c, runs in python_blocks() if runs])
def test_examples_that_are_marked_run(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_algorithms.py"
    file.write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(file.name, run_name="__main__")
    told = capsys.readouterr().out
    printed = re.findall(r"print\(.*\)  # (.*)$", code, re.M)
    assert all(line in told for line in printed), told


def test_the_commands_for_a_mixture_of_experts_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is made as the page says, and the run that it shows is planned; others run one."""
    from relax_cli.main import main

    section = text_of(DOCS / "models.md").partition("## A mixture of experts on a CPU")[2].partition("\n## ")[0]
    make, train = (
        shlex.split(c.replace("\\\n", "")) for c in re.findall(r"^    uv run ((?:.*\\\n)*.*)$", section, re.M)
    )
    assert (make[0], train[:2]) == ("python", ["relax", "train"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / make[1]), *make[2:]])
    runpy.run_path(sys.argv[0], run_name="__main__")
    capsys.readouterr()
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in train[1:]]
    assert main([*words, "--actor-num-gpus-per-node", "0", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "qwen3_moe, 4 layers, hidden 128, 4 heads, 4 experts of which 2 a token" in plan
    assert "2 x 1 x 1 a pipeline stage" in plan, "two ranks have two experts each"
    assert "A real start still needs" not in plan


def test_there_are_examples_that_run() -> None:
    assert sum(runs for _, _, runs in python_blocks()) >= 4


# ---------------------------------------------------------------------- the site


@pytest.mark.slow
def test_the_site_builds_strictly_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed: it brings mkdocs in an environment of its own")
    command = [uv, "run", "--frozen", "--isolated", "--only-group", "docs", "mkdocs", "build", "--strict"]
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    found = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    for page in SITE:
        name = "index.html" if page.stem == "index" else f"{page.stem}/index.html"
        html = (tmp_path / "site" / name).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*?(?:src|href)="(https?:[^"]*)"', html)
        assert loaded == [], f"{page.name} loads {loaded}"
