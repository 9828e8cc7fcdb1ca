"""Kinds of computation, and the advice on them: on recorded traces of a GPU, and on traces recorded here."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.analysis.work import ATTENTION, COPIES, ELEMENTWISE, KINDS, PRODUCTS, Product, host_work
from relax_profiling.report.build import build_report
from relax_profiling.report.model import Finding, Report
from relax_profiling.report.text import to_text
from relax_profiling.trace.load import load_trace

RANK0 = "train_overall_rank0_dp0_tp0_pp0.1795957371.pt.trace.json"


def of(report: Report, rule: str) -> list[Finding]:
    return [f for f in report.findings if f.rule == rule]


@pytest.fixture
def changed(recorded_run: Path, tmp_path: Path) -> Callable[..., Report]:
    """The report of the recorded trace of a training rank, after ``change`` has seen each of its events."""

    def make(change: Callable[[dict[str, Any]], None] = lambda event: None) -> Report:
        text = gzip.decompress((recorded_run / "train_trace" / (RANK0 + ".gz")).read_bytes())
        data = json.loads(text)
        for event in data["traceEvents"]:
            change(event)
        folder = tmp_path / "train_trace"
        folder.mkdir(exist_ok=True)
        (folder / RANK0).write_text(json.dumps(data))
        return build_report([tmp_path])

    return make


def test_a_recorded_step_is_mostly_unfused(changed: Any) -> None:
    report = changed()
    (trace,) = report.traces
    assert trace.work.share(*KINDS) == pytest.approx(1.0)
    assert 0.15 < trace.work.share(PRODUCTS) < 0.25
    assert 0.02 < trace.work.share(ATTENTION) < 0.06
    kernels = sum(k.microseconds for k in trace.kernels if not k.communication)
    assert sum(trace.work.time.values()) > kernels, "the ten longest are not all"
    (finding,) = of(report, "unfused elementwise work and copies")
    assert "products are 20% and attention 4%" in finding.figure
    assert (
        "elementwise operators 46%, copies 17%: aten::mul in MulBackward0 10% (96 x), aten::copy_ 7%" in finding.figure
    )
    assert finding.flags == ("--profile-with-stack",)
    assert "computation: products 19.6%, attention 3.6%, elementwise 46" in to_text(report)


def test_fused_kernels_are_no_finding(changed: Any) -> None:
    def fuse(event: dict[str, Any]) -> None:
        if event.get("cat") == "kernel" and event["name"].startswith("void at::native"):
            event["name"] = "triton_poi_fused_mul_silu_0"

    report = changed(fuse)
    assert report.traces[0].work.share(ELEMENTWISE, COPIES) < 0.1
    assert of(report, "unfused elementwise work and copies") == []


def test_logits_of_every_position(changed: Any) -> None:
    (finding,) = of(changed(), "logits of every position")
    assert "8192 logits at each of 2048 positions" in finding.figure
    assert "41% of all operations" in finding.figure
    assert "before the output layer" in finding.advice

    def responses_only(event: dict[str, Any]) -> None:
        dims = event.get("args", {}).get("Input Dims")
        if event.get("name") == "aten::mm" and dims[1][1] == 8192:
            event["args"]["Input Dims"] = [[700, dims[0][1]], *dims[1:]]

    assert of(changed(responses_only), "logits of every position") == []


@pytest.mark.parametrize(("total", "expected"), [(150 << 30, 1), (500 << 20, 0)])
def test_recomputation_while_memory_is_free(changed: Any, total: int, expected: int) -> None:
    """The recorded loop recomputes nothing: its backward passes of one kind are named like those of checkpoints."""

    def recompute(event: dict[str, Any]) -> None:
        if event.get("name") == "AddBackward0":
            event["name"] = "CheckpointFunctionBackward"
        if event.get("name") == "[memory]":
            event["args"]["Total Allocated"] = min(event["args"].get("Total Allocated", 0), 480 << 20)

    report = changed()
    assert of(report, "recomputation while memory is free") == []
    report = changed(recompute)
    # The device's size stands in the head of the file.
    (path,) = (Path(report.traces[0].file).parent).iterdir()
    data = json.loads(path.read_text())
    data["deviceProperties"][0]["totalGlobalMem"] = total
    path.write_text(json.dumps(data))
    found = of(build_report([path]), "recomputation while memory is free")
    assert len(found) == expected
    for finding in found:
        assert "--recompute-granularity" in finding.flags
        assert "0.4 of 150.0 GiB" in finding.figure


@pytest.mark.parametrize(("elementwise", "expected"), [(100.0, 1), (5.0, 0)])
def test_far_below_the_matrix_products(trace_maker: Any, tmp_path: Path, elementwise: float, expected: int) -> None:
    t = trace_maker(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for i in range(60):
        at = 400.0 * i
        # 2 * 4096^3 operations in 180 us: 764 TFLOP/s.
        types = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
        t.operator(at - 20, 10, "aten::mm", **types)
        t.kernel(at, 180, "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", launched=at - 15)
        for part in range(2):
            t.operator(at - 8 + 4 * part, 3, "aten::mul")
            t.kernel(
                at + 181 + part * elementwise,
                elementwise - 1,
                "void at::native::vectorized_elementwise_kernel<4, MulFunctor>",
                launched=at - 7 + 4 * part,
            )
        for filler in range(0 if expected else 1):  # otherwise the device works on products
            t.kernel(at + 195, 180 + filler, "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", launched=at)
            t.operator(at - 1, 2, "aten::mm", **types)
    t.write(tmp_path / f"train_trace/{RANK0}")
    report = build_report([tmp_path])
    found = of(report, "far below the matrix products")
    assert len(found) == expected
    for finding in found:
        assert "bfloat16 products on this device reach 778" in finding.figure
    work = report.traces[0].work
    assert work is not None
    assert work.fastest_tflops == pytest.approx(2 * 4096**3 / 180e-6 / 1e12, rel=0.02)


@pytest.mark.parametrize(("batch", "steps", "expected"), [(2, 20, 1), (16, 20, 0), (2, 5, 0)])
def test_small_prefill_batches(trace_maker: Any, tmp_path: Path, batch: int, steps: int, expected: int) -> None:
    t = trace_maker()
    for i in range(steps):
        t.span(1000.0 * i, 400, f"step[EXTEND bs={batch} toks={40 * batch}]")
        t.span(1000.0 * i + 500, 400, "step[DECODE bs=200]")
        t.kernel(1000.0 * i, 300)
    t.write(tmp_path / "sglang_trace/rollout_2/engine0-1713780123-TP-0.trace.json")
    found = of(build_report([tmp_path]), "small prefill batches")
    assert len(found) == expected
    for finding in found:
        assert "20 prefill steps of 2.0 sequences and 80 tokens" in finding.figure
        assert "50% of the engine's steps" in finding.figure


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::addmm_", [[4, 9], [4, 6], [6, 9], [], []]),
        ("mkldnn::_linear_pointwise", [[4, 6], [9, 6], [], [], [], []]),
    ],
)
def test_the_trainers_products_on_a_cpu_are_products(
    trace_maker: Any, tmp_path: Path, name: str, shapes: list[list[int]]
) -> None:
    t = trace_maker()
    t.operator(0, 90, name, **{"Input Dims": shapes})
    t.operator(100, 10, "aten::add")
    work = host_work(load_trace(t.write(tmp_path / "trace.json")))
    assert (work.time[PRODUCTS], work.time[ELEMENTWISE]) == (90, 10)
    assert work.largest == Product(rows=4, inner=6, columns=9, calls=1, flops=2 * 4 * 6 * 9)


def swiglu(x: Any, gate: Any, up: Any) -> Any:
    return (x @ gate).sigmoid() * (x @ up)


def test_a_recorded_loop_on_a_cpu_names_its_lines(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile
    from torch.utils.checkpoint import checkpoint

    embedding = torch.nn.Embedding(1000, 64)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    head = torch.nn.Linear(64, 1000, bias=False)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as profiler:
        for length in (50, 80):
            hidden = checkpoint(swiglu, embedding(torch.arange(length)), *weights, use_reentrant=True)
            head(hidden).float().logsumexp(-1).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    work = host_work(load_trace(tmp_path / "trace.json"))
    assert work.share(*KINDS) == pytest.approx(1.0)
    assert work.time[PRODUCTS] > 0
    assert work.recomputed == 2
    assert work.tokens == 80
    assert work.largest is not None
    assert (work.largest.rows, work.largest.inner, work.largest.columns) == (80, 64, 1000)
    assert work.largest.flops >= 2 * 130 * 64 * 1000
    lines = {c.line for c in work.causes if c.operator in ("aten::mul", "aten::sigmoid")}
    assert any(line.endswith(": swiglu") and "test_profiling_work.py(" in line for line in lines), lines
