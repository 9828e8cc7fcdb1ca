"""Floating-point operations of operators from their recorded shapes, and the peaks of GPUs.

The formulas are those of torch's own counter (``torch.utils.flop_counter``): a multiply and an add are two operations;
attention is counted without the saving of a causal mask.
"""

import math
import re
from typing import Any

Shape = list[int]


def operator_flops(name: str, shapes: Any) -> float:
    """Operations of one call; 0 for operators that are not counted.

    Only the innermost operators count (``aten::mm``, not the ``aten::linear`` around it).

    Args:
        shapes: "Input Dims" of the event: one list of sizes an argument, empty for what is no tensor.
    """
    count = _COUNTERS.get(name)
    if count is None:
        return 0.0
    try:
        return float(count(shapes))
    except (LookupError, TypeError, ValueError, OverflowError):
        return 0.0


def _mm(shapes: list[Shape]) -> float:
    (m, k), (_k, n) = shapes[0], shapes[1]
    return 2.0 * m * k * n


def _addmm(shapes: list[Shape]) -> float:
    return _mm(shapes[1:])


def _linear(shapes: list[Shape]) -> float:
    """Input [..., k] and weight [n, k], as oneDNN takes them."""
    *rows, k = shapes[0]
    n, _k = shapes[1]
    return 2.0 * math.prod(rows) * k * n


def _bmm(shapes: list[Shape]) -> float:
    (b, m, k), (_b, _k, n) = shapes[0], shapes[1]
    return 2.0 * b * m * k * n


def _baddbmm(shapes: list[Shape]) -> float:
    return _bmm(shapes[1:])


def _attention(shapes: list[Shape]) -> float:
    """Query [b, h, s, d] and key [b, h_kv, t, d]: two products of 2*b*h*s*t*d."""
    (b, h, s, d), (_b, _h, t, _d) = shapes[0], shapes[1]
    return 4.0 * b * h * s * t * d


def _attention_backward(shapes: list[Shape]) -> float:
    """Five products instead of two; the first argument is the gradient, shaped like the query."""
    return _attention(shapes[1:]) * 2.5


def _grouped_mm(shapes: list[Shape]) -> float:
    """Tokens [m, k] against experts [e, k, n]: every token meets one expert."""
    (m, k), (_e, _k, n) = shapes[0], shapes[1]
    return 2.0 * m * k * n


_COUNTERS = {
    "aten::mm": _mm,
    "aten::addmm": _addmm,
    "aten::addmm_": _addmm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _baddbmm,
    "aten::baddbmm_": _baddbmm,
    "mkldnn::_linear_pointwise": _linear,
    "aten::_scaled_mm": _mm,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward,
}

COUNTED = frozenset(_COUNTERS)
"""The operators whose operations are counted."""

SHAPED = COUNTED | {"aten::embedding"}
"""The operators whose shapes are read: an embedding says how many tokens a micro-batch has."""

# Dense peaks in TFLOP/s (no sparsity), from the makers' data sheets: 16-bit with float32 accumulation, float32 on
# tensor cores (TF32) where there is one, and 8-bit float.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"GB?200|GB?300|B300", {"16": 2250.0, "32": 1125.0, "8": 4500.0}),
    (r"B200", {"16": 2250.0, "32": 1125.0, "8": 4500.0}),
    (r"H100.*(PCIe)", {"16": 756.0, "32": 378.0, "8": 1513.0}),
    (r"H100.*NVL", {"16": 835.0, "32": 418.0, "8": 1671.0}),
    (r"H[128]00|GH200", {"16": 989.0, "32": 494.0, "8": 1979.0}),
    (r"H20\b", {"16": 148.0, "32": 74.0, "8": 296.0}),
    (r"A[18]00", {"16": 312.0, "32": 156.0}),
    (r"L40S", {"16": 362.0, "32": 183.0, "8": 733.0}),
    (r"L40\b", {"16": 181.0, "32": 90.5, "8": 362.0}),
    (r"L4\b", {"16": 121.0, "32": 60.0, "8": 242.0}),
    (r"A10G?\b", {"16": 125.0, "32": 62.5}),
    (r"A30\b", {"16": 165.0, "32": 82.0}),
    (r"A40\b", {"16": 149.7, "32": 74.8}),
    (r"RTX 6000 Ada", {"16": 364.0, "32": 182.0, "8": 728.0}),
    (r"RTX 4090", {"16": 165.0, "32": 82.6, "8": 330.0}),
    (r"RTX 3090", {"16": 71.0, "32": 35.6}),
    (r"V100", {"16": 125.0, "32": 15.7}),
    (r"T4\b", {"16": 65.0, "32": 8.1}),
    (r"MI300X", {"16": 1307.0, "32": 653.0, "8": 2614.0}),
    (r"MI250X", {"16": 383.0, "32": 95.7}),
)


def peak_tflops(gpu: str | None, dtype: str) -> float | None:
    """The dense peak of a GPU for an element type as the profiler writes it (``c10::BFloat16``, ``float``, ...).

    None for a GPU that is not in the table or a type without a known peak.
    """
    if gpu is None:
        return None
    if "Half" in dtype or "BFloat16" in dtype:
        bits = "16"
    elif "Float8" in dtype:
        bits = "8"
    elif dtype == "float":
        bits = "32"
    else:
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, gpu):
            return peaks.get(bits)
    return None


# Of the dense 16-bit peak, what large matrix products reach on real cards, whose clock falls under load: 778 of 989
# TFLOP/s were measured on an H200.
_REACHED = 0.787


def reachable_tflops(gpu: str | None) -> float | None:
    """TFLOP/s of large bfloat16 products on a GPU, about; None for one that is not in the table of peaks."""
    peak = peak_tflops(gpu, "c10::BFloat16")
    return None if peak is None else _REACHED * peak
