"""What the rollout actor finds wrong before any engine has loaded, wherever its process was started."""

import asyncio
import errno
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_cli.config.resolution import resolve
from relax_cli.run.debug_data import load_groups
from relax_cli.workers.rollout import RolloutActor
from relax_data.types import Prompt, SampleGroup, SampleStatus
from relax_rollout.engines.base import EngineAddress
from relax_rollout.loop.rollout_loop import RolloutResult
from relax_train.checkpoint.folders import CheckpointError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver runs in ``tmp_path``; what the actor does to its process is undone."""
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    with warnings.catch_warnings():
        yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def test_relative_paths_are_those_of_the_driver(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(task.train.read_bytes())
    (tmp_path / "rewards_of_this_test.py").write_text("def score(sample):\n    return 1.0\n")
    config = resolve(
        task.flags(prompt_data="prompts.jsonl", rm_type=None, custom_rm_path="rewards_of_this_test:score"), {}
    )
    (tmp_path / "cluster").mkdir()
    monkeypatch.chdir(tmp_path / "cluster")
    actor = RolloutActor(config)
    assert actor._source.next(1)[0].source.startswith("prompts.jsonl:")
    assert (tmp_path / "runs" / "run" / "logs" / "rollout.log").is_file()


def test_an_unusable_filter_is_found_before_the_engines_load(task: Any, tmp_path: Path) -> None:
    # Its text has the name, so that only the import shows that it is gone.
    (tmp_path / "filters_of_this_test.py").write_text("def keeps(group):\n    return True\nkeep = keeps\ndel keep\n")
    config = resolve(task.flags(dynamic_sampling_filter_path="filters_of_this_test:keep"), {})
    with pytest.raises(ValueError, match=r"--dynamic-sampling-filter-path .* did you mean 'keeps'"):
        RolloutActor(config)


def test_an_unreadable_line_is_named(task: Any, tmp_path: Path) -> None:
    good = '{"input": "1", "label": "1"}\n' * 40  # more than the plan looks at
    (tmp_path / "broken.jsonl").write_text(good + '{"input": \n')
    config = resolve(task.flags(prompt_data="broken.jsonl"), {})
    with pytest.raises(ValueError, match=r"broken\.jsonl:41"):
        RolloutActor(config)


def test_the_actor_resumes_with_the_prompts_it_saved(task: Any, tmp_path: Path) -> None:
    (tmp_path / "collector_of_this_test.py").write_text(
        "async def collect(rollout):\n"
        "    groups = rollout.take(3)\n"
        "    for sample in groups[0].samples:\n"
        "        sample.append([1], [-0.5], rollout.version)\n"
        "        sample.status, sample.reward = type(sample.status).COMPLETED, 1.0\n"
        "    return groups[:1]\n"
    )
    config = resolve(task.flags(rollout_function_path="collector_of_this_test:collect"), {})
    engine = EngineAddress(name="engine0", url="http://127.0.0.1:9", log_path="engine0.log")  # never asked

    async def run() -> None:
        actor, again = RolloutActor(config), RolloutActor(config)
        for each in (actor, again):
            await each.connect([engine])
        metrics = (await actor.generate(0, 0)).metrics
        assert [metrics[f"prompts/{s}"] for s in ("out", "buffered", "trained", "dropped")] == [1, 2, 0, 0]
        state = json.loads(json.dumps(await actor.save_state("checkpoints", 0)))
        folder = tmp_path / "checkpoints" / "rollout_0.rollout.tmp"
        await again.load_state(state, folder)
        assert again._loop.ledger.trained == 1
        assert await again.save_state("checkpoints", 1) == state
        assert [p.prompt_id for p in again._source.next(1)] == [3]
        state["ledger"]["open"][0]["prompt"]["prompt_id"] = 2
        with pytest.raises(ValueError, match=r"prompts \[2\] are twice in it; load another checkpoint"):
            await again.load_state(state, folder)
        for each in (actor, again):
            await each.close()

    asyncio.run(run())


def test_a_full_disk_names_what_is_there_still(task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name in ("rollout_3", "rollout_3.rollout.tmp"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "latest").write_text("rollout_3\n")
    actor = RolloutActor(resolve(task.flags(), {}))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError) as caught:
        asyncio.run(actor.save_state("checkpoints", 4))
    message = str(caught.value)
    assert f"cannot save {checkpoints / 'rollout_4'}: [Errno 28] No space left on device. " in message
    assert "MB are free there; make room, choose another --save" in message
    assert message.endswith("The checkpoint of rollout 3 is as it was.")
    assert sorted(p.name for p in checkpoints.iterdir()) == ["latest", "rollout_3", "rollout_3.rollout.tmp"]


def groups(*lengths: int) -> list[SampleGroup]:
    """One group of one sample for each response length."""
    made = []
    for i, length in enumerate(lengths):
        prompt = Prompt(prompt_id=i, epoch=0, source=f"a:{i + 1}", text="1+1=", input_ids=[4])
        made.append(SampleGroup.start(prompt, 1))
        made[-1].samples[0].append([7] * length, [-0.5] * length, 0)
        made[-1].samples[0].status, made[-1].samples[0].reward = SampleStatus.COMPLETED, 1.0
    return made


def test_a_rollout_is_written_before_a_sample_stops_the_training(task: Any, tmp_path: Path) -> None:
    """The file shows what the message speaks of."""
    actor = RolloutActor(resolve(task.flags(), {}))
    path = tmp_path / "r.jsonl"
    with pytest.raises(ValueError, match="a:2 response 0 cannot be trained on"):
        actor._keep(0, result(groups(2, 0), {}), path)
    assert [len(g.samples[0].tokens) for g in load_groups(path)] == [2, 0]


def result(groups: list[SampleGroup], metrics: dict[str, float]) -> RolloutResult:
    return RolloutResult(groups=groups, metrics=metrics, dropped=[])


def test_a_run_that_trains_nothing_takes_what_cannot_be_trained_on(task: Any) -> None:
    actor = RolloutActor(resolve(task.flags(debug_rollout_only=True), {}))
    output = actor._keep(0, result(groups(2, 0), {"rollout/reward": 1.0}), None)
    assert (output.groups, output.manifest) == (2, None)
    assert output.metrics == {"rollout/reward": 1.0}


def test_the_end_of_the_data_has_no_manifest(task: Any) -> None:
    actor = RolloutActor(resolve(task.flags(), {}))
    assert actor._keep(0, result(groups(2), {}), None).manifest is not None
    actor._rows = None
    output = actor._keep(1, result([], {}), None)
    assert (output.groups, output.manifest) == (0, None)
