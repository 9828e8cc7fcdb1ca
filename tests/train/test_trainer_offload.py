"""Sleep and wake. The mechanism is the same on a CPU, where storages can be emptied and refilled just as well."""

import functools
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train import settings as s

RunRanks = Callable[..., list[Any]]


def make_batch(rollout_id: int) -> TrainBatch:
    rng = np.random.default_rng(rollout_id)
    responses = rng.integers(1, 12, 4)
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[rng.integers(0, 96, 3 + r) for r in responses],
        response_lengths=responses,
        loss_masks=[np.ones(r, np.float32) for r in responses],
        rollout_log_probs=[np.full(r, -4, np.float32) for r in responses],
        rewards=rng.random(4).astype(np.float32),
        group_ids=np.zeros(4, np.int64),
        oldest_versions=np.zeros(4, np.int64),
        names=[f"row:{i}" for i in range(4)],
    )


def make_trainer(folder: Path, bf16: bool, host: Any = None, **parallel: Any) -> Any:
    from relax_train.trainer import Trainer

    trainer = Trainer(
        s.TrainSettings(
            model=s.ModelSettings(hf_checkpoint=str(folder), bf16=bf16),
            parallel=s.ParallelSettings(**parallel),
            optimizer=s.OptimizerSettings(lr=1e-2, adam_eps=1e-3),
        ),
        host=host,
    )
    trainer.setup()
    return trainer


class Held:
    """Keeps the copies of an offload from running until somebody waits for them: what does not wait reads nonsense.

    Attributes:
        seen: what took place, in order.
    """

    def __init__(self, offload: Any) -> None:
        self.seen: list[str] = []
        self._gate, self._copies = threading.Event(), offload._copies
        self._offload, self._copy, self._wait = offload, offload._copies.copy, offload.wait
        offload._copies.copy, offload.wait = self.copy, self.wait

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        out = not self._offload.asleep
        early = {part.storage.data_ptr() for part in self._offload._parts if part.early}
        held = source.untyped_storage() if out else target.untyped_storage()
        if out or held.data_ptr() not in early:
            if not out:
                target.fill_(255)  # as new memory may be: not a number
            self._copies._pool.submit(self._gate.wait)
        self._copy(target, source)

    def wait(self) -> None:
        """The optimizer is about to be used: only now its states come back."""
        if self._offload._in is not None:
            self.seen.append("in")
            self._gate.set()
            self._wait()
            self._gate.clear()

    def sleep(self) -> None:
        """Lets the copies out run when the offload waits for them."""
        mark = self._offload._out
        assert mark is not None, "they began with the end of the step"
        assert not mark._place.done(), "they are held"
        wait = mark.wait

        def opened() -> None:
            self.seen.append("out")
            assert all(part.storage.nbytes() for part in self._offload._parts), "nothing is freed before its copy"
            self._gate.set()
            wait()
            self._gate.clear()

        mark.wait = opened
        self._offload.sleep()


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}


def _three_steps(folder: Path, bf16: bool, naps: str) -> tuple[dict[str, torch.Tensor], list[int], list[str]]:
    """Weights after three steps, and the bytes that the memory of model and optimizer had during each nap.

    Args:
        naps: ``none``; ``plain``, one after another; ``held``, begun with the end of a step and copied at the last
            moment that is allowed; ``room``, where a quarter of the memory stays.
    """
    from relax_train.backend import host_memory, remainders

    host_memory.CHUNK = 4096  # several chunks a storage, and several storages a chunk
    remainders.SMALLEST = 100
    trainer = make_trainer(folder, bf16, host_memory.HostMemory(pinned=False) if naps == "held" else None)
    part = trainer._offload
    held = None
    sizes = []
    for i in range(3):
        trainer.train(make_batch(i), version=i)
        if naps == "none":
            continue
        tensors = [*part._weight_tensors(), *part._optimizer_tensors(), *part._gradient_tensors()]
        full = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
        if held is None:
            part.room = full // 4 if naps == "room" else 0
            part.sleep()
        else:
            _weights(trainer)  # a push, while the copies out are under way
            held.sleep()
        part.sleep()
        sizes.append(sum(t.untyped_storage().nbytes() for t in tensors))
        with pytest.raises(RuntimeError, match=r"the trainer sleeps.*call wake\(\) first"):
            trainer.train(make_batch(9), version=9)
        if naps == "held" and held is None:
            held = Held(part)
        trainer.wake()
        trainer.wake()
        if i == 1 and held is None:  # up and down again without a step: what the host has still holds
            part.sleep()
            if naps == "room":
                assert part.resident > 0
                part.free_resident()
                assert not any(t.untyped_storage().nbytes() for t in tensors)
            trainer.wake()
    weights = _weights(trainer)
    seen = list(held.seen) if held is not None else []
    part.wait()  # lets the last copies go
    trainer.close()
    return weights, sizes, seen


@pytest.mark.parametrize(("bf16", "world"), [(False, 1), (True, 2)])
def test_a_nap_frees_everything_and_changes_nothing(
    reference: Any, run_ranks: RunRanks, bf16: bool, world: int
) -> None:
    folder = reference("qwen3").folder
    expected, _, _ = run_ranks(_three_steps, world, folder, bf16, "none")[0]
    for naps in ("plain", "held", "room"):
        for weights, sizes, seen in run_ranks(_three_steps, world, folder, bf16, naps):
            assert [size > 0 for size in sizes] == [naps == "room"] * 3
            # The optimizer is waited for by the step alone, after forward and backward pass; then what leaves.
            assert seen == (["in", "out", "in", "out"] if naps == "held" else [])
            for name, tensor in expected.items():
                assert torch.equal(weights[name], tensor), name


