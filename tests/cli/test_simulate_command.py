"""`relax simulate`: figures that are given or read from a run, the table, JSON, and what is refused."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_cli.main import main
from relax_cli.run.tracking import JsonLinesTracker
from relax_cli.simulate.measured import TooMuchAlike, fit_engine
from relax_cli.simulate.model import Lengths, Plan, Rates, Simulation
from relax_rollout.staleness import StalenessBound

RATES = ["--engine-rate", "20000", "--engine-half", "150", "--train-rate", "9000"]
LENGTHS = ["--response-length-mean", "4000", "--rollout-max-response-len", "16000"]
QUICK = ["--num-rollout", "10", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
GIVEN = [*RATES, *LENGTHS, *QUICK]


def output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["simulate", *argv])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def found(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(output([*argv, "--json"], capsys))
    return answer


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main(["simulate", *argv])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    first, *problems = captured.err.splitlines()
    assert first.startswith("relax simulate: ")
    assert first.endswith(", nothing was started")
    return problems


# ---------------------------------------------------------------------- what is printed


def test_the_table_says_that_it_is_a_model_and_marks_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(["--num-gpus", "8", *GIVEN], capsys).splitlines()
    assert lines[0].startswith("A model, not a measurement")
    rows = [line for line in lines if line[1:3] == "  " and line[3:].startswith(("colocate", "fully async"))]
    assert len(rows) == 1 + 4 + 3 * 4
    assert sum(line.startswith("*") for line in rows) == 1
    assert any(line.split() == ["train-rate", "9000", "--train-rate"] for line in lines)
    assert any(line.startswith("push-seconds") and "assumed" in line for line in lines)
    assert max(map(len, lines)) <= 145


def test_json_holds_what_the_table_shows(capsys: pytest.CaptureFixture[str]) -> None:
    answer = found(["--max-staleness", "1", "--rollout-num-gpus", "4", *GIVEN], capsys)
    assert [row["plan"]["mode"] for row in answer["rows"]] == ["colocate", "colocate + partial", "fully async"]
    assert sum(row["best"] for row in answer["rows"]) == 1
    plain, partial, split = answer["rows"]
    assert plain["speed_up"] == 1
    assert partial["plan"]["bound"] == {"batch": 4, "depth": 8, "max_staleness": 1}
    assert (split["plan"]["train_gpus"], split["rollout_gpus"], split["plan"]["engines"]) == (4, 4, 4)
    assert split["speed_up"] == pytest.approx(plain["step"]["seconds"] / split["step"]["seconds"])
    assert answer["figures"]["engine_rate"] == {"value": 20000, "source": "--engine-rate"}
    assert answer["figures"]["prefill_rate"]["value"] == 27000


def test_a_seed_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    first, again = (output([*GIVEN, "--seed", "3"], capsys) for _ in range(2))
    assert first == again
    assert output([*GIVEN, "--seed", "4"], capsys) != first


def test_of_rows_that_are_about_equal_the_freshest_is_best(capsys: pytest.CaptureFixture[str]) -> None:
    slow_trainer = ["--train-rate", "500", "--engine-rate", "1e6", "--engine-half", "0"]
    argv = [*slow_trainer, *LENGTHS, *QUICK, "--rollout-num-gpus", "1", "--max-staleness", "8", "1", "4"]
    rows = found(argv, capsys)["rows"]
    (marked,) = (row for row in rows if row["best"])
    assert marked["step"]["staleness_max"] <= 1


def test_one_gpu_has_nothing_to_split(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(["--num-gpus", "1", *GIVEN], capsys)["rows"]
    assert {row["plan"]["mode"] for row in rows} == {"colocate", "colocate + partial"}
    assert refusal(["--num-gpus", "1", "--rollout-num-gpus", "1", *GIVEN], capsys) == [
        "  - --rollout-num-gpus 1 leaves none of --num-gpus 1 to train: lower the one or raise the other"
    ]


def test_a_thousand_gpus_and_staleness_0(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(["--num-gpus", "1024", "--max-staleness", "0", *GIVEN], capsys)["rows"]
    assert [row["rollout_gpus"] for row in rows] == [1024, 256, 512, 768]
    assert all(row["step"]["staleness_max"] == 0 for row in rows)


def test_engines_of_several_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found(["--num-gpus", "8", "--rollout-num-gpus-per-engine", "4", *GIVEN], capsys)["rows"]
    assert {(row["rollout_gpus"], row["plan"]["engines"]) for row in rows} == {(8, 2), (4, 1)}
    told = refusal(["--num-gpus", "6", "--rollout-num-gpus-per-engine", "4", "--rollout-num-gpus", "3", *GIVEN], capsys)
    assert [line for line in told if "no multiple of --rollout-num-gpus-per-engine 4" in line] == told
    assert len(told) == 2


def test_without_partial_rollout_a_push_waits(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--max-staleness", "2", "--rollout-num-gpus", "4", *GIVEN]
    kept, waits = found(argv, capsys)["rows"], found([*argv, "--no-partial-rollout"], capsys)["rows"]
    assert [row["plan"]["mode"] for row in waits] == ["colocate", "fully async"]
    assert waits[-1]["step"]["seconds"] > kept[-1]["step"]["seconds"]


def test_open_groups_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found([*GIVEN, "--max-staleness", "1", "4", "--over-sampling-batch-size", "10"], capsys)["rows"]
    assert [row["plan"]["bound"]["depth"] for row in rows] == [4, 8, 10, *([8, 10] * 3)]
    (told,) = refusal([*GIVEN, "--over-sampling-batch-size", "3"], capsys)
    assert told == "  - --over-sampling-batch-size 3 is less than --rollout-batch-size 4: raise it"


def test_a_value_given_twice_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = found([*GIVEN, "--rollout-num-gpus", "4", "2", "4", "--max-staleness", "1", "1"], capsys)["rows"]
    assert [row["rollout_gpus"] for row in rows] == [8, 8, 4, 2]


def remarks(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stands under the table; the same as in the JSON."""
    told: list[str] = found(argv, capsys)["remarks"]
    assert " ".join(told) in " ".join(output(argv, capsys).split())
    return "\n".join(told)


