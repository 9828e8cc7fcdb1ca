"""Words to values: kinds, the command line, the environment, and the names that are suggested."""

import dataclasses
from typing import Any, ClassVar, Literal

import pytest
from relax_cli.config.command_line import MOST_SUGGESTIONS, Namespace, read_command_line, read_environment
from relax_cli.config.options import namespace, settings_classes
from relax_cli.config.schema import UNSET, Kind, from_object, from_text, kind_of, merge_options
from relax_cli.config.suggest import nearest
from relax_data.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    TITLE: ClassVar[str] = "Example"

    name: str = option(help="Required.")
    steps: tuple[int, ...] = option((), "Many.")
    rate: float | None = option(0.5, "Optional.")
    fast: bool = option(False, "Switch.")
    color: Literal["red", "green"] = option("red", "Choice.")
    extra: dict[str, Any] | None = option(None, "JSON.")  # noqa: RUF009


EXAMPLE = Namespace(merge_options([Example]))


def read(*words: str) -> dict[str, Any]:
    layer = read_command_line(words, EXAMPLE)
    assert not layer.errors
    return {name: given.value for name, given in layer.values.items()}


def errors(*words: str) -> list[str]:
    return read_command_line(words, EXAMPLE).errors


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (bool, Kind(bool)),
        (int | None, Kind(int, optional=True)),
        (tuple[str, ...], Kind(str, many=True)),
        (tuple[Literal["a", "b"], ...] | None, Kind(str, many=True, optional=True, choices=("a", "b"))),
        (Literal[1, 2], Kind(int, choices=(1, 2))),
        (dict[str, Any], Kind(dict)),
    ],
)
def test_kind_of_an_annotation(annotation: Any, kind: Kind) -> None:
    assert kind_of(annotation) == kind


@pytest.mark.parametrize("annotation", [int | str, list[int], tuple[int, int], tuple[bool, ...], bytes])
def test_an_annotation_that_no_option_can_have_is_our_bug(annotation: Any) -> None:
    with pytest.raises(AssertionError):
        kind_of(annotation)


def test_command_line_reads_every_kind() -> None:
    words = ["--name", "x y", "--steps", "2", "5", "-10", "--rate", "-1e-6", "--fast", "--color=green"]
    assert read(*words, "--extra", '{"a": [1, null]}') == {
        "name": "x y",
        "steps": (2, 5, -10),
        "rate": -1e-6,
        "fast": True,
        "color": "green",
        "extra": {"a": [1, None]},
    }


def test_no_form_none_and_values_with_dashes() -> None:
    assert read("--no-fast", "--rate", "none", "--name=--x") == {"fast": False, "rate": UNSET, "name": "--x"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 1 --rate 2", "--rate: given twice; one of them would have no effect: remove it"),
        ("--rate 1 --rate 1", "--rate: given twice; one of them would have no effect: remove it"),
        ("--rate none --rate=2", "--rate: given twice; one of them would have no effect: remove it"),
        ("--steps 1 2 --steps 3", "--steps: given twice; one of them would have no effect: remove it"),
        ("--fast --no-fast", "--no-fast: given twice, also as --fast; one of them would have no effect: remove it"),
        ("--no-fast --fast", "--fast: given twice, also as --no-fast; one of them would have no effect: remove it"),
        ("--fast --fast", "--fast: given twice; one of them would have no effect: remove it"),
        ('--extra {"a":1,"b":{"c":1,"c":2}}', "--extra: the key 'c' is given twice in it; remove one"),
    ],
)
def test_an_option_given_twice_is_an_error(words: str, message: str) -> None:
    assert errors(*words.split()) == [message]


def test_the_first_of_two_is_checked_too() -> None:
    first, second = errors("--rate", "fast", "--rate", "1")
    assert first == "--rate: expected a number, found 'fast'"
    assert second.startswith("--rate: given twice")


def test_an_argument_of_the_server_given_twice_is_an_error() -> None:
    layer = read_command_line(
        ["--sglang-attention-backend", "triton", "--sglang-attention-backend", "fa3"], namespace()
    )
    assert layer.errors == ["--sglang-attention-backend: given twice; one of them would have no effect: remove it"]


def test_thousands_of_wrong_names_are_errors_without_suggestions_at_once() -> None:
    words = [f"--rat{i}" for i in range(5000)]
    found = errors(*words)
    assert len(found) == 5000
    assert sum("did you mean" in message for message in found) == MOST_SUGGESTIONS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nam", "x"], "--nam: no such option; did you mean --name?"),
        (["--rat"], "--rat: no such option; did you mean --rate?"),
        (["--rate", "fast"], "--rate: expected a number, found 'fast'"),
        (["--rate", "nan"], "--rate: expected a number, found 'nan'"),
        (["--rate", "1", "2"], "--rate: expected a number, found 2 values: 1 2"),
        (["--rate"], "--rate: expected a number, found nothing"),
        (["--steps", "1", "2.5"], "--steps: expected an integer, found '2.5'"),
        (["--color", "blue"], "--color: expected one of red, green, found 'blue'"),
        (["--fast", "true"], "--fast: takes no value, found 'true'; write --fast or --no-fast"),
        (["--fast=false"], "--fast: takes no value, found 'false'; write --fast or --no-fast"),
        (["--no-rate"], "--no-rate: --rate takes a value, so there is no --no-rate"),
        (["--extra", "[1]"], "--extra: expected a table, found '[1]'"),
        (["--extra", "{a"], "--extra: expected a JSON object such as '{\"key\": 1}', found '{a'"),
        (["stray", "--fast"], "stray: a value without a flag; flags begin with --"),
    ],
)
def test_command_line_errors_name_flag_value_and_fix(words: list[str], message: str) -> None:
    assert errors(*words) == [message]


