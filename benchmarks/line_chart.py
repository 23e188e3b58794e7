"""A line chart with two logarithmic axes, as SVG text; no drawing library is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 90, 200, 50, 60  # margins; the lines' names stand in the right one
COLOURS = ("#1f5fbf", "#c0392b", "#1e8449", "#8e44ad", "#b9770e", "#117a8b")
LABEL_DISTANCE = 17.0

Points = Sequence[tuple[float, float]]


class _Axis:
    """Maps the logarithm of a value onto pixels."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low = math.log(low)
        self._span = math.log(high) - self._low or 1.0  # a single value stands at the start
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        return self._start + (math.log(value) - self._low) / self._span * (self._end - self._start)


def _text(x: float, y: float, text: str, anchor: str = "middle", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def _spread(wanted: Sequence[float]) -> list[float]:
    """Heights near the wanted ones, in their order, that leave room for a line of text each."""
    placed = [0.0] * len(wanted)
    floor = -math.inf
    for index in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        floor = placed[index] = max(wanted[index], floor + LABEL_DISTANCE)
    return placed


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Points]) -> str:
    """Draws one labelled line a series. All values must be above 0, and each series have a point.

    The x axis is marked at the points' own values, the y axis at powers of ten.
    """
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    x_axis = _Axis(xs[0], xs[-1], LEFT, WIDTH - RIGHT)
    y_axis = _Axis(10.0**low, 10.0**high, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 22, title, "start", 'font-size="15" font-weight="bold"'),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 15, x_label),
        _text(0, 0, y_label, extra=f'transform="translate(22 {(TOP + HEIGHT - BOTTOM) / 2:.1f}) rotate(-90)"'),
    ]
    for x in xs:
        at = x_axis.at(x)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, f"{x:,.0f}"))
    for exponent in range(low, high + 1):
        at = y_axis.at(10.0**exponent)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#c8c8c8"/>')
        parts.append(_text(LEFT - 8, at + 4, f"{10.0**exponent:,g}", "end"))
    heights = _spread([y_axis.at(points[-1][1]) for points in series.values()])
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(_text(WIDTH - RIGHT + 10, heights[index] + 4, name, "start", f'style="fill:{colour}"'))
    return "\n".join([*parts, "</svg>"]) + "\n"