def test_a_mode_without_rows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = remarks([*GIVEN, "--num-gpus", "8", "--rollout-num-gpus-per-engine", "8"], capsys)
    assert "No row of fully async: --num-gpus 8 leaves no GPU that trains beside one engine of" in told
    assert "No row of colocate + partial" not in told
    for argv in (["--max-staleness", "0"], ["--over-sampling-batch-size", "4"]):
        told = remarks([*GIVEN, *argv], capsys)
        assert "No row of colocate + partial: it needs a --max-staleness of 1 or more" in told
        assert "No row of fully async" not in told
    assert "No row" not in remarks([*GIVEN, "--max-staleness", "0", "--no-partial-rollout"], capsys)


def test_what_the_comparison_rests_on_is_said_with_the_gain_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten seconds of switching decide here for fully async; without them colocate + partial is as good."""
    argv = [*QUICK, "--engine-rate", "1e5", "--engine-half", "0", "--train-rate", "1e5", "--prefill-rate", "1e6"]
    argv += ["--response-length-mean", "400", "--response-length-sigma", "0", "--rollout-max-response-len", "400"]
    argv += ["--num-gpus", "2", "--max-staleness", "1", "--push-seconds", "0"]
    told = remarks(argv, capsys)
    assert "Rests on figures that are assumed, neither given nor measured: rollout-num-gpus-per-engine 1, " in told
    assert "switch-seconds 2" in told
    assert "push-seconds" not in told
    given = {value: found([*argv, "--switch-seconds", value], capsys) for value in ("0", "2")}
    (assumed,) = (row for row in found(argv, capsys)["rows"] if row["best"])
    assert assumed in given["2"]["rows"]
    (without,) = (row for row in given["0"]["rows"] if row["plan"] == assumed["plan"])
    gain = f"--switch-seconds 0 the gain of fully async (1 + 1 GPUs, --max-staleness 1) is {without['speed_up']:.2f}"
    assert f"With {gain} instead of {assumed['speed_up']:.2f}" in told
    assert assumed["speed_up"] > 2 * without["speed_up"]
    assert not without["best"]
    assert "colocate" in told.split(f"instead of {assumed['speed_up']:.2f}, and ")[1]
    assert all("switch-seconds" not in "".join(answer["remarks"]) for answer in given.values())


def test_the_gain_of_colocate_over_itself_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = remarks([*GIVEN, "--num-gpus", "1", "--no-partial-rollout"], capsys)
    assert "With --switch-seconds 0 colocate (1 GPUs, --max-staleness 0) is best too." in told
    assert "1.00 instead of 1.00" not in told


@pytest.mark.parametrize("more", [[], ["--json"], ["--help"]])
def test_output_that_cannot_be_written_is_one_line(more: list[str]) -> None:
    command = [sys.executable, "-m", "relax_cli.main", "simulate", *GIVEN, *more]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr == "relax simulate: the output cannot be written: No space left on device\n"


def test_lengths_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("100 100\n300\n")
    answer = found([*RATES, *QUICK[2:], "--response-lengths", str(file), "--num-rollout", "200"], capsys)
    assert answer["figures"]["response_lengths"]["value"] == "3 lengths, mean 167, longest 300"
    assert answer["rows"][0]["step"]["trained"] == pytest.approx(8 * 500 / 3, rel=0.05)


PROBE = """
import json, sys
from relax_cli.main import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, [m for m in ("torch", "ray", "transformers", "sglang", "megatron") if m in sys.modules]]))
"""


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    argv = ["simulate", "--from", str(write_run(tmp_path, gpus=1)), "--num-gpus", "4", *QUICK]
    command = [sys.executable, "-c", PROBE, json.dumps(argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]


def test_help_and_the_list_of_commands_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "\n  simulate  " in capsys.readouterr().out
    text = output(["--help"], capsys)
    assert text.startswith("usage: relax simulate [--from RUN_DIR] [options]")
    assert "--from RUN_DIR" in text
    assert "relax train" not in text


# ---------------------------------------------------------------------- what is refused


def test_missing_figures_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    told = "\n".join(refusal(["--num-gpus", "8", "--engine-half", "1"], capsys))
    for flag in ("--train-rate", "--engine-rate", "--response-length-mean", "--from RUN_DIR"):
        assert flag in told
    assert "--engine-half is needed" not in told


NUMBERS = ["engine-rate", "engine-half", "prefill-rate", "train-rate", "push-seconds", "switch-seconds"]
NUMBERS += ["response-length-mean", "response-length-sigma", "prompt-length"]
COUNTS = ["num-gpus", "rollout-num-gpus", "rollout-num-gpus-per-engine", "max-staleness", "rollout-batch-size"]
COUNTS += ["n-samples-per-prompt", "over-sampling-batch-size", "num-rollout", "sglang-server-concurrency"]
COUNTS += ["rollout-max-response-len", "seed"]
ZERO_IS_RIGHT = {"engine-half", "push-seconds", "switch-seconds", "response-length-sigma", "prompt-length", "seed"}
ZERO_IS_RIGHT |= {"max-staleness"}


HOSTILE = ["0", "-1", "nan", "inf", "1e400", "1e-300", "1e30", "99999999999999999999", "x", ""]
WRONG = [
    (name, value)
    for name in NUMBERS + COUNTS
    for value in HOSTILE
    if not (name in ZERO_IS_RIGHT and (value == "0" or (value == "1e-300" and name in NUMBERS)))
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_hostile_value_is_an_error_that_names_its_flag(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [*GIVEN]
    if f"--{name}" in others:
        at = others.index(f"--{name}")
        del others[at : at + 2]
    told = refusal([*others, f"--{name}={value}"], capsys)
    assert any(f"--{name}" in line for line in told), told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--rollout-batch-size", "2000000000"], "--rollout-batch-size"),
        (["--num-rollout", "2000000000"], "--num-rollout"),
        (["--max-staleness", "1000", "--num-rollout", "100000"], "--max-staleness"),
        (["--max-stalenes", "1"], "--max-stalenes: no such option; did you mean --max-staleness?"),
        (["--response-lengths", "/nowhere"], "--response-lengths and --response-length-mean"),
        (["8"], "a value without a flag"),
    ],
)
def test_what_would_never_end_or_means_nothing_is_refused(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*RATES, *LENGTHS]
    assert any(told in line for line in refusal(more[:1] + small if more == ["8"] else [*small, *more], capsys))


@pytest.mark.parametrize("text", ["", "100 0", "100 -3", "100 1.5", "nan", "100 ten", "99999999999", "\udcff"])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    (told,) = refusal([*RATES, *QUICK, "--response-lengths", str(file)], capsys)
    assert str(file) in told


def test_lengths_that_say_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = refusal([*RATES, "--response-length-mean", "4000"], capsys)
    assert "--response-length-mean needs --rollout-max-response-len" in told
    (told,) = refusal([*RATES, "--response-length-sigma", "1"], capsys)
    assert "--response-length-sigma without effect" in told
    told = "\n".join(refusal(["--no-partial-rollout", "--no-recompute-kv-cache-after-weight-updates"], capsys))
    assert "--no-recompute-kv-cache-after-weight-updates has no effect with --no-partial-rollout" in told
    (told,) = refusal([*RATES, "--response-length-mean", "4000", "--rollout-max-response-len", "3999"], capsys)
    assert "--response-length-mean 4000 is more than --rollout-max-response-len 3999, where all responses end" in told
    found([*RATES, *QUICK, "--response-length-mean", "4000", "--rollout-max-response-len", "4000"], capsys)


# ---------------------------------------------------------------------- figures of a run

TRUE = Rates(engine=8_000, half=40, prefill=1e12, train=3_000, push_s=1.5, switch_s=4, concurrency=512)


def write_run(folder: Path, *, gpus: int = 2, steps: int = 8, **changes: Any) -> Path:
    """A run as colocate on ``gpus`` GPUs logs it: the times are those of the model, with lengths that vary.

    Args:
        changes: metrics that replace those of each step; None removes one.
    """
    bound = StalenessBound(batch=6, depth=6, max_staleness=0)
    plan = Plan(mode="", in_turn=True, train_gpus=gpus, engines=gpus, bound=bound)
    lengths = Lengths(lambda r: r.choice([r.randint(10, 60), r.randint(10, 900)]), n=4, prompt=20, seed=9)
    run, now = Simulation(plan, TRUE, lengths), 0.0
    tracker = JsonLinesTracker(folder / "metrics.jsonl")
    for step in range(steps):
        run.run_to(step + 1)
        responses = Counter(
            length for prompt_id in range(6 * step, 6 * step + 6) for length in lengths.group(prompt_id)
        )
        total = sum(responses.elements()) + 24 * 20
        row: dict[str, float | None] = {
            "rollout/response_length": sum(responses.elements()) / 24,
            "rollout/tokens": sum(responses.elements()),
            "rollout/kept_tokens": 0,
            "engines/serving": gpus,
            "train/samples": 24,
            "train/total_tokens": total,
            "time/generate": run.now - now,
            "time/train": total / TRUE.train / gpus,
            "time/weight_update": 1.5,
            "time/sleep_wake": 3.0,
            "time/other": 1.0,
            "time/step": 10.0,
        }
        now = run.now + run.train_s(total)
        scalars = {name: value for name, value in (row | changes).items() if value is not None}
        tracker.log(scalars, step, {"rollout/response_lengths": responses})
        tracker.log({"eval/heldout/reward": 0.5}, step + 1)
    tracker.close()
    (folder / "config.toml").write_text(
        'hf_checkpoint = "model"\nrollout_batch_size = 6\nn_samples_per_prompt = 4\n# max_staleness = 1\n'
    )
    return folder


def test_a_run_gives_all_figures_and_each_says_what_it_was_read_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = found(["--from", str(write_run(tmp_path, gpus=1)), "--num-rollout", "10"], capsys)["figures"]
    true = {
        "num_gpus": 1,
        "rollout_batch_size": 6,
        "n_samples_per_prompt": 4,
        "train_rate": 3_000,
        "push_seconds": 1.5,
        "switch_seconds": 4,
        "prompt_length": 20,
        "engine_rate": 8_000,
        "engine_half": 40,
        "sglang_server_concurrency": 512,
        "prefill_rate": 9_000,
    }
    for name, value in true.items():
        assert figures[name]["value"] == pytest.approx(value, rel=1e-3), name
    assert figures["engine_rate"]["source"] == "the run: time/generate of 7 rollouts, of which it is off by 0%"
    assert figures["rollout_batch_size"]["source"] == "the run: config.toml"
    assert figures["response_lengths"]["source"] == "the run: histogram rollout/response_lengths"
    assert [name for name in figures if "assumed" in figures[name]["source"]] == ["prefill_rate"]


def test_a_run_of_one_step_is_used_and_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, gpus=1, steps=1)
    answer = found(["--from", str(folder), *QUICK], capsys)
    assert "The run has trained one step, in which everything warms up" in answer["remarks"][0]
    half, rate = (answer["figures"][name] for name in ("engine_half", "engine_rate"))
    expected = (
        "assumed, as of 4 B on an H200 with such lengths: a single rollout does not tell it; --engine-half sets it"
    )
    assert half["source"] == expected
    assert rate["source"] == "the run: time/generate of 1 rollout, of which it is off by 0%"
    (told,) = refusal(["--from", str(folder), "--engine-rate", "1"], capsys)
    assert "--engine-rate 1 is too low: an engine generated " in told
    assert told.endswith(" tokens/s; give more than that, or leave it out")
    write_run(tmp_path, gpus=1, steps=2)
    assert not any("warms up" in remark for remark in found(["--from", str(folder), *QUICK], capsys)["remarks"])


def test_a_place_that_is_no_run_says_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(place: Path) -> str:
        (problem,) = refusal(["--from", str(place)], capsys)
        return problem.partition(f"--from {place}: ")[2]

    run = tmp_path / "runs" / "mine"
    assert told(run) == "there is no such folder; name the folder of a run, runs/NAME"
    run.mkdir(parents=True)
    assert told(run) == "there is no metrics.jsonl in it; name the folder of a run, runs/NAME"
    (run / "config.toml").touch()
    assert told(run) == "there is no metrics.jsonl in it yet; wait until the run has logged its first step"
    write_run(run)
    assert told(run.parent) == f"there is no metrics.jsonl in it; name a run in it, for example {run}"
    assert told(run / "metrics.jsonl") == f"it is a file; name the folder of a run, {run}"
    (run / "config.toml").unlink()
    assert told(run) == "there is no config.toml in it; name the folder of a run, runs/NAME"


def test_what_is_missing_beside_a_rate_is_named_alone(capsys: pytest.CaptureFixture[str]) -> None:
    both = "\n".join(refusal(["--train-rate", "9", *LENGTHS], capsys))
    assert "--engine-rate and --engine-half are needed: give both, or --from RUN_DIR with a run that shows it" in both
    (one,) = refusal(["--train-rate", "9", "--engine-rate", "9", *LENGTHS], capsys)
    assert one == "  - --engine-half is needed too: give it, or --from RUN_DIR with a run that shows it"
    (file,) = refusal([*RATES, "--response-lengths", "nothing"], capsys)
    assert file == "  - --response-lengths nothing: cannot be read: No such file or directory"


def test_with_several_engines_the_fit_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are divided by the engines, which is not quite how requests fall on them."""
    answer = found(["--from", str(write_run(tmp_path, gpus=4)), "--engine-half", "40", "--num-rollout", "20"], capsys)
    assert answer["figures"]["num_gpus"]["value"] == 4
    assert answer["figures"]["engine_rate"]["value"] == pytest.approx(8_000, rel=0.15)


