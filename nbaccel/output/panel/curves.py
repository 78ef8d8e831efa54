"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick one.

A chart is one SVG element, or one image, readable on light and dark backgrounds. No style sheet, no
script and no ids: several charts of a page cannot disturb each other, and a saved notebook shows
them without a kernel. Axes have the colour of the text around the chart; lines differ in width and
dash pattern, not in colour alone.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nbaccel.base.training_metrics import MetricHistory, Point
from nbaccel.base.units import format_number
from nbaccel.output.panel.facts import mean
from nbaccel.output.panel.words import plain_text

Mark = tuple[float, str]
"""A place on an axis, and its label."""


class ChartLine(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    """At least one, by ascending x. A y that is not finite interrupts the line."""
    is_thick: bool = False
    """Others are thin, each with its own dashes."""


ACCENT_COLOUR = "#1e88e5"
"""At least 3.6:1 against white and 5:1 against the dark themes' backgrounds."""
_IMAGE_GREY = "#787878"
"""An image does not know the colour of the text around it: 4.4:1 against white, 4.3:1 against
JupyterLab's dark background."""
_WIDTH, _HEIGHT = 480, 160
_MOST_TICKS = 6  # more would touch each other
_CHAR_WIDTH = 6.2  # of a digit in 11 px, in px
_DASHES = ("7 2 1 2", "", "4 2", "1 2", "2 4")  # the first one is mostly a thick line's
_FAINT = 'stroke="currentColor" stroke-opacity='


def is_drawn(value: float) -> bool:
    """Whether a value is a number; differences of larger ones may be infinite."""
    return abs(value) < 1e250


def chart_of(given: Sequence[ChartLine], name: str, *, as_image: bool = False) -> str:
    """Lines over the steps of a training; the first one is told of, and covers the others."""
    lines = []
    for line in given:
        # Of many points the lowest and the highest of each stretch.
        history = MetricHistory(_MOST_STRETCHES)
        for step, value in line.points:
            if is_drawn(step):
                history.add(value, step)
        if points := history.points():
            lines.append(line._replace(points=points))
    if not lines:
        return ""
    ends = [lines[0].points[0], lines[0].points[-1]]
    first, last = (f"{format_number(y)} at step {format_number(x)}" for x, y in ends)
    spoken = f"{plain_text(name, _NAME_CHARS)}: from {first} to {last}"
    curves = [[(x, y if is_drawn(y) else math.nan) for x, y in one.points] for one in lines]
    heights = [y for curve in curves for _, y in curve if not math.isnan(y)]
    if not heights:
        return _svg(spoken, _text(_WIDTH / 2, _HEIGHT / 2, "no numbers", "middle"), as_image)
    y_axis = _Axis(heights, _HEIGHT - 20, 18 if len(lines) > 1 else 6)
    y_ticks = _ticks(y_axis)
    left = 10 + _CHAR_WIDTH * max((len(label) for _, label in y_ticks), default=0)
    steps = [x for curve in curves for x, _ in curve]
    x_axis = _Axis(steps, left, _WIDTH - 8)
    looks = [_look(line, number) for number, line in enumerate(lines)]
    elements = [*_axes(x_axis, y_axis, y_ticks)]
    for curve, look in reversed([*zip(curves, looks, strict=True)]):
        elements += _line(x_axis, y_axis, curve, look)
    if len(lines) > 1:
        elements += _legend(x_axis, [line.name for line in lines], looks)
    return _svg(spoken, "".join(elements), as_image)


class _Axis:
    """An axis from one place to another, in pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.start = start
        self.end = end
        low, high = min(values), max(values)
        # A constant lies in the middle.
        is_constant = high - low <= 1e-9 * max(abs(low), abs(high))
        margin = (abs(low) / 10 or 1.0) if is_constant else (high - low) * 0.04
        self.low = low - margin
        self.high = high + margin

    def at(self, value: float) -> float:
        """Where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def _ticks(axis: _Axis) -> list[Mark]:
    """Places on an axis, and what they are labelled."""
    least_step = (axis.high - axis.low) / _MOST_TICKS * 0.999
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step)
    numbers = range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)
    # Ten digits: 3 times 0.1 is 0.30000000000000004.
    return [(step * i, f"{step * i:,.10g}".replace("e-0", "e-")) for i in numbers]


def _axes(x_axis: _Axis, y_axis: _Axis, y_ticks: Iterable[Mark]) -> Iterable[str]:
    for tick, label in y_ticks:
        y = y_axis.at(tick)
        yield _path([(x_axis.start, y), (x_axis.end, y)], f'{_FAINT}"0.15"')
        yield _text(x_axis.start - 5, y + 4, label, "end")
    yield _path([(x_axis.start, y_axis.start), (x_axis.end, y_axis.start)], f'{_FAINT}"0.4"')
    yield _text(x_axis.end, y_axis.start + 15, "step", "end")
    for tick, label in _ticks(x_axis):
        x = x_axis.at(tick)
        if x + _CHAR_WIDTH * len(label) / 2 < x_axis.end - 36:  # where "step" stands
            yield _text(x, y_axis.start + 15, label, "middle")


