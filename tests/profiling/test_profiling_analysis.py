"""The analysers, on traces whose shares are known and on recorded ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import relax_profiling
from relax_profiling.analysis.breakdown import device_breakdown, host_breakdown
from relax_profiling.analysis.communication import communication_kinds
from relax_profiling.analysis.intervals import Cover, intersection, total, union
from relax_profiling.analysis.ranks import clock_offsets, rank_waits
from relax_profiling.analysis.stages import engine_stages
from relax_profiling.analysis.top import short_kernel, top_kernels, top_operators
from relax_profiling.report.html import to_html
from relax_profiling.report.text import to_text
from relax_profiling.trace.flops import operator_flops, peak_tflops
from relax_profiling.trace.load import COMMUNICATION, COMPUTE, MEMORY, device_kind, load_trace


def test_interval_arithmetic() -> None:
    a = union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (7.0, 8.0)])
    assert a == [(0.0, 3.0), (5.0, 8.0)]
    assert intersection(a, [(2.0, 6.0)]) == [(2.0, 3.0), (5.0, 6.0)]
    assert total(a) == 6.0
    cover = Cover(a)
    assert cover.within(2.0, 6.0) == [(2.0, 3.0), (5.0, 6.0)]
    assert cover.outside(2.0, 9.0) == [(3.0, 5.0), (8.0, 9.0)]
    assert cover.outside(3.5, 4.0) == [(3.5, 4.0)]
    assert Cover([]).outside(0.0, 1.0) == [(0.0, 1.0)]


def test_shares_of_a_device(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.kernel(0, 100)
    t.collective(50, 100)  # 50 behind the kernel, 50 exposed
    t.kernel(140, 20, "Memcpy HtoD (Pinned -> Device)", category="gpu_memcpy")  # 10 behind the collective
    t.kernel(180, 20)  # 20 idle before it
    trace = load_trace(t.write(tmp_path / "t.json"))
    b = device_breakdown(trace, trace.gpus[0])
    assert (b.span, b.compute, b.memory, b.idle) == (200, 120, 10, 20)
    assert (b.communication_exposed, b.communication_overlapped) == (50, 50)
    assert b.compute + b.communication_exposed + b.memory + b.idle == pytest.approx(b.span)
    (kind,) = communication_kinds(trace, trace.gpus[0])
    assert (kind.kind, kind.group, kind.calls, kind.time, kind.exposed) == ("allreduce", "default_pg", 1, 100, 50)


def test_causes_of_idle_time(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.kernel(0, 10, launched=-5)
    # 1: the host works in torch and launches late.
    t.operator(10, 390, "aten::add")
    t.kernel(405, 5, launched=400)
    # 2: the host is inside a collective of its own.
    t.operator(410, 500, "gloo:all_reduce")
    t.kernel(915, 5, launched=910)
    # 3: the host waits for its data loader.
    t.span(920, 1000, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    t.kernel(1925, 5, launched=1920)
    # 4: the host does nothing that torch sees, for long.
    t.kernel(6935, 5, launched=6930)
    # 5: queued long before, yet late: another stream or device held it up.
    t.kernel(7440, 10, launched=6932)
    trace = load_trace(t.write(tmp_path / "t.json"))
    b = device_breakdown(trace, trace.gpus[0])
    # Runtime calls of 2 us stand at each launch.
    assert b.idle_causes["collective"] == pytest.approx(500)
    assert b.idle_causes["data"] == pytest.approx(1000)
    assert b.idle_causes["host"] == pytest.approx(5000, abs=5)
    assert b.idle_causes["other"] == pytest.approx(500)
    assert b.idle_causes["launch"] == pytest.approx(395 + 5 + 5 + 5, abs=10)
    assert sum(b.idle_causes.values()) == pytest.approx(b.idle)


def test_a_silent_host_between_steps_is_no_fault_of_the_step(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.span(-10, 60, "train_overall#2")
    t.kernel(0, 10)
    t.span(5000, 100, "train_overall#3")
    t.kernel(5020, 10, launched=5010)
    trace = load_trace(t.write(tmp_path / "t.json"))
    causes = device_breakdown(trace, trace.gpus[0]).idle_causes
    assert causes["between"] == pytest.approx(4950, abs=3)
    assert causes["host"] == pytest.approx(50, abs=5)


def test_a_host_without_a_gpu(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.span(0, 1000, "train_overall#0")
    t.operator(100, 300, "aten::mm")
    t.operator(100, 200, "aten::empty")
    t.operator(500, 100, "gloo:all_reduce", thread=2)
    t.span(1500, 500, "train_overall#1")
    t.operator(1500, 500, "aten::mm")
    b = host_breakdown(load_trace(t.write(tmp_path / "t.json")))
    assert (b.span, b.compute, b.communication_exposed, b.idle) == (2000, 800, 100, 1100)
    assert b.idle_causes == {"host": 600, "between": 500}
    assert not b.on_device


def test_the_time_between_steps_is_told_apart_from_idle_time_in_them(trace_maker: Any, tmp_path: Path) -> None:
    """With --colocate it is the engines' turn, and says nothing of the trainer."""
    t = trace_maker()
    t.span(-10, 110, "train_overall#2")
    t.kernel(0, 90, launched=-5)
    t.span(9900, 110, "train_overall#3")
    t.kernel(9910, 90, launched=9905)
    path = t.write(tmp_path / "train_overall_rank0_dp0_tp0_pp0.1713780123.pt.trace.json")
    report = relax_profiling.analyze(path)
    (found,) = report.traces
    b = found.breakdown
    assert (b.span, b.compute, b.idle) == (10_000, 180, 9820)
    assert b.between == pytest.approx(9800, abs=5)
    assert b.idle_in_steps == pytest.approx(20, abs=5)
    assert b.of_steps(b.compute) == pytest.approx(0.9, abs=0.02)
    text, page = to_text(report), to_html(report)
    assert "   idle 0.2%   between steps 98.0%\n" in text
    assert re.search(r"of the steps alone: compute 9\d\.\d%, communication 0.0%, copies 0.0%, idle \d+\.\d%", text)
    assert "between steps <b>98.0%</b>" in page
    assert "of the steps alone: compute 9" in page

    alone = trace_maker()
    alone.kernel(0, 10)
    alone.kernel(40, 10)
    path = alone.write(tmp_path / "train_overall_rank1_dp1_tp0_pp0.1713780123.pt.trace.json")
    text = to_text(relax_profiling.analyze(path))
    assert "   idle 60.0%\n" in text
    assert "between steps" not in text


