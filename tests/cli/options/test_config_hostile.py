"""Whatever words a user writes, the answer is a configuration or a list of problems, never a traceback."""

import dataclasses
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relax_cli.config import ConfigError, resolve, to_toml
from relax_cli.plan import plan_text
from relax_cli.registry import namespace
from relax_cli.schema import Option

ODD: dict[type, list[str]] = {
    int: ["0", "1", "2", "3", "-1", "-7", "1000000000000000000000", "x", ""],
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
        "\n",
        "é" * 300,
    ],
    dict: ["{}", '{"a": null}', "[", '{"image": 1}'],
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


@given(st.lists(ANY_OPTION, min_size=1, max_size=4), st.booleans())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_values_are_problems_or_make_a_plan(
    workspace: Path, start: list[str], chosen: list[Any], gpu: bool
) -> None:
    argv = [
        *start,
        "--dry-run",
        *(["--num-gpus-per-node", "8"] if gpu else []),
        *(w for group in chosen for w in group),
    ]
    config, problems = None, []
    try:
        config = resolve(argv, {})
    except ConfigError as error:
        problems = error.problems
    assert all("--" in problem for problem in problems), problems
    if config is None:
        assert problems
        return
    assert plan_text(config)
    assert to_toml(config)
    assert dataclasses.is_dataclass(config)