def _line(x_axis: _Axis, y_axis: _Axis, curve: Iterable[Point], look: str) -> Iterable[str]:
    """Its stretches of numbers, and a cross where there is none."""
    for is_gap, group in itertools.groupby(curve, lambda point: math.isnan(point[1])):
        places = [(x_axis.at(x), y_axis.at(y)) for x, y in group]
        if is_gap:
            yield from (_text(x, y_axis.start - 3, "\u00d7", "middle") for x, _ in places)
        else:
            yield _path(places, look)


def _legend(x_axis: _Axis, names: Sequence[str], looks: Sequence[str]) -> Iterable[str]:
    """A row that names the first few lines, and says how many more there are."""
    x = x_axis.start
    for number, (name, look) in enumerate(zip(names, looks, strict=True)):
        if number == 4 or x + 100 + _CHAR_WIDTH * len(name) > x_axis.end:
            yield _text(x, 12, f"and {len(names) - number} more")
            return
        yield _path([(x, 8), (x + 18, 8)], look)
        yield _text(x + 23, 12, name)
        x += 37 + _CHAR_WIDTH * len(name)


def _look(line: ChartLine, number: int) -> str:
    dashes = _DASHES[number % len(_DASHES)]
    thin = f'stroke-width="1" stroke-opacity="0.7" stroke-dasharray="{dashes}"'
    return f'stroke="{ACCENT_COLOUR}" ' + ('stroke-width="2.2"' if line.is_thick else thin)


def _path(points: Iterable[tuple[float, float]], look: str) -> str:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    # The last bit shows a point that is alone: a line without a length, drawn as its round ends.
    return f'<path d="M{way}h0" fill="none" {look}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(spoken: str, drawn: str, as_image: bool) -> str:
    said = html.escape(spoken)
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    style = 'style="max-width:100%;height:auto"'
    look = f'{style} fill-opacity="0.75"'
    if as_image:  # its labels are grey, and need no opacity
        look = f'xmlns="http://www.w3.org/2000/svg" color="{_IMAGE_GREY}"'
    svg = (
        f'<svg role="img" aria-label="{said}" {size} {look} viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'fill="currentColor" stroke-linejoin="round" stroke-linecap="round" '
        f'font-family="system-ui, sans-serif" font-size="11"><title>{said}</title>{drawn}</svg>'
    )
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{said}" {size} {style}>'
    return image if as_image else svg


Curves = Mapping[int, Sequence[Point]]
"""Rank → the points of a metric."""

_MAX_RANK_LINES = 16
_MEAN_POINTS = 120
_MOST_STRETCHES = 120
_NAME_CHARS = 40
SPARK_CHARS = 20
_SPARK_BLOCKS = "▁▂▃▄▅▆▇█"


def metric_chart(curves: Curves, name: str, *, as_image: bool = False) -> str:
    """A metric over the steps; empty where there is less than a line."""
    if max(map(len, curves.values()), default=0) < 2:
        return ""
    return chart_of(metric_lines(curves), name, as_image=as_image)


def metric_lines(curves: Curves) -> list[ChartLine]:
    """The lines of one metric's chart: the mean thick, and each rank."""
    ranks = [
        ChartLine(f"rank {rank}", points)
        for rank, points in itertools.islice(curves.items(), _MAX_RANK_LINES)
    ]
    if len(ranks) == 1:
        return [ranks[0]._replace(is_thick=True)]
    points = mean_points(curves.values())
    return [ChartLine("mean of ranks", points, is_thick=True), *ranks] if points else ranks


def mean_points(curves: Iterable[Sequence[Point]]) -> list[Point]:
    """The mean of all ranks over the steps."""
    finite = [[point for point in points if math.isfinite(point[1])] for points in curves]
    # Only finite ones: else there would be more groups than steps, and a rank's alone in some.
    longest = max(map(len, finite), default=0)
    means = []
    for group in _groups(sorted(itertools.chain(*finite)), min(longest, _MEAN_POINTS)):
        step = math.fsum(step for step, _ in group) / len(group)
        means.append((step, math.fsum(value / len(group) for _, value in group)))
    return means


def _groups(items: Sequence[Any], num_groups: int) -> list[Sequence[Any]]:
    """So many stretches of about the same length, one after the other."""
    edges = [place * len(items) // num_groups for place in range(num_groups + 1) if num_groups]
    return [items[first:last] for first, last in itertools.pairwise(edges)]


def sparkline(values: Sequence[float]) -> str:
    """A curve in block characters, over all of the values."""
    # `mean` lets a value that is not finite win, so that the curve shows it.
    points = [mean(group) or 0.0 for group in _groups(values, min(len(values), SPARK_CHARS))]
    heights = [value if is_drawn(value) else math.nan for value in points]
    drawn = [height for height in heights if not math.isnan(height)]
    low = min(drawn, default=0.0)
    highest = max(drawn, default=0.0) - low
    shares = [(height - low) / highest if highest else 0.4 for height in heights]
    return "".join(
        "!" if math.isnan(height) else _SPARK_BLOCKS[min(int(8 * share), 7)]
        for height, share in zip(heights, shares, strict=True)
    )