def test_own_time_of_operators(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.operator(0, 100, "aten::linear")
    t.operator(10, 60, "aten::addmm")
    t.operator(20, 10, "aten::empty")
    t.operator(75, 10, "aten::empty")
    t.operator(0, 50, "aten::copy_", thread=2)
    found = {e.name: (e.calls, e.microseconds) for e in top_operators(load_trace(t.write(tmp_path / "t.json")))}
    assert found == {
        "aten::linear": (1, 30),
        "aten::addmm": (1, 50),
        "aten::empty": (2, 20),
        "aten::copy_": (1, 50),
    }


def test_kernels_are_summed_under_a_readable_name(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.kernel(0, 10, "void at::native::elementwise_kernel<128, 4, at::native::BinaryFunctor<float, int> >(int, char*)")
    t.kernel(10, 20, "void at::native::elementwise_kernel<64, 2, at::native::BinaryFunctor<half, int> >(int, char*)")
    t.kernel(40, 5, "nvjet_sm90_tst_128x64")
    trace = load_trace(t.write(tmp_path / "t.json"))
    found = [(e.name, e.calls, e.microseconds) for e in top_kernels(trace, trace.gpus[0])]
    assert found == [("at::native::elementwise_kernel [BinaryFunctor]", 2, 30), ("nvjet_sm90_tst_128x64", 1, 5)]
    assert short_kernel("(") == "("


@pytest.mark.parametrize(
    ("name", "category", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", COMMUNICATION),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*)", "kernel", COMMUNICATION),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<>",
            "kernel",
            COMMUNICATION,
        ),
        ("nvjet_sm90_tst_128x64", "kernel", COMPUTE),
        ("void at::native::reduce_kernel<512, 1>", "kernel", COMPUTE),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", MEMORY),
        ("Memset (Device)", "gpu_memset", MEMORY),
    ],
)
def test_kinds_of_device_activities(name: str, category: str, kind: int) -> None:
    assert device_kind(name, category) == kind


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[4, 2, 3], [4, 3, 5]], 240),
        ("aten::baddbmm", [[4, 2, 5], [4, 2, 3], [4, 3, 5]], 240),
        ("aten::addmm_", [[2, 5], [2, 3], [3, 5], [], []], 60),
        ("mkldnn::_linear_pointwise", [[2, 4, 3], [5, 3], [], [], [], []], 240),
        ("aten::_grouped_mm", [[7, 3], [4, 3, 5]], 210),
        (
            "aten::_scaled_dot_product_flash_attention",
            [[1, 4, 8, 16], [1, 2, 8, 16], [1, 2, 8, 16]],
            4 * 4 * 8 * 8 * 16,
        ),
        ("aten::linear", [[2, 3], [5, 3]], 0),
        ("aten::mm", [[], []], 0),
        ("aten::mm", "broken", 0),
    ],
)
def test_operations_of_operators(name: str, shapes: Any, flops: float) -> None:
    assert operator_flops(name, shapes) == flops


