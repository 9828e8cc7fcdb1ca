"""What a run prints and draws."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from relax_cli.run.progress import Progress, plot_reward
from relax_cli.run.tracking import JsonLinesTracker, TensorBoardTracker, Trackers, WandbTracker, read_metrics
from rich.console import Console


def test_the_step_line_is_plain_text_with_everything_the_user_watches() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=40, highlight=False, soft_wrap=True))
    scalars = {
        "rollout/reward": 0.25,
        "perf/tokens_per_s": 812.4,
        "staleness/max": 1.0,
        "time/generate": 1.5,
        "time/log_probs": 0.25,
        "time/train": 0.5,
        "time/weight_update": 0.125,
        "train/grad_norm": 0.5,
    }
    progress.step(3, 59, scalars)
    line = out.getvalue()
    assert line.count("\n") == 1, "one line, however narrow the terminal"
    assert "\x1b" not in line
    for part in (
        "step 3/59",
        "reward 0.250",
        "812 tok/s",
        "grad norm 0.500",
        "staleness 1",
        "generate 1.50s",
        "weight_update 0.12s",
    ):
        assert part in line


def test_the_step_line_shows_nothing_that_did_not_take_place() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, width=40, highlight=False, soft_wrap=True))
    progress.step(3, None, {"time/generate": 0.004, "time/train": 1.5, "time/step": 1.504, "train/grad_norm": 0.0})
    progress.step(4, None, {"rollout/reward": 0.0, "perf/tokens_per_s_step": 0.26, "time/wait_for_rollout": 0.0})
    first, second = (line.partition("] ")[2] for line in out.getvalue().splitlines())
    assert first == "step 3  grad norm 0.000  generate 0.00s train 1.50s"
    assert second == "step 4  reward 0.000  0.3 tok/s  wait_for_rollout 0.00s"


def test_metrics_survive_a_cut_last_line_and_a_value_that_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log({"rollout/reward": 0.5, "train/loss": float("nan")}, 0)
    tracker.log({"rollout/reward": 0.75}, 1)
    tracker.close()
    with path.open("a") as out:
        out.write('{"step": 2, "rollout/re')
    rows = read_metrics(path)
    assert [(r["step"], r["rollout/reward"]) for r in rows] == [(0, 0.5), (1, 0.75)]
    assert rows[0]["train/loss"] is None


def test_a_line_cut_by_a_kill_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "time": 1.0, "a": 2.0}\n{"step": 1, "ti')
    tracker = JsonLinesTracker(path)
    tracker.log({"a": 3.0}, 1)
    tracker.close()
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(0, 2.0), (1, 3.0)]
    assert len(path.read_text().splitlines()) == 3


def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Trackers([TensorBoardTracker(tmp_path)]) as trackers:
        trackers.log({"rollout/reward": 0.25}, 0)
        trackers.log({"rollout/reward": 0.5}, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "rollout/reward" in str(events.Tags())
    tensors = events.Tensors("rollout/reward")
    assert [t.step for t in tensors] == [0, 7]


def start(folder: Path, rows: list[tuple[int, dict[str, float]]]) -> None:
    """One start of a run: it goes on in ``folder`` and logs ``rows``."""
    with Trackers([JsonLinesTracker(folder / "metrics.jsonl"), TensorBoardTracker(folder / "tensorboard")]) as trackers:
        for step, scalars in rows:
            trackers.log(scalars, step)


def in_tensorboard(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    return [(e.step, round(float(make_ndarray(e.tensor_proto)), 3)) for e in events.Tensors(name)]


def in_the_file(folder: Path, name: str) -> list[tuple[int, float]]:
    """Every value in the file, line by line, whatever a reader of ours would make of it."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row[name]) for row in rows if name in row]


def test_after_a_resume_each_step_has_the_value_of_the_run_that_goes_on(tmp_path: Path) -> None:
    start(tmp_path, [(step, {"rollout/reward": 0.1, "only/before": 1.0}) for step in range(6)])
    start(tmp_path, [(step, {"rollout/reward": 0.5}) for step in range(3, 12)])
    start(tmp_path, [(step, {"rollout/reward": 0.75}) for step in range(5, 8)])
    expected = [(step, 0.1 if step < 3 else 0.5 if step < 5 else 0.75) for step in range(8)]
    assert in_the_file(tmp_path, "rollout/reward") == expected
    assert in_tensorboard(tmp_path, "rollout/reward") == expected
    assert in_the_file(tmp_path, "only/before") == in_tensorboard(tmp_path, "only/before") == [(0, 1), (1, 1), (2, 1)]
    assert [(row["step"], row["rollout/reward"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == expected
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_evaluation_of_the_weights_that_a_resume_begins_with_stays_until_it_is_repeated(tmp_path: Path) -> None:
    before = [(0, {"rollout/reward": 0.1}), (1, {"eval/a/reward": 0.2, "time/eval": 3.0}), (1, {"rollout/reward": 0.1})]
    start(tmp_path, before)
    start(tmp_path, [(1, {"rollout/reward": 0.5})])
    assert in_the_file(tmp_path, "eval/a/reward") == in_tensorboard(tmp_path, "eval/a/reward") == [(1, 0.2)]
    start(tmp_path, [(1, {"eval/a/reward": 0.25, "time/eval": 2.0}), (1, {"rollout/reward": 0.75})])
    assert in_the_file(tmp_path, "eval/a/reward") == in_tensorboard(tmp_path, "eval/a/reward") == [(1, 0.25)]
    assert in_the_file(tmp_path, "rollout/reward") == [(0, 0.1), (1, 0.75)]
    assert read_metrics(tmp_path / "metrics.jsonl")[1]["eval/a/reward"] == 0.25


def test_the_plot_of_a_resumed_run_does_not_go_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.axes

    drawn: list[tuple[list[int], list[float]]] = []
    plot = matplotlib.axes.Axes.plot

    def remember(self: Any, x: Any, y: Any, **options: Any) -> Any:
        drawn.append((list(x), list(y)))
        return plot(self, x, y, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", remember)
    rows = [{"step": step, "rollout/reward": reward} for step, reward in ((0, 0.1), (1, 0.2), (2, 0.3), (1, 0.4))]
    assert plot_reward(rows, tmp_path / "reward.png")
    assert drawn == [([0, 1, 2], [0.1, 0.4, 0.3])]


def test_plot_is_a_png_and_nothing_is_drawn_from_nothing(tmp_path: Path) -> None:
    assert not plot_reward([], tmp_path / "none.png")
    rows = [json.loads(f'{{"step": {i}, "rollout/reward": {i / 10}}}') for i in range(4)]
    rows.append({"step": 4, "eval/heldout/reward": 0.5})
    assert plot_reward(rows, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_weights_and_biases_writes_its_files_offline(tmp_path: Path) -> None:
    # In a process of its own: wandb has a server process and temporary folders until the process ends.
    code = f"""if True:
        from pathlib import Path
        from {WandbTracker.__module__} import Trackers, WandbTracker
        options = dict(config={{"lr": 1e-6}}, project="relax", mode="offline")
        tracker = WandbTracker(directory=Path.cwd(), name="a-run", **options)
        with Trackers([tracker]) as trackers:
            for step in (3, 4, 3):
                trackers.log({{"rollout/reward": 0.25}}, step)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True
    )
    assert "will be ignored" not in done.stdout + done.stderr, "W&B drops rows whose step does not rise"
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
