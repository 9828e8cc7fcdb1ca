"""Timelines made by hand, whose shares are known: what is read of them, shown, and advised."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import relax_profiling
from relax_profiling.cli import main
from relax_profiling.report.html import to_html
from relax_profiling.report.model import Finding
from relax_profiling.report.text import to_text
from relax_profiling.timeline.read import read_timeline

SETUP = {
    "mode": "fully_async",
    "device": "cuda",
    "train_gpus": 4,
    "train_unit": 2,
    "engine_gpus": 4,
    "gpus_per_engine": 1,
    "rollout_batch_size": 4,
    "over_sampling_batch_size": 8,
    "max_staleness": 1,
    "partial_rollout": True,
    "weight_sync": "group",
}
Parts = Sequence[tuple[str, float]]


def line(step: int, phases: Parts, engines: dict[str, Parts], *, running: float = 20.0, **setup: Any) -> dict[str, Any]:
    """A step of 10 s that begins 10 s after the one before; phases and states follow each other."""
    return {
        "step": step,
        "start": 1_790_000_000.0 + 10 * step,
        "end": 10.0,
        "seconds": 10.0,
        "run": SETUP | setup,
        "phases": in_turn(phases),
        "engines": {
            name: {
                "seconds": {s: sum(t for state, t in parts if state == s) for s in ("busy", "idle", "paused")},
                "running": {"busy": running, "idle": 0.0, "paused": 1.0},
                "intervals": in_turn(parts),
            }
            for name, parts in engines.items()
        },
    }


def in_turn(parts: Parts) -> list[list[Any]]:
    now, found = 0.0, []
    for name, seconds in parts:
        found.append([name, now, now + seconds])
        now += seconds
    return found


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes lines into the folder of a run, and returns it."""

    def to(*lines: dict[str, Any] | str) -> Path:
        folder = tmp_path / "runs" / "mine"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_text('{"rows": {}}')
        (folder / "metrics.jsonl").write_text('{"step": 0}\n')
        texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
        (folder / "timeline.jsonl").write_text("".join(text + "\n" for text in texts))
        return folder

    return to


def steps(phases: Parts, engines: dict[str, Parts], n: int = 5, **setup: Any) -> list[dict[str, Any]]:
    return [line(i, phases, engines, **setup) for i in range(n)]


def advised(folder: Path, rule: str) -> list[Finding]:
    return [f for f in relax_profiling.analyze(folder).findings if f.rule == rule]


def test_shares_of_trainer_and_engines(write: Write) -> None:
    warming = line(0, [("wait_for_rollout", 10)], {"engine0": [("idle", 10)], "engine1": [("idle", 10)]})
    several = [("busy", 2.0), ("paused", 0.5), ("busy", 3.0), ("idle", 2.0), ("paused", 0.5), ("busy", 2.0)]
    others = steps(
        [("wait_for_rollout", 3), ("train_step", 4), ("wait_for_eval", 0.5), ("pause", 0.5), ("weight_update", 1)],
        {"engine0": several, "engine1": [("idle", 9), ("paused", 1)]},
        4,
    )
    folder = write(warming, *({**text, "step": text["step"] + 1} for text in others))
    report = relax_profiling.analyze(folder)
    assert report.problems == []
    (timeline,) = report.timelines
    assert [step.step for step in timeline.judged] == [1, 2, 3, 4], "the first, in which all warms up, is left out"
    assert timeline.trainer == pytest.approx(
        {"wait_for_rollout": 0.3, "train_step": 0.4, "other": 0.1, "weight_update": 0.1}
        | {"wait_for_eval": 0.05, "pause": 0.05}
    )
    assert timeline.trainer_waits == pytest.approx(0.4)
    first, second = timeline.engines["engine0"], timeline.engines["engine1"]
    assert (first.busy, first.idle, first.paused, first.resting) == pytest.approx((0.7, 0.2, 0.1, 0.0))
    assert (second.busy, second.idle, second.paused) == pytest.approx((0.0, 0.9, 0.1))
    assert (first.running, second.running) == (20.0, 0.0)
    mean = timeline.engine_mean
    assert mean is not None
    assert (mean.busy, mean.idle, mean.paused) == pytest.approx((0.35, 0.55, 0.1))
    text = to_text(report)
    assert "wait_for_rollout 30.0%" in text
    assert "engine0: busy 70.0%   idle 20.0%   paused 10.0%   20.0 requests while busy" in text


