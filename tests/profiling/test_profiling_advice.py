"""Every rule of the advice: a trace that triggers it, and one that does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.report import advice
from relax_profiling.report.build import build_report
from relax_profiling.report.model import Finding

TRAIN = "train_trace/train_overall_rank{}_dp{}_tp0_pp0.1713780123.pt.trace.json"
ENGINE = "sglang_trace/rollout_2/engine0-1713780123-TP-0.trace.json"
GPU = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "with_flops": 1}
MIB = 2**20


@pytest.fixture
def findings(tmp_path: Path) -> Callable[[str], list[Finding]]:
    """The findings of one rule on what lies in the test's folder."""

    def of(rule: str) -> list[Finding]:
        return [f for f in build_report([tmp_path]).findings if f.rule == rule]

    return of


@pytest.fixture
def train(trace_maker: Any, tmp_path: Path) -> Any:
    """Makes the trace of a training rank: 100 rounds of compute, each followed by what ``fill`` adds."""

    def make(fill: Callable[[Any, float], None], rank: int = 0, *, compute: float = 80, every: float = 100) -> Any:
        t = trace_maker(**GPU)
        for i in range(100):
            t.kernel(every * i, compute, launched=every * i - every)
            fill(t, every * i + compute)
        t.write(tmp_path / TRAIN.format(rank, rank))
        return t

    return make


def nothing(t: Any, at: float) -> None:
    pass


@pytest.mark.parametrize(
    ("kind", "group", "flag"),
    [
        ("allgather", "TENSOR_MODEL_PARALLEL_GROUP", "--tensor-model-parallel-size"),
        ("_allgather_base", "default_pg", "--tensor-model-parallel-size"),
        ("alltoall", "default_pg", "--expert-model-parallel-size"),
        ("allreduce", "DATA_PARALLEL_GROUP_WITH_CP", "--global-batch-size"),
        ("send", "PIPELINE_MODEL_PARALLEL_GROUP", "--pipeline-model-parallel-size"),
        ("send", "CONTEXT_PARALLEL_GROUP", "--context-parallel-size"),
    ],
)
def test_exposed_communication(train: Any, findings: Any, kind: str, group: str, flag: str) -> None:
    if group == "CONTEXT_PARALLEL_GROUP":
        kind = "allgather"
    train(lambda t, at: t.collective(at, 40, kind, group), every=125)
    (finding,) = findings("exposed communication")
    assert flag in finding.flags
    assert f"exposed {kind} in {group}: 32%" in finding.figure


def test_communication_behind_compute_is_not_exposed(train: Any, findings: Any) -> None:
    train(lambda t, at: t.collective(at - 60, 60))
    assert findings("exposed communication") == []


def test_waiting_for_a_straggler_is_not_communication_of_its_own(train: Any, findings: Any) -> None:
    train(lambda t, at: t.collective(at, 40), 0, every=125)
    train(lambda t, at: t.collective(at + 38, 2), 1, every=125)
    assert findings("exposed communication") == []
    (finding,) = findings("straggler")
    assert finding.flags == ("--balance-data",)
    assert "rank1_dp1_tp0_pp0 arrives last at 100 of 100 collectives" in finding.figure


