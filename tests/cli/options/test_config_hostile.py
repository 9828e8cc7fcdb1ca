"""Whatever words a user writes, the answer is a configuration or a list of problems, never a traceback."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from command_words import changed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from relax_cli.checks.plan import plan_text
from relax_cli.config.command_line import MOST_SUGGESTIONS
from relax_cli.config.export import to_toml
from relax_cli.config.files import to_toml as value_to_toml
from relax_cli.config.options import namespace
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_cli.config.schema import Option
from relax_cli.main import main

ODD: dict[type, list[str]] = {
    int: ["0", "1", "2", "3", "-1", "-7", "1000000000000", "1000000000000000000000", "9" * 5000, "x", ""],
    float: ["0", "1", "-1", "0.5", "inf", "-inf", "1e-320", "nan", "x"],
    str: [
        "",
        "a",
        ".",
        "/",
        "none",
        "a:b",
        "{",
        "{rollout_id}",
        "{rollout_id!z}",
        "hf://a/b",
        "small",
        "~nouser/x",
        "\udcff",
        "\n",
        "é" * 300,
    ],
    dict: ["{}", '{"a": null}', "[", '{"image": 1}', '{"a": NaN}', '{"a":' * 100_000, '{"a": "\\ud800"}'],
}


def words(option: Option) -> st.SearchStrategy[list[str]]:
    if option.kind.base is bool:
        return st.sampled_from([[option.flag], ["--no-" + option.flag[2:]]])
    values = [str(c) for c in option.kind.choices] or ODD[option.kind.base]
    if "prompt_data" in option.name:  # neither the network nor the whole file system
        values = [v for v in values if not v.startswith(("hf://", "/"))]
    lists = st.lists(st.sampled_from(values), min_size=1, max_size=3 if option.kind.many else 1)
    return lists.map(lambda chosen: [option.flag, *chosen])


NOT_HERE = {"config", "ray_address"}
ANY_OPTION = st.sampled_from([o for o in namespace().options.values() if o.name not in NOT_HERE]).flatmap(words)


@given(
    st.lists(ANY_OPTION, min_size=1, max_size=4, unique_by=lambda group: group[0].replace("--no-", "--")), st.booleans()
)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_values_are_problems_or_make_a_plan(
    workspace: Path, start: list[str], chosen: list[Any], gpu: bool
) -> None:
    base = changed([*start, "--dry-run"], ["--num-gpus-per-node", "8"] if gpu else [])
    argv = changed(base, [w for group in chosen for w in group])
    config, problems = None, []
    try:
        config = resolve(argv, {})
    except ConfigError as error:
        problems = error.problems
    assert all("--" in problem for problem in problems), problems
    assert all(len(problem) < 2000 for problem in problems)
    if config is None:
        assert problems
        return
    assert plan_text(config)
    assert to_toml(config)
    assert dataclasses.is_dataclass(config)


HUGE = "9" * 400
BOMB = "a: &a [x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
FILES: list[tuple[str, bytes, str]] = [
    ("c.toml", f"lr = {HUGE}".encode(), "c.toml:1: lr: "),
    ("c.toml", f"lr = {'9' * 5000}".encode(), "digits"),
    ("c.toml", f"num_rollout = 0x{'f' * 5000}".encode(), "num_rollout: a int too large to be shown is out of range"),
    ("c.toml", b"num_rollout = 10000000000000", "num_rollout: 10000000000000 is out of range"),
    ("c.toml", f"apply_chat_template_kwargs = {{a = {HUGE}}}".encode(), "out of range"),
    ("c.toml", b"apply_chat_template_kwargs = {a = nan}", "holds nan"),
    ("c.toml", b"apply_chat_template_kwargs = {a = 2020-01-01}", "holds a date"),
    ("c.toml", b"prompt_data = " + b"[" * 50_000, "nested too deeply"),
    ("c.toml", b"apply_chat_template_kwargs = {a = " + b"[" * 50 + b"]" * 50 + b"}", "more than 32 levels"),
    ("c.toml", b'save = "a\\u0000b"', "NUL"),
    ("c.toml", b'label_key = ""', "empty string"),
    ("c.toml", b'rollout_stop = ["a", ""]', "empty string"),
    ("c.toml", b"lr = 1 # \xff", "utf-8"),
    ("c.toml", b"#" * 2_000_000, "2,000,000 bytes"),
    ("c.yaml", f"num_rollout: 0x{'f' * 5000}".encode(), "out of range"),
    ("c.yaml", f"lr: {'9' * 5000}".encode(), "digits"),
    ("c.yaml", BOMB.encode(), "line 2: aliases (*name) are not read"),
    ("c.yaml", b"a: &a [*a]", "aliases"),
    ("c.yaml", b"save: " + b"[" * 5_000, "cannot be read (RecursionError)"),
    ("c.yaml", b"save: !!timestamp x", "cannot be read"),
    ("c.yaml", b"save: !!float", "cannot be read"),
    ("c.yaml", b"seed: 1\nnum_rollout: !!int 'x'", "c.yaml:2: num_rollout: 'x' cannot be read as !!int"),
    ("c.yaml", b"seed: 1\nlr: !!float x", "c.yaml:2: lr: 'x' cannot be read as !!float"),
    ("c.yaml", b"seed: 1\ndry_run: !!bool maybe", "c.yaml:2: dry_run: 'maybe' cannot be read as !!bool"),
    ("c.yaml", b"eval_prompt_data: [a, !!int x]", "c.yaml:1: eval_prompt_data: holds a value that cannot be read"),
    ("c.yaml", b"multimodal_keys: {image: a, image: b}", "line 1: a key stands twice in this table"),
    ("c.toml", b'multimodal_keys = \'{"image": "a", "image": "b"}\'', "the key 'image' is given twice"),
    ("c.toml", f"seed = 1\nlr = {'9' * 5000}".encode(), "line 2: a number has too many digits"),
    ("c.yaml", b"seed: 1\nsave: a\0b", "line 2: unacceptable character #x0000"),
    ("c.yaml", b"save: a\0b", "special characters are not allowed"),
    ("c.yaml", b"save: !!python/object/apply:os.system [true]", "could not determine a constructor"),
    ("c.yaml", b"apply_chat_template_kwargs: {1: 2}", "keys are strings"),
    ("c.yaml", b'save: "a\\0b"', "NUL"),
    ("c.yaml", b"save: \xff\xfe", "utf-8"),
]


@pytest.mark.parametrize(("name", "content", "part"), FILES, ids=[f"{n}-{p}" for n, _, p in FILES])
def test_a_hostile_file_is_a_problem_that_names_it(
    workspace: Path, start: list[str], name: str, content: bytes, part: str
) -> None:
    (workspace / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        resolve([*start, "--config", name], {})
    told = "\n".join(refused.value.problems)
    assert name in told
    assert part in told
    assert len(told) < 2000


@pytest.mark.parametrize(("ending", "between"), [(".toml", " = "), (".yaml", ": ")])
def test_a_file_of_thousands_of_wrong_names_suggests_for_the_first_few(
    workspace: Path, start: list[str], ending: str, between: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / f"c{ending}").write_text("\n".join(f"num_rollou{i}{between}1" for i in range(20_000)))
    with pytest.raises(ConfigError) as refused:
        resolve([*start, "--config", f"c{ending}"], {})
    problems = refused.value.problems
    assert problems[19_999] == f"c{ending}:20000: num_rollou19999: no such option"
    assert sum("did you mean" in problem for problem in problems) == MOST_SUGGESTIONS
    assert main(["train", *start, "--config", f"c{ending}"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 52
    assert told[-1] == "  ... and 19950 more"


PIECES = [*"[]{}'\"=\n#|>?~-\t:& ", "&a", "*a", "!!int", "!!float", "!!binary", "!!set", "%YAML", "---", "<<"]
PIECES += ["1e999", "nan", "0x", "null", "true", "2020-01-01", "\\u0000", "\0", "'''", "10**9", "9" * 20, "- "]
LINES = st.lists(
    st.tuples(st.sampled_from(sorted(namespace().options)), st.lists(st.sampled_from(PIECES), max_size=5)),
    min_size=1,
    max_size=3,
)


@given(st.sampled_from([(".toml", " = "), (".yaml", ": ")]), LINES)
@example((".yaml", ": "), [("actor_num_nodes", []), ("ref_load", [])])
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_text_in_a_file_is_a_problem_or_makes_a_plan(
    workspace: Path, start: list[str], form: tuple[str, str], lines: list[tuple[str, list[str]]]
) -> None:
    ending, between = form
    text = "\n".join(f"{name}{between}{''.join(pieces)}" for name, pieces in lines)
    (workspace / f"c{ending}").write_text(text)
    try:
        config = resolve([*start, "--dry-run", "--config", f"c{ending}"], {})
    except ConfigError as error:
        assert error.problems  # noqa: PT017 (either outcome is right)
    else:
        assert plan_text(config)
        assert to_toml(config)


@pytest.fixture
def odd(workspace: Path) -> Path:
    """A folder whose ``config.json`` and ``c.toml`` are made by :func:`make_odd`."""
    (workspace / "odd").mkdir()
    return workspace / "odd"


def make_odd(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "deep":
        path.write_text('{"a":' * 100_000)
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "deep", "bytes"])
@pytest.mark.parametrize("where", ["--config", "--hf-checkpoint", "--ref-load"])
def test_what_is_no_readable_file_is_a_problem_and_no_hang(
    workspace: Path, odd: Path, start: list[str], kind: str, where: str
) -> None:
    path = odd / ("c.toml" if where == "--config" else "config.json")
    make_odd(path, kind)
    with pytest.raises(ConfigError) as refused:
        resolve(changed(start, [where, str(path if where == "--config" else odd)]), {})
    assert any(where in problem and str(path) in problem for problem in refused.value.problems), refused.value.problems


@pytest.mark.parametrize(
    "words", [["--save", "~nouser/x"], ["--save-hf", "~nouser/{rollout_id}"], ["--load", "~nouser"]]
)
def test_a_home_of_nobody_is_no_folder_named_like_it(workspace: Path, start: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve([*start, *words], {})
    assert any(f"{words[0]} ~nouser" in p and "no user" in p for p in refused.value.problems)


EMPTY_MEANS_NOTHING = [
    o for o in namespace().options.values() if o.kind.base is str and not o.kind.choices and o.name != "config"
]


@pytest.mark.parametrize("option", EMPTY_MEANS_NOTHING, ids=lambda option: option.name)
def test_an_empty_string_is_an_error_wherever_it_stands(workspace: Path, start: list[str], option: Option) -> None:
    (workspace / "c.toml").write_text(f'{option.name} = ""\n')
    variable = f"RELAX_{option.name.upper()}"
    for words, environ in (
        ([option.flag, ""], {}),
        (["--config", "c.toml"], {}),
        ([], {variable: "''" if option.kind.many else ""}),
    ):
        with pytest.raises(ConfigError, match="an empty string means nothing"):
            resolve(changed(start, words), environ)


# A run cannot do without prompts.
UNSETTABLE = [
    o for o in namespace().options.values() if o.kind.may_be_unset and o.name not in ("config", "prompt_data")
]


@pytest.mark.parametrize("option", UNSETTABLE, ids=lambda option: option.name)
def test_none_takes_back_what_a_file_sets(workspace: Path, option: Option) -> None:
    one: Any = {bool: True, int: 1, float: 0.5, dict: {"image": "image"}}.get(option.kind.base, "x")
    one = option.kind.choices[0] if option.kind.choices else one
    (workspace / "c.toml").write_text(f"{option.name} = {value_to_toml([one] if option.kind.many else one)}\n")
    base = ["--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl", "--dry-run", "--config", "c.toml"]
    for words, environ in (([option.flag, "none"], {}), ([], {f"RELAX_{option.name.upper()}": "none"})):
        assert option.name not in resolve([*base, *words], environ).given