def test_figures_of_a_run_have_the_ranges_of_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"time/weight_update": 1e6}
    folder = write_run(tmp_path, gpus=1, **changes)
    (told,) = refusal(["--from", str(folder)], capsys)
    assert told == f"  - --from {folder}: --push-seconds must be 100000.0 or less, not 1000000.0"


def test_what_is_given_wins_over_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, gpus=1)
    argv = ["--from", str(folder), "--num-gpus", "16", "--train-rate", "77", "--engine-rate", "9000", *QUICK]
    figures = found(argv, capsys)["figures"]
    assert figures["num_gpus"] == {"value": 16, "source": "--num-gpus"}
    assert figures["train_rate"] == {"value": 77, "source": "--train-rate"}
    assert figures["rollout_batch_size"]["value"] == 4
    assert figures["engine_rate"]["value"] == 9000
    assert figures["engine_half"]["value"] > 40  # the same times at a higher rate


def test_the_first_step_warms_up_and_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path, gpus=1)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"time/weight_update": 999.0, "time/train": 999.0})
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    assert found(["--from", str(folder), *QUICK], capsys)["figures"]["push_seconds"]["value"] == 1.5


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"time/weight_update": None}, "has no time/weight_update; give --push-seconds"),
        ({"time/train": None}, "has no time/train; give --train-rate"),
        ({"time/train": math.nan}, "has no time/train; give --train-rate"),
        ({"train/samples": None}, "has no train/samples; give --prompt-length"),
        ({"engines/serving": None}, "has no engines/serving; give --num-gpus, --train-rate"),
        ({"train/total_tokens": None}, "holds no step that was trained"),
        ({"engines/serving": 0}, "has no engines/serving above 0; give --num-gpus, --train-rate"),
        ({"rollout/tokens": 1e6}, "give --engine-rate and --engine-half"),
        ({"rollout/kept_tokens": 100}, "give --engine-rate and --engine-half"),
    ],
)
def test_a_run_that_lacks_a_figure_says_which_flag_gives_it(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path, gpus=1, **changes)
    problems = refusal(["--from", str(folder)], capsys)
    assert any(told in line and str(folder) in line for line in problems), problems


