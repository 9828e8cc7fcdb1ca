"""`relax simulate`: figures that are given or read from a run, the table, JSON, and what is refused."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from relax_cli.main import main
from relax_cli.run.tracking import JsonLinesTracker
from relax_cli.simulate.measured import fit_engine
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
    rows = [line for line in lines if "colocate  " in line or "colocate + partial" in line or "fully async" in line]
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
        "  - --rollout-num-gpus 1 leaves none of --num-gpus 1 to train"
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
    assert "--engine-half needed" not in told


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
    assert "assumed" not in json.dumps(figures)


def test_with_several_engines_the_fit_is_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokens are divided by the engines, which is not quite how requests fall on them."""
    answer = found(["--from", str(write_run(tmp_path, gpus=4)), "--engine-half", "40", "--num-rollout", "20"], capsys)
    assert answer["figures"]["num_gpus"]["value"] == 4
    assert answer["figures"]["engine_rate"]["value"] == pytest.approx(8_000, rel=0.15)


def test_figures_of_a_run_have_the_ranges_of_their_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"time/weight_update": -3.0}
    folder = write_run(tmp_path, gpus=1, **changes)
    (told,) = refusal(["--from", str(folder)], capsys)
    assert told == f"  - --from {folder}: --push-seconds must be 0 or more, not -3.0"


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
    histograms: list[Any] = [None, [], {name: "x"}, {name: [[1], [2, "x"]]}, {name: [[0, 5]]}]
    for hostile in histograms:
        text = "\n".join(json.dumps(row | {"histograms": hostile}) for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        told = "\n".join(refusal(["--from", str(folder)], capsys))
        assert "has no histogram rollout/response_lengths; give --response-lengths or --response-length-mean" in told
        assert found(["--from", str(folder), *GIVEN], capsys)["rows"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (told,) = refusal(["--from", str(tmp_path / "nowhere")], capsys)
    assert "there is no metrics.jsonl in it" in told
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
    with pytest.raises(ValueError, match="too much alike"):
        fit_engine(points[:1], rate=None, half=None)
    with pytest.raises(ValueError, match="--engine-rate 100 is too low"):
        fit_engine(points, rate=100, half=None)