def turns(step: int, trains: float, before: str) -> dict[str, Any]:
    """A step that waits 4 s for its samples and then trains; the engine's time is that from the samples before."""
    text = line(step, [("wait_for_rollout", 4), ("train_step", trains)], {})
    states = {"busy": 4.0, "idle": 0.0, "paused": 0.0}
    states[before] += 6.0
    intervals = [[before, -6, 0], ["busy", 0, 4]]
    text["engines"] = {"engine0": {"seconds": states, "running": {"busy": 20.0}, "intervals": intervals}}
    return text | {"end": 4.0 + trains, "seconds": 4.0 + trains}


def test_all_shares_are_of_the_same_time(write: Write) -> None:
    # While step 0 trained the engine had nothing to do, and of the time after the last samples nobody knows of it.
    folder = write(
        turns(0, 6, "idle"), turns(1, 6, "idle"), *(turns(i, 6, "busy") for i in (2, 3)), turns(4, 96, "busy")
    )
    report = relax_profiling.analyze(folder)
    (timeline,) = report.timelines
    assert timeline.window == [(1_790_000_014.0, 1_790_000_044.0)]
    assert timeline.trainer == pytest.approx({"train_step": 0.6, "wait_for_rollout": 0.4, "other": 0.0})
    assert (timeline.engines["engine0"].busy, timeline.engines["engine0"].idle) == (1.0, 0.0)
    told = "shares of the 30.0 s from the samples of step 1 to those of step 4"
    assert told in to_text(report)
    assert told in to_html(report)


def test_of_the_only_step_behind_the_first_the_round_up_to_its_samples_counts(write: Write) -> None:
    report = relax_profiling.analyze(write(turns(0, 6, "idle"), turns(1, 96, "idle")))
    (timeline,) = report.timelines
    assert timeline.trainer == pytest.approx({"train_step": 0.6, "wait_for_rollout": 0.4, "other": 0.0})
    assert timeline.engines["engine0"].idle == pytest.approx(0.6)
    assert "shares of the 10.0 s up to the samples of step 1" in to_text(report)


def test_of_a_single_step_the_trainer_is_shown_whole(write: Write) -> None:
    report = relax_profiling.analyze(write(turns(0, 6, "idle")))
    assert report.timelines[0].trainer == pytest.approx({"train_step": 0.6, "wait_for_rollout": 0.4, "other": 0.0})
    assert "shares of step 0, of the engines up to its samples" in to_text(report)
    alone = [line(i, [("train_step", 5)], {}) for i in range(3)]
    assert "shares of steps 1 to 2\n" in to_text(relax_profiling.analyze(write(*alone)))


def test_where_a_line_tells_nothing_of_the_engines_the_words_are_of_the_steps_too(write: Write) -> None:
    lines = [turns(i, 6, "busy") for i in range(4)]
    report = relax_profiling.analyze(write(*lines[:2], lines[2] | {"engines": {}}, lines[3]))
    assert report.timelines[0].window == [(1_790_000_010.0, 1_790_000_040.0)]
    assert "shares of steps 1 to 3, of the engines up to its samples" in to_text(report)


def test_the_time_between_two_launches_is_in_no_share(write: Write) -> None:
    later = [text | {"start": text["start"] + 3600} for text in (turns(3, 6, "busy"), turns(4, 6, "busy"))]
    (timeline,) = relax_profiling.analyze(write(*(turns(i, 6, "busy") for i in range(3)), *later)).timelines
    assert sum(end - begin for begin, end in timeline.window) == pytest.approx(30)
    assert timeline.trainer["wait_for_rollout"] == pytest.approx(0.4)


