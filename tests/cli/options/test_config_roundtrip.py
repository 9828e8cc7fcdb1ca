"""`--print-config` prints what `--config` reads back as the same configuration."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relax_cli.config.command_line import Namespace
from relax_cli.config.export import to_toml
from relax_cli.config.files import read_file
from relax_cli.config.files import to_toml as value_to_toml
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import RunConfig
from relax_cli.config.schema import UNSET, Kind, Option

# What a process can be given as an argument: no NUL, no half of a surrogate pair.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    ["${config_dir}", "$${config_dir}/x", "$$${config_dir}", '"', "\\", "\x7f", "é\u2028\r\n\t"]
)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
WORDS = TEXT.filter(bool)
INTEGERS = st.integers(-(10**12), 10**12)
JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | INTEGERS | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
KINDS: list[tuple[Kind, Any]] = [
    (Kind(str), WORDS),
    (Kind(int), INTEGERS),
    (Kind(float), NUMBER),
    (Kind(bool), st.booleans()),
    (Kind(str, many=True), st.lists(WORDS, max_size=4).filter(lambda words: words != ["none"]).map(tuple)),
    (Kind(float, many=True, optional=True), st.just(UNSET) | st.lists(NUMBER, max_size=4).map(tuple)),
    (Kind(dict), st.dictionaries(TEXT, JSON_VALUES, max_size=3)),
]


@given(st.sampled_from(KINDS).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1])))
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_value_survives_a_file(tmp_path: Path, pair: tuple[Kind, Any]) -> None:
    kind, value = pair
    path = tmp_path / "one.toml"
    path.write_text(f"key = {value_to_toml(None if value is UNSET else value)}\n", encoding="utf-8", newline="")
    layer = read_file(path, Namespace({"key": Option("key", kind, "default")}))
    assert not layer.errors
    read = layer.values["key"].value
    assert read == value
    assert type(read) is type(value)


# Options that go with each other whatever their values are.
FREE: dict[str, Any] = {
    "lr": st.floats(0, 1),
    "weight_decay": st.floats(0, 1),
    "seed": st.integers(0, 2**32 - 1),
    "rollout_temperature": st.floats(0.1, 2),
    "rollout_stop": st.lists(WORDS, min_size=1, max_size=3),
    "rollout_stop_token_ids": st.lists(st.integers(0, 1000), min_size=1, max_size=3),
    "system_prompt": WORDS,
    "apply_chat_template_kwargs": st.dictionaries(TEXT, JSON_VALUES, max_size=2),
    "rollout_shuffle": st.booleans(),
    "use_tensorboard": st.booleans(),
    "kl_loss_type": st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
    "sglang_schedule_policy": st.sampled_from(["lpm", "fcfs"]),
    "sglang_max_running_requests": st.integers(1, 512),
    "tb_experiment_name": st.from_regex(r"\A[a-z0-9.-]{2,10}[a-z]\Z"),
}


def words_of(name: str, value: Any) -> list[str]:
    import json

    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        # A list has one `=` at most, so a word of it that begins with dashes cannot be told from a flag.
        return [flag, *(w if not w.startswith("--") else f"x{w}" for w in map(str, value))]
    return [f"{flag}={value!r}" if isinstance(value, float) else f"{flag}={value}"]


def comparable(config: RunConfig) -> tuple[Any, ...]:
    parts = [p for p in config.parts() if type(p).__name__ not in ("RunSettings",)]
    return (*parts, config.given - {"config", "print_config"}, config.placement, config.notes, config.warnings)


@given(st.fixed_dictionaries({}, optional=FREE))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_configuration_survives_print_config(workspace: Path, model: list[str], chosen: dict[str, Any]) -> None:
    argv = [*model, "--print-config", "--use-kl-loss", "--kl-loss-coef", "0.1", "--apply-chat-template"]
    for name, value in chosen.items():
        argv += words_of(name, value)
    config = resolve(argv, {})
    text = to_toml(config)
    tomllib.loads(text)
    (workspace / "printed.toml").write_text(text, encoding="utf-8", newline="")
    again = resolve(["--config", "printed.toml", "--print-config"], {})
    assert comparable(again) == comparable(config)
    assert to_toml(again) == text


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e16, 1e-300, 0.1 + 0.2])
def test_numbers_at_the_edges(value: float) -> None:
    assert tomllib.loads(f"x = {value_to_toml(value)}")["x"] == value


def test_what_nobody_set_says_what_it_will_be(workspace: Path, model: list[str]) -> None:
    words = [*model, "--print-config", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1500"]
    lines = to_toml(resolve(words, {})).splitlines()
    for expected in (
        '# bf16 = "none"  # by default on with CUDA, off (float32) on CPU',
        '# eval_temperature = "none"  # by default --rollout-temperature',
        '# tb_experiment_name = "none"  # by default one that the driver makes once',
        '# rollout_max_context_len = "none"  # here 1500 tokens, from the model and --max-tokens-per-gpu',
        "# over_sampling_batch_size = 32",
        '# save = "none"',
    ):
        assert expected in lines
