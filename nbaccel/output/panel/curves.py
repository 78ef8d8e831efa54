"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbaccel.base.training_metrics import MetricHistory, Point
from nbaccel.output.chart import ChartLine, Mark, is_drawn, line_chart
from nbaccel.output.panel.facts import mean
from nbaccel.output.panel.words import plain_text

Curves = Mapping[int, Sequence[Point]]
"""Rank → the points of a metric."""

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
    lines = [line._replace(points=_thinned(line.points)) for line in lines]
    lines = [line for line in lines if line.points]
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


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Of many points the lowest and the highest of each stretch."""
    history = MetricHistory(_MOST_STRETCHES)
    for step, value in points:
        if is_drawn(step):
            history.add(value, step)
    return history.points()


def metric_lines(curves: Curves) -> list[ChartLine]:
    """The lines of one metric's chart: the mean thick, smoothed if it is noisy; and each rank."""
    is_alone = len(curves) == 1
    ranks = [
        ChartLine(f"rank {rank}", points)
        for rank, points in itertools.islice(curves.items(), _MAX_RANK_LINES)
    ]
    name = ranks[0].name if is_alone else "mean of ranks"
    points = ranks[0].points if is_alone else mean_points(curves.values())
    if _is_noisy([value for _, value in points]):
        return [ChartLine(f"{name}, smoothed", smoothed(points), is_thick=True), *ranks]
    # Drawn as it is, it would cover the only rank's own line.
    ranks = [] if is_alone else ranks
    return [ChartLine(name, points, is_thick=True), *ranks] if points else ranks


def mean_points(curves: Iterable[Sequence[Point]], max_points: int = _MEAN_POINTS) -> list[Point]:
    """The mean of all ranks over the steps."""
    finite = [[point for point in points if math.isfinite(point[1])] for points in curves]
    # Only finite ones: else there would be more groups than steps, and a rank's alone in some.
    longest = max(map(len, finite), default=0)
    means = []
    for group in _groups(sorted(itertools.chain(*finite)), min(longest, max_points)):
        step = math.fsum(step for step, _ in group) / len(group)
        means.append((step, math.fsum(value / len(group) for _, value in group)))
    return means


def _groups(items: Sequence[Any], num_groups: int) -> list[Sequence[Any]]:
    """So many stretches of about the same length, one after the other."""
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


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve often turns; smoothing would only delay one that does not."""
    rises = [after > before for before, after in itertools.pairwise(values) if after != before]
    turns = sum(after != before for before, after in itertools.pairwise(rises))
    return len(rises) >= _MIN_SMOOTHED_POINTS and turns > _NOISY_SHARE * len(rises)


def sparkline(values: Sequence[float]) -> str:
    """A curve in block characters, over all of the values."""
    # `mean` lets a value that is not finite win, so that the curve shows it.
    points = [mean(group) or 0.0 for group in _groups(values, min(len(values), SPARK_CHARS))]
    scale = math.log if is_logarithmic(points) else float
    heights = [scale(value) if is_drawn(value) else math.nan for value in points]
    drawn = [height for height in heights if not math.isnan(height)]
    low = min(drawn, default=0.0)
    return "".join(_spark_block(height - low, max(drawn, default=0.0) - low) for height in heights)


def _spark_block(height: float, highest: float) -> str:
    if math.isnan(height):
        return "!"
    share = height / highest if highest else 0.4
    return _SPARK_BLOCKS[min(int(share * len(_SPARK_BLOCKS)), len(_SPARK_BLOCKS) - 1)]