def test_operations_agree_with_torch() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    with FlopCounterMode(display=False) as counter:
        torch.mm(torch.ones(6, 7), torch.ones(7, 8))
        torch.baddbmm(torch.ones(3, 4, 6), torch.ones(3, 4, 5), torch.ones(3, 5, 6))
    ours = operator_flops("aten::mm", [[6, 7], [7, 8]])
    ours += operator_flops("aten::baddbmm", [[3, 4, 6], [3, 4, 5], [3, 5, 6]])
    assert ours == counter.get_total_flops()
    query, key = [2, 4, 10, 8], [2, 4, 12, 8]
    ours = operator_flops("aten::_scaled_dot_product_flash_attention", [query, key, key])
    assert ours == sdpa_flop_count(tuple(query), tuple(key), tuple(key))


def test_peaks() -> None:
    assert peak_tflops("NVIDIA H200", "c10::BFloat16") == 989
    assert peak_tflops("NVIDIA H100 PCIe", "c10::Half") == 756
    assert peak_tflops("NVIDIA H20", "c10::BFloat16") == 148
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "float") == 156
    assert peak_tflops("NVIDIA A10G", "c10::BFloat16") == 125
    assert peak_tflops("A card of tomorrow", "float") is None
    assert peak_tflops("NVIDIA H200", "long int") is None
    assert peak_tflops(None, "float") is None


def test_a_late_rank_and_a_clock_that_is_ahead(trace_maker: Any, tmp_path: Path) -> None:
    on_time, late = trace_maker(), trace_maker()
    for i in range(4):
        on_time.collective(1000.0 * i, 300)
        late.collective(1000.0 * i + 250, 50)  # starts 250 later, ends with the other
    traces = {
        "rank0": load_trace(on_time.write(tmp_path / "0.json")),
        "rank1": load_trace(late.write(tmp_path / "1.json")),
    }
    waits = rank_waits(traces)
    assert (waits["rank0"].last, waits["rank0"].waits, waits["rank0"].collectives) == (0, 1000, 4)
    assert (waits["rank1"].last, waits["rank1"].waits, waits["rank1"].delays) == (4, 0, 1000)
    # The same ranks on two hosts, the second of which is a minute ahead: found out by the ends of the collectives.
    traces["rank1"].meta["baseTimeNanoseconds"] += 60_000_000_000
    assert clock_offsets(traces) == {"rank0": 0.0, "rank1": pytest.approx(60e6)}
    assert rank_waits(traces)["rank0"].waits == pytest.approx(1000)


