"""Prefill and decode of an engine: how many steps, how large the batches, how long."""

import dataclasses
import re

from relax_profiling.trace.load import Trace

_STEP = re.compile(r"^step\[(\w+)(?:\s+bs=(\d{1,9})\b)?(?:\s+toks=(\d{1,12})\b)?")


@dataclasses.dataclass(frozen=True)
class Stage:
    """The forward steps of one kind, ``EXTEND`` (prefill) or ``DECODE``.

    Times in microseconds: ``time`` on the device where it was recorded, else on the host.
    """

    name: str
    steps: int
    batch_mean: float
    batch_max: int
    tokens_mean: float
    time: float


def engine_stages(trace: Trace) -> list[Stage]:
    """The stages of an engine's trace, from the marks that SGLang puts around its forward steps."""
    host: dict[str, list[tuple[int, int, float]]] = {}
    device: dict[str, float] = {}
    for span in trace.spans:
        found = _STEP.match(span.name)
        if found is None:
            continue
        name = found.group(1)
        if span.on_device:
            device[name] = device.get(name, 0.0) + (span.end - span.start)
        else:
            batch = int(found.group(2) or 0)
            host.setdefault(name, []).append((batch, int(found.group(3) or batch), span.end - span.start))
    stages = []
    for name, steps in sorted(host.items()):
        batches = [b for b, _, _ in steps]
        stages.append(
            Stage(
                name,
                len(steps),
                sum(batches) / len(steps),
                max(batches),
                sum(t for _, t, _ in steps) / len(steps),
                device.get(name, sum(d for _, _, d in steps)),
            )
        )
    return stages
