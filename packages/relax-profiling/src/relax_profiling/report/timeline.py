"""Allocated memory over time, as an SVG picture."""

from relax_profiling.report.style import text
from relax_profiling.report.text import size
from relax_profiling.snapshot.analyse import DeviceMemory

WIDTH, HEIGHT, _TOP = 1000, 220, 8
_THIN = 'vector-effect="non-scaling-stroke"'
_COLUMNS = 900


def downsample(times: list[float], values: list[int], columns: int = _COLUMNS) -> list[tuple[float, int]]:
    """At most two points a column, its lowest and highest, so that no peak is lost."""
    if len(times) <= 2 * columns:
        return list(zip(times, values, strict=True))
    span = (times[-1] - times[0]) or 1.0
    points: list[tuple[float, int]] = []
    i = 0
    for column in range(columns):
        end = times[0] + span * (column + 1) / columns
        begin = i
        while i < len(times) and (times[i] <= end or column == columns - 1):
            i += 1
        if begin < i:
            low = min(range(begin, i), key=values.__getitem__)
            high = max(range(begin, i), key=values.__getitem__)
            points += [(times[k], values[k]) for k in sorted({low, high})]
    return points


def timeline(device: DeviceMemory) -> str:
    """The curve with its peak marked, as wide as the page allows; empty when nothing was recorded over time.

    The picture is stretched to its place, so the labels stand beside it as text.
    """
    if not device.curve:
        return ""
    points = downsample(device.times, device.curve)
    last = device.times[-1] or 1.0
    top = max(device.peak, 1)

    def x(time: float) -> float:
        return WIDTH * time / last

    def y(value: float) -> float:
        return HEIGHT - (HEIGHT - _TOP) * value / top

    path = [f"M{x(points[0][0]):.1f},{HEIGHT}"]
    before = 0
    for time, value in points:
        path.append(f"L{x(time):.1f},{y(before):.1f}L{x(time):.1f},{y(value):.1f}")
        before = value
    path.append(f"L{WIDTH},{y(before):.1f}L{WIDTH},{HEIGHT}Z")
    lines = "".join(
        f'<line x1="0" x2="{WIDTH}" y1="{y(top * part):.1f}" y2="{y(top * part):.1f}" stroke="var(--line)" {_THIN}/>'
        for part in (0.25, 0.5, 0.75, 1.0)
    )
    at = x(min(device.peak_time, last))
    peak = (
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT}" stroke="var(--warn)" stroke-dasharray="4 3" {_THIN}/>'
    )
    label = f"allocated memory of GPU {device.device} over time, peak {size(device.peak)} at {device.peak_time:.3f} s"
    levels = "".join(f"<span>{text(size(top * part))}</span>" for part in (1.0, 0.75, 0.5, 0.25, 0.0))
    times = "".join(f"<span>{last * part:.2f} s</span>" for part in (0.0, 0.5, 1.0))
    return (
        f'<div class="timeline"><div class="levels">{levels}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{text(label)}">{lines}'
        f'<path d="{"".join(path)}" fill="var(--compute)" fill-opacity=".35" stroke="var(--compute)" {_THIN}/>{peak}'
        f'</svg><div class="times">{times}</div></div>'
    )
