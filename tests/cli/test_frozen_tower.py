"""A vision tower that stays as it is goes to each process of an engine once, where engines keep their weights."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_cli.workers.trainer import TrainActor
from relax_rollout.weight_sync.base import PushReport, WeightPushFailed


class Transport:
    """Takes down what a push brings; some engines fail, as told."""

    def __init__(self) -> None:
        self.pushes: list[tuple[str, list[str] | None]] = []
        self.fails: dict[str, str] = {}
        self.breaks = False

    def push(self, buckets: Iterable[str], version: int, engines: Collection[str] | None = None) -> PushReport:
        self.pushes.append(("".join(buckets), None if engines is None else list(engines)))
        if self.breaks:
            raise WeightPushFailed("no engine")
        return PushReport(failed=self.fails)

    def close(self) -> None:
        """Nothing to close."""


class Trainer:
    def weight_buckets(self, max_bytes: int, *, frozen: bool) -> Iterable[str]:
        return ["whole"] if frozen else ["decoder"]

    def load(self, directory: str) -> None:
        """No checkpoint."""


def make_rank(monkeypatch: pytest.MonkeyPatch, *, shared: bool = False, weight_sync: str | None = None) -> Any:
    rank = TrainActor.__new__(TrainActor)
    cluster = SimpleNamespace(fully_async=False, weight_sync=weight_sync)
    model = SimpleNamespace(update_weight_buffer_size=1)
    placement = SimpleNamespace(shared=shared, device="cpu", gpus_per_engine=1)
    train = SimpleNamespace(model=model)
    run = SimpleNamespace(cluster=cluster, train=train, placement=placement, run_dir=Path())
    vars(rank).update(_config=run, _trainer=Trainer(), _transport=None, _rank=0, _world_size=1)
    transport = Transport()
    monkeypatch.setattr("relax_rollout.weight_sync.transports.make_transport", lambda *a, **k: transport)
    connect(rank, ["engine0", "engine1"])
    return rank


def connect(rank: Any, names: Sequence[str]) -> None:
    rank.connect([SimpleNamespace(name=name) for name in names])


def pushed(rank: Any) -> list[str]:
    return [what for what, _ in rank._transport.pushes]


def test_it_goes_once_and_again_to_an_engine_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(monkeypatch)
    for version in range(3):
        rank.push_weights(version)
    assert pushed(rank) == ["whole", "decoder", "decoder"]
    connect(rank, ["engine0", "engine1"])  # one has another address now
    rank.push_weights(3, ["engine1"])  # it catches up
    rank.push_weights(4, ["engine0", "engine1"])
    rank.push_weights(5, ["engine0", "engine1"])
    assert pushed(rank)[3:] == ["whole", "whole", "decoder"]


def test_an_engine_that_missed_a_push_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(monkeypatch)
    rank._transport.fails = {"engine1": "it died"}
    rank.push_weights(0)
    rank._transport.fails = {}
    rank.push_weights(1, ["engine0"])
    rank.push_weights(2)
    rank.push_weights(3)
    assert pushed(rank) == ["whole", "decoder", "whole", "decoder"]


def test_a_push_that_broke_is_followed_by_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = make_rank(monkeypatch)
    rank.push_weights(0)
    rank._transport.breaks = True
    with pytest.raises(WeightPushFailed):
        rank.push_weights(1)
    rank._transport.breaks = False
    rank.push_weights(1)
    rank.load("checkpoints")
    rank.push_weights(2)
    assert pushed(rank) == ["whole", "decoder", "whole", "whole"]


@pytest.mark.parametrize("options", [{"shared": True}, {"weight_sync": "disk"}])
def test_it_goes_each_time_where_engines_sleep_or_read_a_folder(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    rank = make_rank(monkeypatch, **options)
    for version in range(2):
        rank.push_weights(version)
    assert pushed(rank) == ["whole", "whole"]