def test_a_run_without_histograms_says_what_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "rollout/response_lengths"
    histograms: list[Any] = [None, [], {}, {name: None}, {name: []}]
    for hostile in histograms:
        text = "\n".join(json.dumps(row | {"histograms": hostile}) for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        told = "\n".join(refusal(["--from", str(folder)], capsys))
        assert "has no histogram rollout/response_lengths; give --response-lengths or --response-length-mean" in told
        assert found(["--from", str(folder), *GIVEN], capsys)["rows"]


def rewrite(folder: Path, change: Callable[[int, dict[str, Any]], str]) -> Path:
    """Makes every line of a run anew from its number and its metrics."""
    file = folder / "metrics.jsonl"
    lines = enumerate(file.read_text().splitlines(), 1)
    file.write_text("\n".join(change(number, json.loads(line)) for number, line in lines) + "\n")
    return folder


NO_METRIC = [
    ("train/samples", "0"),
    ("time/train", "0"),
    ("time/train", "true"),
    ("time/train", '"fast"'),
    ("time/train", "NaN"),
    ("time/generate", "0.0"),
    ("time/weight_update", "1e308"),
    ("time/weight_update", "-3.0"),
    ("time/sleep_wake", "Infinity"),
    ("time/step", "-1"),
    ("train/total_tokens", "1e308"),
    ("train/total_tokens", "1e400"),
    ("train/total_tokens", "9" * 400),
    ("rollout/tokens", "[[[]]]"),
    ("engines/serving", "-Infinity"),
]


@pytest.mark.parametrize(("name", "value"), NO_METRIC)
def test_a_number_that_no_run_logs_is_an_error_with_its_line(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(number: int, row: dict[str, Any]) -> str:
        return json.dumps(row | {name: "HERE"} if number == 5 else row).replace('"HERE"', value)

    told = refusal(["--from", str(rewrite(write_run(tmp_path, gpus=1), broken))], capsys)
    assert all(line.startswith(f"  - {tmp_path / 'metrics.jsonl'}:5: {name} is ") for line in told), told
    assert max(map(len, told)) < 300


@pytest.mark.parametrize(
    "pairs",
    ["x", [[1], [2, 3]], [[0, 5]], [[-3, 5]], [[5, -3]], [[10**9, 5]], [["HERE", 1]], [[2.5, 1]], [[True, 1]], 7],
)
def test_lengths_that_are_none_are_an_error_with_their_line(
    pairs: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(number: int, row: dict[str, Any]) -> str:
        changed = row | {"histograms": {"rollout/response_lengths": pairs}} if number == 5 else row
        return json.dumps(changed).replace('"HERE"', "1e400")

    folder = rewrite(write_run(tmp_path, gpus=1), broken)
    (told,) = refusal(["--from", str(folder)], capsys)
    assert told.startswith(f"  - {folder / 'metrics.jsonl'}:5: rollout/response_lengths holds ")
    assert found(["--from", str(folder), *GIVEN], capsys)["rows"], "what is given is not read"


def test_lines_that_are_no_steps_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--from", str(write_run(tmp_path, gpus=1)), *QUICK]
    file = tmp_path / "metrics.jsonl"
    whole, lines = found(argv, capsys), file.read_text().splitlines()
    assert "left out" not in "".join(whole["remarks"])
    deep = "[" * 200_000
    hostile = ['{"step": 3, "time/tra', deep, '"text"', "[]", "7", "{}", '{"step": "1"}', '{"step": -1}', "\udcff", ""]
    text = "\n".join([lines[0], *hostile, *lines[1:]]) + "\n"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    damaged = found(argv, capsys)
    assert damaged["remarks"][0] == (
        f"9 lines of {file} left out: the first is line 2, no whole line of JSON, as after a kill."
    )
    assert (damaged["figures"], damaged["rows"]) == (whole["figures"], whole["rows"])
    file.write_text(deep)
    (told,) = refusal(argv, capsys)
    assert "holds no step that was trained" in told
    assert told.endswith("1 line of " + f"{file} left out: line 1, no whole line of JSON, as after a kill.")


# ---------------------------------------------------------------------- runs of both modes

ASYNC = 'hf_checkpoint = "model"\nrollout_batch_size = 6\nn_samples_per_prompt = 4\nfully_async = true\n'


def as_async(row: dict[str, Any]) -> dict[str, Any]:
    """A step as a fully-async run logs it, with other seconds."""
    gone = {"time/generate", "time/sleep_wake"}
    rest = {name: value for name, value in row.items() if name not in gone}
    return rest | {"time/wait_for_rollout": 0.5, "time/weight_update": 7.0}


def test_an_async_run_does_not_show_what_switching_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = rewrite(write_run(tmp_path), lambda _, row: json.dumps(as_async(row) if "time/step" in row else row))
    rates = ["--engine-rate", "8000", "--engine-half", "40"]
    (folder / "config.toml").write_text(ASYNC + "actor_num_gpus_per_node = 2\n")
    (told,) = refusal(["--from", str(folder), *rates], capsys)
    assert "a run of --fully-async on GPUs does not show how long colocate takes to change sides; give --swi" in told
    answer = found(["--from", str(folder), *rates, "--switch-seconds", "3", *QUICK], capsys)
    assert answer["figures"]["num_gpus"]["value"] == 4
    (folder / "config.toml").write_text(ASYNC + "actor_num_gpus_per_node = 0\n")
    switch = found(["--from", str(folder), *rates, *QUICK], capsys)["figures"]["switch_seconds"]
    assert switch == {"value": 0, "source": "the run: on CPU nothing changes sides"}
    (folder / "config.toml").write_text(ASYNC)
    told = "\n".join(refusal(["--from", str(folder), *rates], capsys))
    assert "config.toml has no actor_num_gpus_per_node; give --num-gpus" in told
    assert "give --switch-seconds" in told


@pytest.mark.parametrize(("device", "words"), [("cpu", []), ("cuda", ["--switch-seconds", "3"])])
def test_of_a_run_that_chose_its_gpus_itself_the_timeline_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, words: list[str]
) -> None:
    folder = rewrite(write_run(tmp_path), lambda _, row: json.dumps(as_async(row) if "time/step" in row else row))
    (folder / "config.toml").write_text(ASYNC + "recompute_kv_cache_after_weight_updates = false\n")
    names = ("train_unit", "engine_gpus", "gpus_per_engine", "rollout_batch_size", "over_sampling_batch_size")
    setup = dict.fromkeys(names, 1) | {"mode": "fully_async", "device": device, "train_gpus": 3, "max_staleness": 1}
    step = {"step": 7, "start": 0.0, "end": 1.0, "seconds": 1.0, "run": setup, "phases": []}
    (folder / "timeline.jsonl").write_text(json.dumps(step) + "\n")
    rates = ["--engine-rate", "8000", "--engine-half", "40", *words]
    answer = found(["--from", str(folder), *rates, *QUICK], capsys)
    assert answer["figures"]["num_gpus"]["value"] == (3 if device == "cpu" else 5)
    assert any("The run kept keys and values over its pushes, and the rows" in told for told in answer["remarks"])
    kept = found(["--from", str(folder), *rates, *QUICK, "--no-recompute-kv-cache-after-weight-updates"], capsys)
    assert not any("kept keys and values" in told for told in kept["remarks"])


def test_the_rate_of_engines_that_generate_all_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their time with requests, and how many they had, tell both constants when the number varies, else one of two."""

    def steps(vary: bool) -> Path:
        def written(_: int, row: dict[str, Any]) -> str:
            if "time/step" not in row:
                return json.dumps(row)
            running = 10 + 10 * (row["step"] % 3) * vary
            busy_s = row["rollout/tokens"] / 2 * (running + 40) / (8_000 * running)
            shares = {"async/engine_busy_share": busy_s / 10, "async/running_requests_mean": running * busy_s / 10}
            seconds = {"time/pause": 0.5, "time/resume": 0.25}
            return json.dumps(as_async(row) | {"engines/serving": 2} | shares | seconds)

        folder = rewrite(write_run(tmp_path), written)
        (folder / "config.toml").write_text(ASYNC + "actor_num_gpus_per_node = 0\n")
        return folder

    figures = found(["--from", str(steps(vary=True)), *QUICK], capsys)["figures"]
    assert figures["engine_rate"]["value"] == pytest.approx(8_000, rel=1e-6)
    assert figures["engine_half"]["value"] == pytest.approx(40, rel=1e-6)
    source = "the run: the time with requests of 7 rollouts, of which it is off by 0%"
    assert figures["engine_rate"]["source"] == source
    assert figures["push_seconds"]["value"] == pytest.approx(7.75), "the engines stand still all that time"
    folder = steps(vary=False)
    answer = found(["--from", str(folder), *QUICK], capsys)
    half, rate = (answer["figures"][name] for name in ("engine_half", "engine_rate"))
    # Prompts of 20 tokens, and responses of which half have 10 to 60 and half 10 to 900: sum n^2 / 2 / sum n is 280.
    assert half["value"] == pytest.approx(4.2 / (0.008 + 45e-6 * 300), rel=0.1)
    assert "assumed, as of 4 B on an H200 with such lengths: rollouts that are so much alike do not" in half["source"]
    expected = 8_000 * (10 + half["value"]) / (10 + 40)
    assert rate["value"] == pytest.approx(expected, rel=1e-6), "ten requests as fast as they were"
    (told,) = (line for line in answer["remarks"] if "--engine-half 0 the gain of" in line)
    assert re.search(r"is \d+\.\d\d instead of \d+\.\d\d", told)
    figures = found(["--from", str(folder), "--engine-half", "40", *QUICK], capsys)["figures"]
    assert figures["engine_rate"]["value"] == pytest.approx(8_000, rel=1e-6)


def test_of_a_run_of_both_modes_the_last_one_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mixed(_: int, row: dict[str, Any]) -> str:
        return json.dumps(as_async(row) if "time/step" in row and row["step"] < 3 else row)

    folder = rewrite(write_run(tmp_path, gpus=1), mixed)
    answer = found(["--from", str(folder), *QUICK], capsys)
    assert answer["figures"]["push_seconds"]["value"] == 1.5
    assert answer["figures"]["response_lengths"]["value"].startswith(f"{4 * 24} lengths")  # 5 steps, one warms up
    assert answer["remarks"][0] == (
        "The run was made in both modes: only its last 5 steps, of colocate, are used, not the 3 before them."
    )
    (folder / "config.toml").write_text(ASYNC)
    (told,) = refusal(["--from", str(folder)], capsys)
    assert "is of a start as fully async, and the last step in metrics.jsonl is of colocate; wait for" in told


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    (tmp_path / "config.toml").write_text("rollout_batch_size = [")
    (told,) = refusal(["--from", str(tmp_path)], capsys)
    assert f"{tmp_path / 'config.toml'}" in told
    (tmp_path / "config.toml").unlink()
    (told,) = refusal(["--from", str(tmp_path)], capsys)
    assert "there is no config.toml in it" in told


def test_the_constants_of_an_engine_from_its_rollouts() -> None:
    points = [
        (tokens, longest, (tokens + 30 * longest) / 500) for tokens, longest in ((900, 90), (2000, 50), (700, 99))
    ]
    assert fit_engine(points, rate=None, half=None) == pytest.approx((500, 30))
    assert fit_engine(points[:1], rate=500, half=None) == pytest.approx((500, 30))
    assert fit_engine(points[:1], rate=None, half=30) == pytest.approx((500, 30))
    assert fit_engine(points, rate=1, half=2) == (1, 2)
    with pytest.raises(TooMuchAlike, match="so much alike"):
        fit_engine(points[:1] * 2, rate=None, half=None)
    with pytest.raises(TooMuchAlike, match="a single rollout"):
        fit_engine(points[:1], rate=None, half=None)
    with pytest.raises(ValueError, match="--engine-rate 100 is too low"):
        fit_engine(points, rate=100, half=None)