def test_with_colocate_the_trainers_turn_is_not_idle_time(write: Write) -> None:
    """The engine's time runs from the end of one rollout to that of the next: it begins before the step."""
    turn = line(1, [("save", 1), ("generate", 5), ("train_step", 4)], {}, mode="colocate")
    spent = {"busy": 3.5, "idle": 6.5, "paused": 0.0}
    intervals = [["idle", -4, 1], ["busy", 1, 4.5], ["idle", 4.5, 6]]
    turn["engines"] = {"engine0": {"seconds": spent, "running": {"busy": 8.0}, "intervals": intervals}}
    folder = write(*({**turn, "step": i, "start": 10.0 * i} for i in range(5)))
    report = relax_profiling.analyze(folder)
    shares = report.timelines[0].engines["engine0"]
    assert (shares.busy, shares.idle, shares.resting) == pytest.approx((0.35, 0.15, 0.5))
    assert "trainer's turn 50.0%" in to_text(report)
    (found,) = advised(folder, "engines wait in their turn")
    assert "30% of the 5.00 s" in found.figure
    assert "5.00 x (1 - 0.30) + 5.00 = 8.50 s" in found.figure
    assert "--partial-rollout" in found.flags


def test_an_idle_trainer_gives_its_gpus_to_the_engines(write: Write) -> None:
    phases = [("wait_for_rollout", 7), ("train_step", 2), ("weight_update", 1)]
    folder = write(*steps(phases, {"engine0": [("busy", 9), ("paused", 1)]}))
    (found,) = advised(folder, "split of GPUs")
    assert "trainer 2.00 s x 4 GPUs = 8.0 GPU-s" in found.figure
    assert "engines 9.00 s x 4 GPUs = 36.0 GPU-s" in found.figure
    assert "with 2 + 6 GPUs max(8.0 / 2, 36.0 / 6) + push 1.00 = 7.00 s instead of 10.00 s" in found.figure
    assert found.flags == ("--actor-num-gpus-per-node", "--rollout-num-gpus")


def test_idle_engines_give_their_gpus_to_the_trainer(write: Write) -> None:
    folder = write(*steps([("train_step", 9), ("weight_update", 1)], {"e": [("busy", 3), ("idle", 6), ("paused", 1)]}))
    (found,) = advised(folder, "split of GPUs")
    assert "with 6 + 2 GPUs max(36.0 / 6, 12.0 / 2) + push 1.00 = 7.00 s" in found.figure
    assert advised(folder, "too few open groups") == []


@pytest.mark.parametrize("setup", [{"device": "cpu"}, {"train_unit": 4}, {"gpus_per_engine": 4}])
def test_gpus_that_cannot_be_moved_are_not_advised(write: Write, setup: dict[str, Any]) -> None:
    phases = [("wait_for_rollout", 7), ("train_step", 2), ("weight_update", 1)]
    folder = write(*steps(phases, {"engine0": [("busy", 9), ("paused", 1)]}, **setup))
    assert advised(folder, "split of GPUs") == []


@pytest.mark.parametrize(
    ("setup", "arithmetic", "advice", "flag"),
    [
        (
            {"over_sampling_batch_size": 5},
            "--over-sampling-batch-size 5, --rollout-batch-size 4 x (--max-staleness 1 + 1) = 8) = 5 groups are open, "
            "5 / (1 - 0.50) = 10",
            "raise --over-sampling-batch-size to 8",
            "--over-sampling-batch-size",
        ),
        ({}, "= 8) = 8 groups are open, 8 / (1 - 0.50) = 16", "--max-staleness 2 allows 12", "--max-staleness"),
    ],
)
def test_both_wait_for_each_other(write: Write, setup: Any, arithmetic: str, advice: str, flag: str) -> None:
    phases = [("wait_for_rollout", 4), ("train_step", 5), ("weight_update", 1)]
    folder = write(*steps(phases, {"engine0": [("busy", 4), ("idle", 5), ("paused", 1)]}, **setup))
    (found,) = advised(folder, "too few open groups")
    assert arithmetic in found.figure
    assert advice in found.advice
    assert found.flags[0] == flag


