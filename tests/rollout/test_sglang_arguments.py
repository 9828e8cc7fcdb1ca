"""`--sglang-<name>`: as strict as our own flags, from a table that needs neither torch nor SGLang."""

import subprocess
import sys
from pathlib import Path

import pytest
from relax_rollout.engines.sglang import arguments, cpu, gpu
from relax_rollout.engines.sglang.settings import SGLangSettings
from rollout.sglang_argument_kinds import HARMLESS


def test_a_known_argument_is_parsed_by_its_type() -> None:
    assert arguments.lookup("max-running-requests").parse(["64"]) == 64
    assert arguments.lookup("max_running_requests").parse(["64"]) == 64
    assert arguments.lookup("schedule-conservativeness").parse(["0.5"]) == 0.5
    assert arguments.lookup("disable-radix-cache").parse([]) is True
    assert arguments.lookup("log-level").parse(["INFO"]) == "INFO"
    assert arguments.lookup("extra-metric-labels").parse(['{"a": "b"}']) == '{"a": "b"}'
    assert arguments.lookup("cuda-graph-bs-decode").parse(["1", "2"]) == [1, 2]


def test_backends_without_kernels_are_named_for_each_attention() -> None:
    for name, value in gpu.KERNEL_FREE_OPTIONS.items():
        assert arguments.lookup(name).check(value) is None
    assert {"attention-backend", "mm-attention-backend"} <= set(gpu.KERNEL_FREE_OPTIONS), "a tower has its own"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("max-running-requests", ["many"], "--sglang-max-running-requests takes an integer, not 'many'"),
        ("max-running-requests", [], "takes one value, but got 0"),
        ("max-running-requests", ["1", "2"], "takes one value, but got 2"),
        ("page-size", ["0"], "--sglang-page-size is 0; it must be at least 1, or left out"),
        ("max-total-tokens", ["-5"], "--sglang-max-total-tokens is -5; it must be at least 1, or left out"),
        ("disable-radix-cache", ["true"], "--sglang-disable-radix-cache takes no value"),
        ("attention-backend", ["tritn"], "must be one of triton"),
        ("log-level", ["nope"], "--sglang-log-level is nope; it must be one of debug, info, warning, error, critical"),
        ("log-level-http", ["verbose"], "must be one of trace, debug"),
        ("extra-metric-labels", ["{"], "--sglang-extra-metric-labels takes JSON"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="--sglang-") as error:
        arguments.lookup(name).parse(words)
    assert message in str(error.value)


def test_an_unknown_argument_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean --sglang-attention-backend"):
        arguments.lookup("atention-backend")


@pytest.mark.parametrize("name", ["model-path", "port", "tp-size", "random-seed", "enable-memory-saver", "node-rank"])
def test_what_the_system_owns_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"--sglang-{name} cannot be set: .{{10,}}"):
        arguments.lookup(name)


def test_another_spelling_of_an_owned_argument_is_refused_too() -> None:
    with pytest.raises(ValueError, match="cannot be set: use --rollout-num-gpus-per-engine"):
        arguments.lookup("tensor-parallel-size")


def test_every_owned_name_exists_in_the_table() -> None:
    assert set(arguments.OWNED) <= set(arguments.server_arguments())


def test_every_argument_is_harmless_or_refused() -> None:
    """Nothing that a new release of SGLang brings passes through before somebody has looked at it."""
    harmless = [name for names in HARMLESS.values() for name in names]
    assert len(harmless) == len(set(harmless))
    assert set(arguments.OWNED).isdisjoint(harmless)
    main = {name for name, argument in arguments.server_arguments().items() if argument.alias_of is None}
    assert main - set(arguments.OWNED) - set(harmless) == set(), "put it into OWNED, or say in HARMLESS why it may pass"
    assert set(harmless) <= main


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json-model-override-args", '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}'),
        ("quantization", "fp8"),
        ("kv-cache-dtype", "fp8_e4m3"),
        ("dtype", "float16"),
        ("load-format", "dummy"),
        ("model-impl", "transformers"),
        ("lora-paths", ["a=b"]),
        ("speculative-accept-threshold-single", 0.5),
        ("allow-auto-truncate", True),
        ("hicache-storage-backend", "file"),
        ("pipeline-parallel-size", 2),
    ],
)
def test_an_argument_that_changes_one_side_only_is_refused(name: str, value: object) -> None:
    (problem,) = SGLangSettings(sglang_extra={name: value}).problems()
    assert problem.startswith(f"--sglang-{name} cannot be set: ")


def test_all_problems_of_the_settings_are_told_together() -> None:
    settings = SGLangSettings(
        rollout_num_gpus_per_engine=0,
        sglang_mem_fraction_static=1.5,
        sglang_extra={"max_running_requests": "x", "prot": 1, "port": 1, "disable_radix_cache": 1},
    )
    text = "\n".join(settings.problems())
    assert "--rollout-num-gpus-per-engine must be 1 or more, not 0" in text
    assert "--sglang-mem-fraction-static must be below 1, not 1.5" in text
    assert "--sglang-max-running-requests takes an integer" in text
    assert "--sglang-prot: SGLang's server has no argument --prot" in text
    assert "--sglang-port cannot be set" in text
    assert "--sglang-disable-radix-cache must be true or false" in text
    assert len(settings.problems()) == 6


def test_two_spellings_of_one_argument_are_an_error() -> None:
    found = arguments.problems({"attn-cp-size": 1, "attention-context-parallel-size": 2})
    assert len(found) == 1
    assert "are the same option" in found[0]


def test_the_users_value_replaces_a_default_also_under_another_spelling() -> None:
    merged = arguments.merge({"attn-cp-size": 1, "sleep-on-idle": True}, {"attention_context_parallel_size": 2})
    assert merged == {"attn-cp-size": 2, "sleep-on-idle": True}


def test_words_for_the_command_line() -> None:
    options = {"a": True, "b": False, "c": None, "d": [1, 2], "e_f": 0.5, "g": {"x": 1}}
    assert arguments.to_argv(options) == ["--a", "--d", "1", "2", "--e-f", "0.5", "--g", '{"x": 1}']


def test_the_settings_and_the_table_load_without_torch_and_sglang() -> None:
    code = (
        "import sys; from relax_rollout.engines.sglang import arguments;"
        "from relax_rollout.engines.sglang.settings import SGLangSettings;"
        "arguments.server_arguments(); SGLangSettings(sglang_extra={'context-length': 5}).problems();"
        "print([m for m in ('torch', 'sglang', 'transformers', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_table_is_that_of_the_installed_sglang(tmp_path: Path) -> None:
    import os

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "relax_rollout.engines.sglang.arguments"],
        capture_output=True,
        text=True,
        env=cpu.environment(os.environ),
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == arguments.TABLE.read_text(), "run: python -m relax_rollout.engines.sglang.arguments --write"
