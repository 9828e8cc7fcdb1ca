"""Allocated memory over time, as an SVG picture."""

from relax_profiling.report.style import text
from relax_profiling.report.text import size
from relax_profiling.snapshot.analyse import DeviceMemory

WIDTH, HEIGHT, _LEFT, _BOTTOM, _TOP = 1000, 260, 70, 24, 10
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


def timeline_svg(device: DeviceMemory) -> str:
    """The curve with its peak and its out-of-memory errors marked; empty when nothing was recorded over time."""
    if not device.curve:
        return ""
    points = downsample(device.times, device.curve)
    last = device.times[-1] or 1.0
    top = max(device.peak, 1)

    def x(time: float) -> float:
        return _LEFT + (WIDTH - _LEFT - 10) * time / last

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _BOTTOM - _TOP) * value / top

    path = [f"M{x(points[0][0]):.1f},{y(0):.1f}"]
    before = 0
    for time, value in points:
        path.append(f"L{x(time):.1f},{y(before):.1f}L{x(time):.1f},{y(value):.1f}")
        before = value
    path.append(f"L{x(last):.1f},{y(before):.1f}L{x(last):.1f},{y(0):.1f}Z")
    marks = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = y(top * part)
        marks.append(f'<line x1="{_LEFT}" x2="{WIDTH - 10}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text(size(top * part))}</text>')
        seconds = last * part
        anchor = "end" if part == 1.0 else "middle" if part else "start"
        marks.append(f'<text x="{x(seconds):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{seconds:.2f} s</text>')
    peak = f'<circle cx="{x(min(device.peak_time, last)):.1f}" cy="{y(device.peak):.1f}" r="4" fill="var(--warn)"/>'
    label = f"allocated memory of GPU {device.device} over time, peak {size(device.peak)}"
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(label)}" '
        f'style="min-width:560px">{"".join(marks)}'
        f'<path d="{"".join(path)}" fill="var(--compute)" fill-opacity=".35" stroke="var(--compute)"/>'
        f"{peak}</svg></div>"
    )