def test_ranks_in_step_have_no_straggler(train: Any, findings: Any) -> None:
    for rank in (0, 1):
        # Each comes last to every other collective.
        train(lambda t, at, r=rank: t.collective(at + 10 * ((at // 125 + r) % 2), 20), rank, every=125)
    assert findings("straggler") == []


def test_a_late_rank_that_costs_nothing_is_no_straggler(train: Any, findings: Any) -> None:
    train(lambda t, at: t.collective(at, 10), 0)
    train(lambda t, at: t.collective(at + 1, 9), 1)
    assert findings("straggler") == []


def test_host_bound_training(trace_maker: Any, tmp_path: Path, findings: Any) -> None:
    t = trace_maker()
    for i in range(100):
        t.operator(100 * i, 80, "aten::add")
        t.kernel(100 * i + 85, 10, launched=100 * i + 80)
    t.write(tmp_path / TRAIN.format(0, 0))
    (finding,) = findings("host-bound training")
    assert "--max-tokens-per-gpu" in finding.flags
    assert "waits for launches for 9" in finding.figure
    assert findings("host-bound engine") == []


def test_a_busy_gpu_is_not_host_bound(train: Any, findings: Any) -> None:
    train(nothing)
    assert findings("host-bound training") == []


def test_too_few_launches_are_no_evidence(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    for i in range(10):
        t.kernel(1000 * i, 10, launched=1000 * i - 2)
    t.write(tmp_path / TRAIN.format(0, 0))
    t.write(tmp_path / ENGINE)
    assert build_report([tmp_path]).findings == []


def test_host_bound_engine(trace_maker: Any, tmp_path: Path, findings: Any) -> None:
    t = trace_maker()
    for i in range(100):
        t.operator(100 * i, 80, "aten::add")
        t.kernel(100 * i + 85, 10, launched=100 * i + 80)
    t.write(tmp_path / ENGINE)
    (finding,) = findings("host-bound engine")
    assert "--sglang-cuda-graph-max-bs" in finding.flags
    assert finding.where == "engine0 TP-0, rollout 2"


def test_a_busy_engine_is_not_host_bound(trace_maker: Any, tmp_path: Path, findings: Any) -> None:
    t = trace_maker()
    for i in range(100):
        t.kernel(100 * i, 95, launched=100 * i - 90)
    t.write(tmp_path / ENGINE)
    assert findings("host-bound engine") == []


@pytest.mark.parametrize(("pause", "expected"), [(3000, 1), (100, 0)])
def test_training_waits_for_data(trace_maker: Any, tmp_path: Path, findings: Any, pause: float, expected: int) -> None:
    t = trace_maker()
    at = 0.0
    for step in range(3):
        t.span(at - 5, 5010, f"train_overall#{step}")
        for i in range(50):
            t.kernel(at + 100 * i, 95, launched=at + max(0, 100 * i - 90) - 2)
        at += 5000 + pause
    t.write(tmp_path / TRAIN.format(0, 0))
    found = findings("training waits for data")
    assert len(found) == expected
    assert all("--fully-async" in f.flags for f in found)


@pytest.mark.parametrize(("batch", "steps", "expected"), [(3, 5, 1), (64, 5, 0), (3, 2, 0)])
def test_small_decode_batches(
    trace_maker: Any, tmp_path: Path, findings: Any, batch: int, steps: int, expected: int
) -> None:
    t = trace_maker()
    for i in range(steps):
        t.span(100 * i, 80, f"step[DECODE bs={batch}]")
        t.operator(100 * i, 80, "aten::mm")
    t.write(tmp_path / ENGINE)
    found = findings("small decode batches")
    assert len(found) == expected
    assert all("--rollout-batch-size" in f.flags and f"batches of {batch}.0" in f.figure for f in found)


@pytest.mark.parametrize(("side", "expected"), [(512, 1), (4096, 0)])
def test_low_mfu(train: Any, findings: Any, tmp_path: Path, side: int, expected: int) -> None:
    shapes = {"Input Dims": [[side, side], [side, side]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    train(lambda t, at: t.operator(at - 75, 5, "aten::mm", **shapes), compute=180, every=200)
    found = findings("low MFU")
    assert len(found) == expected
    (report,) = build_report([tmp_path]).traces
    assert report.mfu is not None
    # 100 products of 2 n^3 operations in 20 ms, against 989 TFLOP/s.
    assert report.mfu == pytest.approx(100 * 2 * side**3 / 989e12 / (report.breakdown.span / 1e6))
    assert build_report([tmp_path], peak=98.9).traces[0].mfu == pytest.approx(10 * report.mfu)


def test_mfu_needs_shapes(train: Any, findings: Any, tmp_path: Path) -> None:
    train(nothing)
    assert build_report([tmp_path]).traces[0].mfu is None
    assert findings("low MFU") == []


@pytest.mark.parametrize(("copy", "expected"), [(15, 1), (2, 0)])
def test_exposed_copies(train: Any, findings: Any, copy: float, expected: int) -> None:
    train(lambda t, at: t.kernel(at, copy, "Memcpy DtoH (Device -> Pinned)", category="gpu_memcpy"))
    found = findings("exposed memory copies")
    assert [f.flags for f in found] == [("--optimizer-cpu-offload",)] * expected


LOGITS = [("log_softmax", "/site-packages/torch/functional.py", 9), ("log_prob", "/home/me/relax_train/logprobs.py", 7)]
LOSS = [("cross_entropy", "/site-packages/torch/functional.py", 9), ("loss", "/home/me/train.py", 5)]
MLP = [("forward", "/site-packages/megatron/core/transformer/mlp.py", 3), ("step", "/home/me/train.py", 6)]
ADAM = [("_init_group", "/site-packages/torch/optim/adam.py", 178), ("step", "/home/me/train.py", 8)]
OTHER = [("load", "/home/me/model.py", 1)]


@pytest.mark.parametrize(
    ("rule", "stack", "flag"),
    [
        ("peak from logits", LOGITS, "--log-probs-max-tokens-per-gpu"),
        ("peak from logits", LOSS, "--max-tokens-per-gpu"),
        ("peak from activations", MLP, "--recompute-granularity"),
        ("peak from the optimizer", ADAM, "--optimizer-cpu-offload"),
    ],
)
def test_what_holds_the_peak(make_snapshot: Any, findings: Any, rule: str, stack: Any, flag: str) -> None:
    make_snapshot("memory_snapshot_time1_rank0_dp0_tp0_pp0_snapshot.pickle", [(600 * MIB, stack), (400 * MIB, OTHER)])
    (finding,) = findings(rule)
    assert finding.flags[0] == flag
    assert "60% of the peak of 0.98 GiB" in finding.figure


@pytest.mark.parametrize("rule", ["peak from logits", "peak from activations", "peak from the optimizer"])
def test_a_peak_of_something_else_is_left_alone(make_snapshot: Any, findings: Any, rule: str) -> None:
    stacks = [(100 * MIB, stack) for stack in (LOGITS, MLP, ADAM)]
    make_snapshot("memory_snapshot_time1_rank0_dp0_tp0_pp0_snapshot.pickle", [*stacks, (2000 * MIB, OTHER)])
    assert findings(rule) == []


def test_a_small_peak_is_no_evidence(make_snapshot: Any, findings: Any) -> None:
    make_snapshot("memory_snapshot_time1_rank0_dp0_tp0_pp0_snapshot.pickle", [(6 * MIB, LOGITS)])
    assert findings("peak from logits") == []


@pytest.mark.parametrize(("later", "expected"), [(900, 1), (520, 0)])
def test_memory_grows(make_snapshot: Any, findings: Any, later: int, expected: int) -> None:
    name = "memory_snapshot_time{}_rank0_dp0_tp0_pp0_snapshot.pickle"
    make_snapshot(name.format(1713780123), [(500 * MIB, OTHER)])
    make_snapshot(name.format(1713780200), [(later * MIB, OTHER)])
    found = findings("memory grows")
    assert len(found) == expected
    assert all("load (/home/me/model.py:1)" in f.figure for f in found)


def test_out_of_memory_names_who_stands_in_the_way(make_snapshot: Any, findings: Any) -> None:
    oom = {"size": 8 << 30, "device_free": 2 << 30}
    make_snapshot("memory_snapshot_time1_rank0_dp0_tp0_pp0_oom_snapshot.pickle", [(900 * MIB, MLP)], oom=oom)
    (finding,) = findings("out of memory")
    assert "8.00 GiB asked for, 2.00 GiB free on the device" in finding.figure
    assert "most is held by forward (/megatron/core/transformer/mlp.py:3) (0.88 GiB)" in finding.figure
    assert "--max-tokens-per-gpu" in finding.flags
    assert findings("out of memory: fragmentation") == []


def test_out_of_memory_with_enough_free_blocks_is_fragmentation(make_snapshot: Any, findings: Any) -> None:
    oom = {"size": 300 * MIB, "device_free": 0}
    blocks = tuple([100 * MIB] * 5)
    make_snapshot(
        "memory_snapshot_time1_rank0_dp0_tp0_pp0_oom_snapshot.pickle", [(900 * MIB, MLP)], oom=oom, free_blocks=blocks
    )
    (finding,) = findings("out of memory: fragmentation")
    assert "0.49 GiB are reserved and unused, the largest free block is 0.10 GiB" in finding.figure
    assert findings("out of memory") == []


def test_a_snapshot_without_an_error_has_no_out_of_memory(make_snapshot: Any, findings: Any) -> None:
    make_snapshot("memory_snapshot_time1_rank0_dp0_tp0_pp0_snapshot.pickle", [(900 * MIB, OTHER)])
    assert findings("out of memory") == []


def test_every_rule_is_tested_here() -> None:
    tested = Path(__file__).read_text()
    names = {
        "out_of_memory": "out of memory",
        "straggler": "straggler",
        "exposed_communication": "exposed communication",
        "launch_bound": "host-bound training",
        "waits_for_data": "training waits for data",
        "small_decode_batches": "small decode batches",
        "low_utilisation": "low MFU",
        "exposed_copies": "exposed memory copies",
        "peak_from_logits": "peak from logits",
        "peak_from_activations": "peak from activations",
        "peak_from_optimizer": "peak from the optimizer",
        "memory_grows": "memory grows",
    }
    assert {rule.__name__ for rule in advice.RULES} == set(names)
    assert all(f'findings("{name}")' in tested or f'"{name}", ' in tested for name in names.values())


def test_the_recorded_run_is_told_what_is_wrong_with_it(recorded_run: Path) -> None:
    found = {(f.rule, f.where.split()[0]) for f in build_report([recorded_run]).findings}
    assert {
        ("straggler", "rank1_dp1_tp0_pp0"),
        ("small decode batches", "engine0"),
        ("out of memory", "rank0_dp0_tp0_pp0,"),
        ("host-bound engine", "engine0"),
    } <= found
    assert not any(rule == "exposed communication" for rule, _ in found), "it is the straggler's doing"