def test_few_requests_at_a_time(write: Write) -> None:
    phases = [("wait_for_rollout", 5), ("train_step", 5)]
    folder = write(*steps(phases, {"e": [("busy", 10)]}, running=2.0, over_sampling_batch_size=4, max_staleness=9))
    (found,) = advised(folder, "few requests at a time")
    assert "4 x 8 / 2.0 = 16 would make it 8" in found.figure
    assert found.advice == "raise --over-sampling-batch-size to 16"
    assert advised(write(*steps(phases, {"e": [("busy", 10)]}, running=20.0)), "few requests at a time") == []


@pytest.mark.parametrize(
    ("setup", "flag"),
    [
        ({"partial_rollout": False}, "--partial-rollout"),
        ({"weight_sync": "disk"}, "--weight-sync"),
        ({}, "--rollout-batch-size"),
    ],
)
def test_paused_engines(write: Write, setup: dict[str, Any], flag: str) -> None:
    wait, send = (2, 1) if "partial_rollout" in setup else (1, 2)
    phases = [("train_step", 7), ("pause", wait), ("weight_update", send)]
    folder = write(*steps(phases, {"e": [("busy", 3), ("paused", 1), ("busy", 4), ("paused", 2)]}, **setup))
    (found,) = advised(folder, "engines are paused")
    assert (
        f"rest 30% of the time for pushes: {wait}.00 s a step until requests end, {send}.00 s sending" in found.figure
    )
    assert "every 8 instead of 4 groups rests about 15%" in found.advice
    assert found.flags[0] == flag


def test_keys_and_values_that_are_computed_again(write: Write) -> None:
    rule = "keys and values are computed again"
    parts: dict[str, Parts] = {"e": [("busy", 10)]}

    def found(again: float, phases: Parts, **setup: Any) -> list[Finding]:
        return advised(write(*(text | {"reprefilled": again} for text in steps(phases, parts, **setup))), rule)

    waits, works = [("wait_for_rollout", 4), ("train_step", 6)], [("train_step", 10)]
    (finding,) = found(1.01, waits)
    assert "waits 40% of the time, while the engines compute keys and values of 1.01 tokens again" in finding.figure
    assert finding.flags == ("--no-recompute-kv-cache-after-weight-updates",)
    assert found(0.4, waits) == found(1.01, works) == found(1.01, waits, keeps_cache=True) == []


def test_checkpoints_and_evaluations(write: Write) -> None:
    phases = [("train_step", 6), ("save", 2), ("wait_for_eval", 2)]
    folder = write(*steps(phases, {"e": [("busy", 10)]}))
    (saves,) = advised(folder, "checkpoints")
    (evals,) = advised(folder, "evaluations")
    assert "4 checkpoints in 4 steps take 20% of the time; half as many take 11%" in saves.figure
    assert (saves.flags[0], evals.flags[0]) == ("--save-interval", "--eval-interval")


def test_a_balanced_run_and_one_that_has_just_begun_get_no_advice(write: Write) -> None:
    assert relax_profiling.analyze(write(*steps([("train_step", 10)], {"e": [("busy", 10)]}))).findings == []
    waits = [("wait_for_rollout", 9), ("train_step", 1)]
    assert relax_profiling.analyze(write(*steps(waits, {"e": [("busy", 10)]}, 3))).findings == []


def test_options_that_changed_begin_a_new_judgement(write: Write) -> None:
    old = steps([("wait_for_rollout", 10)], {"e": [("busy", 10)]}, 4)
    new = [line(i, [("train_step", 10)], {"e": [("busy", 10)]}, max_staleness=3) for i in (4, 5)]
    (timeline,) = relax_profiling.analyze(write(*old, *new)).timelines
    assert [step.step for step in timeline.judged] == [4, 5]
    assert timeline.trainer_waits == 0