def test_all_errors_of_a_command_line_are_collected() -> None:
    assert len(errors("--rate", "x", "--color", "blue", "--unknown-thing", "--fast", "1")) == 4


def test_underscores_on_the_command_line_are_a_near_miss() -> None:
    layer = read_command_line(["--max_tokens_per_gpu", "1"], namespace())
    assert layer.errors == ["--max_tokens_per_gpu: no such option; did you mean --max-tokens-per-gpu?"]


def test_an_abbreviation_is_an_error_that_names_what_it_may_stand_for() -> None:
    (message,) = read_command_line(["--tensor-model", "2"], namespace()).errors
    assert "no such option" in message
    assert "--tensor-model-parallel-size" in message


def test_environment_reads_lists_switches_and_numbers() -> None:
    environ = {"RELAX_STEPS": "2 5 10", "RELAX_FAST": "true", "RELAX_RATE": "none", "RELAX_NAME": "a b", "OTHER": "x"}
    layer = read_environment(environ, EXAMPLE)
    assert not layer.errors
    values = {name: given.value for name, given in layer.values.items()}
    assert values == {"steps": (2, 5, 10), "fast": True, "rate": UNSET, "name": "a b"}
    assert layer.values["steps"].origin == "RELAX_STEPS"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RELAX_FAST", "yes", "environment RELAX_FAST: expected true or false, found 'yes'"),
        ("RELAX_RATES", "1", "environment RELAX_RATES: no such option; did you mean RELAX_RATE?"),
        ("RELAX_rate", "1", "environment RELAX_rate: no such option; did you mean RELAX_RATE?"),
        ("RELAX_STEPS", "'1", "environment RELAX_STEPS: No closing quotation"),
    ],
)
def test_environment_errors(variable: str, value: str, message: str) -> None:
    assert read_environment({variable: value}, EXAMPLE).errors == [message]


def test_the_cache_folder_is_no_option() -> None:
    assert not read_environment({"RELAX_CACHE_DIR": "/tmp"}, EXAMPLE).errors


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Kind(int), "1"),
        (Kind(int), True),
        (Kind(int), 1.0),
        (Kind(float), "1e-6"),
        (Kind(float), False),
        (Kind(bool), "true"),
        (Kind(bool), 1),
        (Kind(str), 1),
        (Kind(str), None),
        (Kind(int, many=True), [1, "2"]),
        (Kind(str, choices=("a",)), "b"),
        (Kind(dict), [1]),
    ],
)
def test_types_in_files_are_strict(kind: Kind, value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        from_object(kind, value)


def test_what_files_may_write_shorter() -> None:
    assert from_object(Kind(float), 1) == 1.0
    assert isinstance(from_object(Kind(float), 1), float)
    assert from_object(Kind(str, many=True), "one") == ("one",)
    assert from_object(Kind(int, optional=True), None) is UNSET
    assert from_object(Kind(int, optional=True), "none") is UNSET
    assert from_object(Kind(str, many=True), "none") is UNSET
    assert from_object(Kind(dict), '{"a": null}') == {"a": None}


def test_none_is_a_word_where_none_is_no_value() -> None:
    assert from_text(Kind(str), ["none"]) == "none"


def test_two_classes_with_one_option_are_our_bug() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other:
        rate: float = option(1.0, "Again.")

    with pytest.raises(AssertionError, match="--rate"):
        merge_options([Example, Other])


def test_a_name_that_reads_as_a_no_form_is_our_bug() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other:
        no_fast: int = option(1, "Ambiguous.")

    with pytest.raises(AssertionError, match="no_fast"):
        merge_options([Example, Other])


def test_every_option_of_every_package_has_help_and_a_readable_kind() -> None:
    options = merge_options(settings_classes())
    assert len(options) > 140
    for name, found in options.items():
        assert found.help, f"{name} has no help"
        assert name == name.lower()


def test_sglang_arguments_pass_through_with_their_types() -> None:
    words = [
        "--sglang-attention-backend",
        "triton",
        "--sglang-max-running-requests",
        "64",
        "--sglang-disable-radix-cache",
    ]
    layer = read_command_line([*words, "--sglang-cuda-graph-bs", "1", "2"], namespace())
    assert not layer.errors
    assert {name: given.value for name, given in layer.values.items()} == {
        "sglang_attention_backend": "triton",
        "sglang_max_running_requests": 64,
        "sglang_disable_radix_cache": True,
        "sglang_cuda_graph_bs": (1, 2),
    }


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--sglang-attention-backnd", "triton"], ["no such option", "--sglang-attention-backend"]),
        (["--sglang-model-path", "x"], ["--hf-checkpoint"]),
        (["--sglang-max-running-requests", "many"], ["expected an integer", "'many'"]),
    ],
)
def test_wrong_sglang_arguments(words: list[str], parts: list[str]) -> None:
    (message,) = read_command_line(words, namespace()).errors
    assert words[0] in message
    for part in parts:
        assert part in message


def test_nearest_prefers_the_same_words_then_close_spellings() -> None:
    names = ["max-tokens-per-gpu", "log-probs-max-tokens-per-gpu", "lr", "lr-decay-style"]
    assert nearest("max_tokens_per_gpu", names) == ["max-tokens-per-gpu"]
    assert nearest("max-token-per-gpu", names)[0] == "max-tokens-per-gpu"
    assert nearest("lr-decay", names) == ["lr-decay-style"]
    assert nearest("zzzzzz", names) == []
