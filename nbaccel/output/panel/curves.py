"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick one.

A chart is one SVG element, or one image, without style sheet, script and ids: several charts of a
page cannot disturb each other, and a saved notebook shows them without a kernel. Lines differ in
width and dash pattern, not in colour alone.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nbaccel.base.training_metrics import MetricHistory, Point
from nbaccel.base.units import format_number, plain_text
from nbaccel.output.panel.facts import mean

Mark = tuple[float, str]  # a place on an axis, and its label


class ChartLine(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]  # by ascending x; a y that is not finite interrupts the line
    is_thick: bool = False  # others are thin, each with its own dashes


ACCENT_COLOUR = "#1e88e5"  # at least 3.6:1 against white, 5:1 against dark themes
_IMAGE_GREY = "#787878"  # without the text's colour: 4.4:1 on white, 4.3:1 on JupyterLab's dark
_WIDTH, _HEIGHT = 480, 160
_MOST_TICKS = 6  # more would touch each other
_CHAR_WIDTH = 6.2  # of a digit in 11 px, in px
_DASHES = ("7 2 1 2", "", "4 2", "1 2", "2 4")  # the first one is mostly a thick line's
_FAINT = 'stroke="currentColor" stroke-opacity='


def is_drawn(value: float) -> bool:
    """Whether a value is a number; differences of larger ones may be infinite."""
    return abs(value) < 1e250


def line_chart(
    lines: Sequence[ChartLine], title: str, marks: Sequence[Mark], *, log_y: bool, as_image: bool
) -> str:
    """Draw lines over the steps of a training; the first one is told of, and covers the others."""
    ends = [lines[0].points[0], lines[0].points[-1]]
    first, last = (f"{format_number(y)} at step {format_number(x)}" for x, y in ends)
    spoken = f"{title}: from {first} to {last}"
    scale = math.log10 if log_y else float
    curves = [
        [(x, scale(y) if is_drawn(y) and (y > 0 or not log_y) else math.nan) for x, y in one.points]
        for one in lines
    ]
    heights = [y for curve in curves for _, y in curve if not math.isnan(y)]
    if not heights:
        return _svg(spoken, _text(_WIDTH / 2, _HEIGHT / 2, "no numbers", "middle"), as_image)
    top = (18 if len(lines) > 1 else 6) + (12 if marks else 0)
    y_axis = _Axis(heights, _HEIGHT - 20, top)
    y_ticks = _log_ticks(y_axis) if log_y else _linear_ticks(y_axis)
    left = 10 + _CHAR_WIDTH * max((len(label) for _, label in y_ticks), default=0)
    steps = [x for curve in curves for x, _ in curve]
    x_axis = _Axis(steps, left, _WIDTH - 8)
    marks = [mark for mark in marks if min(steps) <= mark[0] <= max(steps)]
    looks = [_look(line, number) for number, line in enumerate(lines)]
    elements = [*_axes(x_axis, y_axis, y_ticks), *_marks(x_axis, y_axis, marks)]
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


def _linear_ticks(axis: _Axis) -> list[Mark]:
    least_step = (axis.high - axis.low) / _MOST_TICKS * 0.999
    power = 10.0 ** math.floor(math.log10(least_step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step)
    numbers = range(math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9) + 1)
    # Ten digits: 3 times 0.1 is 0.30000000000000004.
    return [(step * i, f"{step * i:,.10g}".replace("e-0", "e-")) for i in numbers]


def _log_ticks(axis: _Axis) -> list[Mark]:
    """Powers of ten, with 2 and 5 between them where there is room, or fewer."""
    decades = range(math.floor(axis.low), math.floor(axis.high) + 1)
    ticks = [decade + math.log10(factor) for decade in decades for factor in (1, 2, 5)]
    ticks = [tick for tick in ticks if axis.low <= tick <= axis.high]
    if len(ticks) > _MOST_TICKS:
        stride = math.ceil((axis.high - axis.low) / _MOST_TICKS)
        ticks = [tick for tick in ticks if tick % stride == 0]
    return [(tick, format_number(10.0**tick)) for tick in ticks]


def _axes(x_axis: _Axis, y_axis: _Axis, y_ticks: Iterable[Mark]) -> Iterable[str]:
    for tick, label in y_ticks:
        y = y_axis.at(tick)
        yield _path([(x_axis.start, y), (x_axis.end, y)], f'{_FAINT}"0.15"')
        yield _text(x_axis.start - 5, y + 4, label, "end")
    yield _path([(x_axis.start, y_axis.start), (x_axis.end, y_axis.start)], f'{_FAINT}"0.4"')
    yield _text(x_axis.end, y_axis.start + 15, "step", "end")
    for tick, label in _linear_ticks(x_axis):
        x = x_axis.at(tick)
        if x + _CHAR_WIDTH * len(label) / 2 < x_axis.end - 36:  # where "step" stands
            yield _text(x, y_axis.start + 15, label, "middle")


def _marks(x_axis: _Axis, y_axis: _Axis, marks: Iterable[Mark]) -> Iterable[str]:
    """Dashed lines; those whose text would lie on another's have none."""
    free_from = x_axis.start - 1
    for step, text in marks:
        x = x_axis.at(step)
        look = f'{_FAINT}"0.3" stroke-dasharray="2 3"'
        yield _path([(x, y_axis.end - 12), (x, y_axis.start)], look)
        text_end = x + _CHAR_WIDTH * len(text) + 8
        if x >= free_from and text_end <= _WIDTH:
            yield _text(x + 3, y_axis.end - 4, text)
            free_from = text_end