def test_of_a_step_that_was_trained_again_the_later_line_counts(write: Write) -> None:
    first = steps([("train_step", 1)], {"e": [("busy", 10)]}, 6)
    again = [line(i, [("train_step", 2)], {"e": [("busy", 10)]}) for i in (3, 4)]
    read, problems = read_timeline(write(*first, *again) / "timeline.jsonl")
    assert problems == []
    assert [(step.step, step.spent("train_step")) for step in read] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]


def test_damaged_lines_are_left_out_and_named(write: Write) -> None:
    good = steps([("train_step", 10)], {"e": [("busy", 10)]}, 12)
    whole = json.dumps(good[0])
    backwards = line(7, [("train_step", -1)], {})
    no_time = line(7, [], {"e": [("busy", 0)]})
    negative = line(7, [], {"e": [("busy", 4), ("idle", -1)]})
    bad: list[dict[str, Any] | str] = [
        "",
        whole[:50],
        "[]",
        whole.replace("10.0", "1e999"),
        backwards,
        no_time,
        negative,
        {**good[0], "reprefilled": -1.0},
    ]
    bad += ["[" * 100_000, {**good[0], "run": {}}, {**good[0], "run": SETUP | {"train_gpus": 0}}]
    folder = write(*good[:6], *bad, *good[6:])
    report = relax_profiling.analyze(folder)
    assert len(report.timelines[0].steps) == 12
    path = folder / "timeline.jsonl"
    assert [problem.split(": ")[0] for problem in report.problems] == [
        *(f"{path}:{i}" for i in range(8, 13)),
        str(path),
    ]
    assert report.problems[-1].endswith("10 damaged lines are left out, of which the first 5 are named")
    assert "runs/mine/timeline.jsonl:8" in to_text(report)


def test_a_line_without_end_costs_no_memory(write: Write) -> None:
    good = steps([("train_step", 10)], {"e": [("busy", 10)]}, 2)
    steps_read, problems = read_timeline(write("x" * (9 << 20), *good) / "timeline.jsonl")
    assert len(steps_read) == 2
    assert [problem.split(": ")[0].rpartition(":")[2] for problem in problems] == ["1"]


def test_a_run_without_timeline_says_so(write: Write, recorded_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write()
    assert main(["report", str(folder)]) == 1, "an empty one"
    assert "no whole line in it, so there is no timeline" in capsys.readouterr().out
    (folder / "timeline.jsonl").unlink()
    assert main(["report", str(folder), str(recorded_run)]) == 0
    text = capsys.readouterr().out
    assert f"{folder}: no timeline.jsonl in it, so there is no timeline of trainer and engines" in text
    assert "rank0_dp0_tp0_pp0" in text
    assert "summary.json" not in text, "it is no trace"


def test_the_command_shows_it(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases = [("wait_for_rollout", 7), ("train_step", 2), ("weight_update", 1)]
    folder = write(*steps(phases, {"engine<0>": [("busy", 9), ("paused", 1)]}, 500))
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--html", str(page)]) == 0
    assert "split of GPUs" in capsys.readouterr().out
    assert main(["report", str(folder / "timeline.jsonl"), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["timelines"]
    assert data["trainer"]["wait_for_rollout"] == pytest.approx(0.7)
    assert data["engines"]["engine<0>"]["paused"] == pytest.approx(0.1)
    html = page.read_text()
    assert html == to_html(relax_profiling.analyze(folder))
    assert "engine&lt;0&gt; step 499: has requests, 9.000 s" in html
    assert "trainer step 488 wait_for_rollout: waits, 7.000 s, 0.000 s after the start" in html
    assert "step 487 wait" not in html, "only the last steps are drawn one by one"
    assert "steps 0 to 2: waits 70% of 30.00 s" in html
    assert len(html) < 200_000