def test_groups_of_other_ranks_are_not_compared(trace_maker: Any, tmp_path: Path) -> None:
    a, b = trace_maker(), trace_maker()
    a.collective(0, 10, group="tp of 0 and 1")
    b.collective(0, 10, group="tp of 2 and 3")
    traces = {n: load_trace(t.write(tmp_path / f"{n}.json")) for n, t in (("a", a), ("b", b))}
    assert rank_waits(traces) == {}


def test_stages_of_an_engine(trace_maker: Any, tmp_path: Path) -> None:
    t = trace_maker()
    t.span(0, 100, "step[EXTEND bs=4 toks=512]")
    t.span(10, 80, "step[EXTEND bs=4 toks=512]", on_device=True)
    for i, batch in enumerate((4, 4, 2)):
        t.span(200 + 50 * i, 20, f"step[DECODE bs={batch}]")
        t.span(205 + 50 * i, 30, f"step[DECODE bs={batch}]", on_device=True)
    decode, extend = engine_stages(load_trace(t.write(tmp_path / "t.json")))
    assert (extend.name, extend.steps, extend.batch_mean, extend.tokens_mean, extend.time) == ("EXTEND", 1, 4, 512, 80)
    assert (decode.steps, decode.batch_max, decode.time) == (3, 4, 90)
    assert decode.batch_mean == pytest.approx(10 / 3)


def test_the_recorded_ranks(recorded_run: Path) -> None:
    """HolisticTraceAnalysis 0.5.0 without its rounding to microseconds gives these shares; see benchmarks/."""
    paths = sorted((recorded_run / "train_trace").iterdir())
    traces = {p.name.split("_dp")[0]: load_trace(p) for p in paths}
    shares = {name: device_breakdown(trace, next(iter(trace.gpus.values()))) for name, trace in traces.items()}
    first, second = shares["train_overall_rank0"], shares["train_overall_rank1"]
    assert 100 * first.share("compute") == pytest.approx(3.31, abs=0.01)
    assert 100 * first.share("idle") == pytest.approx(19.74, abs=0.01)
    assert 100 * second.share("compute") == pytest.approx(4.47, abs=0.01)
    assert 100 * second.share("idle") == pytest.approx(95.03, abs=0.01)
    waits = rank_waits(traces)
    assert waits["train_overall_rank1"].last == 6
    assert waits["train_overall_rank0"].waits > 0.9 * first.communication_exposed
    # Rank 1 sleeps 20 ms between its steps.
    assert second.idle_causes["between"] == pytest.approx(20_000, rel=0.05)


def test_clocks_of_ranks_without_a_group_of_all_are_aligned_by_way_of_others(tmp_path: Path, trace_maker: Any) -> None:
    """Two hosts with tensor parallelism inside and data parallelism between: ranks 0 and 3 share no group."""
    clocks = (0.0, 0.0, 5e6, 5e6)
    groups = {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)}
    makers = [trace_maker() for _ in clocks]
    for number, (group, members) in enumerate(groups.items()):
        for rank in members:
            for call in range(3):
                makers[rank].collective(clocks[rank] + 1000 * number + 100 * call, 50, group=group)
    traces = {str(rank): load_trace(t.write(tmp_path / f"{rank}.json")) for rank, t in enumerate(makers)}
    assert clock_offsets(traces) == {"0": 0.0, "1": 0.0, "2": 5e6, "3": 5e6}
    assert all(w.waits == 0 for w in rank_waits(traces).values())


def test_collectives_of_another_device_in_one_file_are_not_this_ones(tmp_path: Path, trace_maker: Any) -> None:
    t = trace_maker()
    for start in (0, 100):
        t.kernel(start, 50)
    t.collective(200, 30)
    t.collective(300, 70)
    t.events[-2]["args"]["device"] = 1
    trace = load_trace(t.write(tmp_path / "t.json"))
    assert [(k.calls, k.time) for k in communication_kinds(trace, trace.gpus[0])] == [(1, 30.0)]
    assert [(k.calls, k.time) for k in communication_kinds(trace, trace.gpus[1])] == [(1, 70.0)]
