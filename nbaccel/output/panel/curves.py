"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick one."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nbaccel.base.metric_history import Point
from nbaccel.output.chart import ChartLine, is_drawn, line_chart
from nbaccel.output.panel.words import plain_text

Curves = Mapping[int, Sequence[Point]]
"""Rank → the points of a metric."""

LOGARITHMIC_RATIO = 8.0  # of highest to lowest
_MAX_RANK_LINES = 16
_MIN_SMOOTHED_POINTS = 8
_MAX_DECAY = 0.9
_NOISY_SHARE = 0.25  # of the steps that go against the one before
_MEAN_POINTS = 120
_MOST_POINTS = 240
_MAX_MARKS = 8
_NAME_CHARS = 40


def metric_chart(
    curves: Curves, name: str, marks: Sequence[tuple[float, str]] = (), **form: Any
) -> str:
    """A metric over the steps; empty where there is less than a line."""
    if max(map(len, curves.values()), default=0) < 2:
        return ""
    return chart_of(metric_lines(curves), name, marks, **form)


def chart_of(
    lines: Sequence[ChartLine], name: str, marks: Sequence[tuple[float, str]] = (), **form: Any
) -> str:
    """Lines as a chart; `form` is that of `line_chart`."""
    lines = [line._replace(points=_thinned(line.points)) for line in lines]
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    form = {"log_y": is_logarithmic(y for line in lines for _, y in line.points)} | form
    stride = math.ceil(len(marks) / _MAX_MARKS) or 1
    return line_chart(
        lines,
        title=plain_text(name, _NAME_CHARS),
        marks=[(step, plain_text(text, _NAME_CHARS)) for step, text in marks[::stride]],
        **form,
    )


def is_logarithmic(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis shows more: a loss falls fast, and then is a flat line."""
    values = [value for value in values if is_drawn(value)]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    if low <= 0 or high / LOGARITHMIC_RATIO < low:
        return False
    # Not for a learning rate that falls evenly to nearly nothing: whichever scale has as many
    # values above its middle as below shows more of them.
    median = statistics.median(values)
    place = (median - low) / (high - low)
    log_place = (math.log(median) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(log_place - 0.5) < abs(place - 0.5)


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Of many points the lowest, the highest and one that is no number of each stretch."""
    points = [point for point in points if is_drawn(point[0])]
    if len(points) <= _MOST_POINTS:
        return points
    kept = {0, len(points) - 1}
    num_stretches = (_MOST_POINTS - 2) // 3
    edges = [number * len(points) // num_stretches for number in range(num_stretches + 1)]
    for start, end in itertools.pairwise(edges):
        finite = [place for place in range(start, end) if is_drawn(points[place][1])]
        kept.update([place for place in range(start, end) if not is_drawn(points[place][1])][:1])
        if finite:
            kept.add(min(finite, key=lambda place: points[place][1]))
            kept.add(max(finite, key=lambda place: points[place][1]))
    return [points[place] for place in sorted(kept)]


def metric_lines(curves: Curves) -> list[ChartLine]:
    """The lines of one metric's chart: ranks thin, their mean thick and smoothed if it is noisy."""
    is_alone = len(curves) == 1
    ranks = [
        ChartLine(f"rank {rank}", points, "raw" if is_alone else "rank")
        for rank, points in itertools.islice(curves.items(), _MAX_RANK_LINES)
    ]
    name = ranks[0].name if is_alone else "mean of ranks"
    points = ranks[0].points if is_alone else mean_points(curves.values())
    if _is_noisy([value for _, value in points]):
        return [*ranks, ChartLine(f"{name}, smoothed", _smooth(points), "mean")]
    # Drawn as it is, it would cover the only rank's own line.
    ranks = [] if is_alone else ranks
    return [*ranks, ChartLine(name, points, "mean")] if points else ranks


def mean_points(curves: Iterable[Sequence[Point]], max_points: int = _MEAN_POINTS) -> list[Point]:
    """The mean of all ranks over the steps."""
    finite = [[point for point in points if math.isfinite(point[1])] for points in curves]
    points = sorted(itertools.chain.from_iterable(finite))
    # Only finite ones: else there would be more groups than steps, and a rank's alone in some.
    longest = max(map(len, finite), default=0)
    num_groups = min(longest, max_points, len(points))
    edges = [place * len(points) // num_groups for place in range(num_groups + 1) if num_groups]
    means = []
    for first, last in itertools.pairwise(edges):
        group = points[first:last]
        step = math.fsum(step for step, _ in group) / len(group)
        means.append((step, math.fsum(value / len(group) for _, value in group)))
    return means


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Averages from both ends: of earlier values alone it would lag behind a loss that falls."""
    # Of few points over few.
    decay = max(0.0, min(_MAX_DECAY, 1 - _MIN_SMOOTHED_POINTS / len(points)))
    values = [value for _, value in points]
    both_ways = zip(smoothed(values, decay), reversed(smoothed(values[::-1], decay)), strict=True)
    return [
        (step, (forward + backward) / 2)
        for (step, _), (forward, backward) in zip(points, both_ways, strict=True)
    ]


def smoothed(values: Sequence[float], decay: float) -> list[float]:
    """An exponential moving average whose start is not pulled towards zero.

    The average starts at zero, and after `t` values it holds `1 - decay**t` of their weight;
    dividing by that corrects it, as for the moments of Adam (Kingma & Ba 2015, section 3).
    """
    smooth_values = []
    average = 0.0
    left_weight = 1.0
    for value in values:
        if not math.isfinite(value):
            smooth_values.append(value)
            continue
        average = decay * average + (1 - decay) * value
        left_weight *= decay
        smooth_values.append(average / (1 - left_weight))
    return smooth_values


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve often turns; smoothing would only delay one that does not."""
    rises = [after > before for before, after in itertools.pairwise(values) if after != before]
    turns = sum(after != before for before, after in itertools.pairwise(rises))
    return len(rises) >= _MIN_SMOOTHED_POINTS and turns > _NOISY_SHARE * len(rises)