def _line(x_axis: _Axis, y_axis: _Axis, curve: Iterable[Point], look: str) -> Iterable[str]:
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


Curves = Mapping[int, Sequence[Point]]  # rank → the points of a metric

_LOGARITHMIC_RATIO = 8.0  # of highest to lowest
_MAX_RANK_LINES = 16
_MIN_SMOOTHED_POINTS = 8
_SMOOTHED_REACH = 10  # points on either side
_NOISY_SHARE = 0.25  # of the steps that go against the one before
_MEAN_POINTS = 120
_MOST_STRETCHES = 120
_MAX_MARKS = 8
_NAME_CHARS = 40
SPARK_CHARS = 20
_SPARK_BLOCKS = "▁▂▃▄▅▆▇█"


def metric_chart(curves: Curves, name: str, marks: Sequence[Mark] = (), **form: Any) -> str:
    """A metric over the steps; empty where there is less than a line."""
    if max(map(len, curves.values()), default=0) < 2:
        return ""
    return chart_of(metric_lines(curves), name, marks, **form)


def chart_of(
    lines: Sequence[ChartLine],
    name: str,
    marks: Sequence[Mark] = (),
    *,
    log_y: bool | None = None,
    as_image: bool = False,
) -> str:
    """Lines as a chart, on the axis that shows more unless it is said which."""
    thinned = []
    for line in lines:
        # Of many points the lowest and the highest of each stretch.
        history = MetricHistory(_MOST_STRETCHES)
        for step, value in line.points:
            if is_drawn(step):
                history.add(value, step)
        if points := history.points():
            thinned.append(line._replace(points=points))
    lines = thinned
    if not lines:
        return ""
    if log_y is None:
        log_y = is_logarithmic(y for line in lines for _, y in line.points)
    stride = math.ceil(len(marks) / _MAX_MARKS) or 1
    marks = [(step, plain_text(text, _NAME_CHARS)) for step, text in marks[::stride]]
    return line_chart(lines, plain_text(name, _NAME_CHARS), marks, log_y=log_y, as_image=as_image)


def is_logarithmic(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows more: a loss falls fast, and then is a flat line."""
    values = [value for value in values if is_drawn(value)]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if low <= 0 or high / _LOGARITHMIC_RATIO < low:
        return False
    # Not for a learning rate that falls evenly to nearly nothing: whichever scale has as many
    # values above its middle as below shows more of them.
    median = statistics.median(values)
    place = (median - low) / (high - low)
    log_place = (math.log(median) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(log_place - 0.5) < abs(place - 0.5)


def metric_lines(curves: Curves) -> list[ChartLine]:
    """The lines of one metric's chart: the mean thick, smoothed if it is noisy; and each rank."""
    is_alone = len(curves) == 1
    ranks = [
        ChartLine(f"rank {rank}", points)
        for rank, points in itertools.islice(curves.items(), _MAX_RANK_LINES)
    ]
    name = ranks[0].name if is_alone else "mean of ranks"
    points = ranks[0].points if is_alone else mean_points(curves.values())
    # One that often turns is noisy; smoothing would only delay another.
    values = [value for _, value in points]
    rises = [after > before for before, after in itertools.pairwise(values) if after != before]
    turns = sum(after != before for before, after in itertools.pairwise(rises))
    if len(rises) >= _MIN_SMOOTHED_POINTS and turns > _NOISY_SHARE * len(rises):
        return [ChartLine(f"{name}, smoothed", smoothed(points), is_thick=True), *ranks]
    # Drawn as it is, it would cover the only rank's own line.
    ranks = [] if is_alone else ranks
    return [ChartLine(name, points, is_thick=True), *ranks] if points else ranks


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
    edges = [place * len(items) // num_groups for place in range(num_groups + 1) if num_groups]
    return [items[first:last] for first, last in itertools.pairwise(edges)]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Means of what is around each point: of earlier ones alone it would lag behind a loss."""
    reach = min(_SMOOTHED_REACH, len(points) // _MIN_SMOOTHED_POINTS)
    means = []
    for place, (step, value) in enumerate(points):
        # Fewer near the ends: as many on one side as on the other, or a slope would be left.
        near = max(1, min(reach, place, len(points) - 1 - place))
        around = [y for _, y in points[max(0, place - near) : place + near + 1] if math.isfinite(y)]
        means.append((step, statistics.fmean(around) if math.isfinite(value) else value))
    return means


def sparkline(values: Sequence[float]) -> str:
    """A curve in block characters, over all of the values."""
    # `mean` lets a value that is not finite win, so that the curve shows it.
    points = [mean(group) or 0.0 for group in _groups(values, min(len(values), SPARK_CHARS))]
    scale = math.log if is_logarithmic(points) else float
    heights = [scale(value) if is_drawn(value) else math.nan for value in points]
    drawn = [height for height in heights if not math.isnan(height)]
    low = min(drawn, default=0.0)
    highest = max(drawn, default=0.0) - low
    shares = [(height - low) / highest if highest else 0.4 for height in heights]
    return "".join(
        "!" if math.isnan(height) else _SPARK_BLOCKS[min(int(8 * share), 7)]
        for height, share in zip(heights, shares, strict=True)
    )