def _bits(offload: Any) -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8).set_(storage).clone() for storage, _ in offload._kept()]


def _halved(folder: Path, parallel: dict[str, int]) -> None:
    """Naps of a trainer whose master weights leave as a half.

    In the second some of them are not the parameters before rounding; in the third all else has room to stay.
    """
    from relax_train.algorithms.reference import ReferenceWeights
    from relax_train.backend import host_memory, remainders

    host_memory.CHUNK = 4096
    remainders.SMALLEST, remainders.LISTED, remainders.PIECE = 100, 100, 777
    trainer = make_trainer(folder, True, host_memory.HostMemory(pinned=False), **parallel)
    part, gate, reference = trainer._offload, threading.Event(), ReferenceWeights(trainer.model)
    copy_in = part._copy_in

    def late(one: Any) -> None:
        if not one.early:
            part._copies._pool.submit(gate.wait)
        copy_in(one)

    part._copy_in = late
    for spoilt, staying in ((False, False), (True, False), (False, True)):
        trainer.train(make_batch(0), version=0)
        shards = list(trainer._optimizer.shards())
        masters = [shard.tensors["master"] for shard in shards if len(shard.tensors["master"]) >= 100]
        assert len(masters) > 5
        if spoilt:
            masters[0] += 1  # all of it
            masters[1].view(torch.int32)[:2] = torch.tensor([0x3F808000, 0x7F800001])  # a tie, and not a number
        before = _bits(part)
        kept, halves = sum(map(len, before)), 2 * sum(map(len, masters[spoilt:]))
        part.room = kept - 4 * sum(len(shard.tensors["master"]) for shard in shards) if staying else 0
        part.changed()
        part.sleep()
        assert part.leaving == kept - part.room - halves
        assert part.resident == part.room
        for last in (False, True):  # up and down again without a step: what the host has still holds
            gate.clear()
            part.wake()
            with reference.put_in():  # while the optimizer still comes back
                gate.set()
                part.wait()
            assert all(map(torch.equal, _bits(part), before))
            if not last:
                part.sleep()
        if spoilt:
            part.changed()
            for shard in shards:
                stop = shard.start + len(shard.tensors["master"])
                shard.tensors["master"].copy_(shard.param.detach().view(-1)[shard.start : stop])
    trainer.close()


@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [("qwen3", 1, {}), ("qwen3", 2, {}), ("qwen3_moe", 2, {"expert_model_parallel_size": 2})],
)
def test_master_weights_leave_as_a_half_and_come_back_bit_for_bit(
    reference: Any, run_ranks: RunRanks, kind: str, world: int, parallel: dict[str, int]
) -> None:
    run_ranks(_halved, world, reference(kind).folder, parallel)


def _sleep_on_cpu(folder: Path) -> bool:
    trainer = make_trainer(folder, False)
    trainer.sleep()
    same = len(trainer.log_probs(make_batch(0))) == 4
    trainer.wake()
    trainer.close()
    return same


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to sleep on")
def test_without_a_gpu_the_trainer_does_not_sleep(reference: Any, run_ranks: RunRanks) -> None:
    assert run_ranks(_sleep_on_cpu, 1, reference("qwen3").folder) == [True]


def _memory(free: int, device: torch.device) -> tuple[int, int]:
    return free, 1_000_000


ONE = types.SimpleNamespace(tp=1, pp=1, cp=1, dp=1, ep=1, etp=1, expert_dp=1)


def _rooms(folder: Path) -> tuple[list[int], float]:
    """``room`` of an offload after each of four measures of a device of 1,000 kB, and how right the estimate was."""
    trainer = make_trainer(folder, True)
    part = trainer._offload
    kept = sum(storage.nbytes() for storage, _ in part._kept())
    estimate = trainer.model.shape.sleeping_bytes(ONE, bf16=True, offload=False) / kept
    rooms = []
    for free in (400_000, 300_000, 600_000, 10):
        part.sleep()
        torch.cuda.mem_get_info = functools.partial(_memory, free)
        part.measure_room()
        rooms.append(part.room - part.resident)
        part.wake()
    trainer.close()
    return rooms, estimate


def test_what_stays_leaves_a_tenth_of_the_device_and_only_shrinks(reference: Any, run_ranks: RunRanks) -> None:
    ((rooms, estimate),) = run_ranks(_rooms, 1, reference("qwen3").folder)
    assert rooms == [300_000, 200_000, 200_000, 0]
    # The host's memory is begun before there is a model; a little that is missing is added later.
    assert 0.95 < estimate < 1.05


def test_host_memory_lies_end_to_end_and_says_when_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from relax_train.backend import host_memory

    monkeypatch.setattr(host_memory, "CHUNK", 4096)
    memory = host_memory.HostMemory(pinned=False)
    memory.begin(5000)
    assert memory.size == 8192
    sizes = [5000, 1, 0, 3000, 600, 10_000]
    places = memory.places(sizes)  # more than was begun
    for number, where in enumerate(places):
        for place in where:
            memory.view(place).fill_(number)
    for number, (size, where) in enumerate(zip(sizes, places, strict=True)):
        found = torch.cat([memory.view(p) for p in where]) if where else torch.empty(0)
        assert found.tolist() == [number] * size
    assert memory.ready
    memory.close()
    memory.close()

    caplog.set_level("INFO")

    def refuse(size: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "_touched", refuse)
    none_left = host_memory.HostMemory(pinned=False)
    (place,) = none_left.places([100])[0]
    with pytest.raises(MemoryError, match=r"no room for 0.0 GiB.*give the run more host memory.*Cannot allocate"):
        none_left.view(place)
    assert not none_left.ready
    assert "made in the background" not in caplog.text
    none_left.close()
