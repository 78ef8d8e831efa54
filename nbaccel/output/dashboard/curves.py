"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick, smoothed one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nbaccel.output.chart import LOGARITHMIC_RATIO, ChartLine, line_chart, smoothed
from nbaccel.output.dashboard.board import RankFacts, RunBoard, mean_points
from nbaccel.output.dashboard.drawing import leading_rank, plain_text

__all__ = ["is_logarithmic", "metric_chart", "smoothed_value"]

CHART_WIDTH = 480
CHART_HEIGHT = 150
SMALL_WIDTH = 320
SMALL_HEIGHT = 110
_MAX_RANK_LINES = 16
_MIN_SMOOTHED_POINTS = 8
_MAX_DECAY = 0.9
_MAX_MARKS = 12
_NAME_CHARS = 40


def metric_chart(
    board: RunBoard,
    metric_name: str,
    *,
    is_small: bool = False,
    log_y: bool | None = None,
    as_image: bool = False,
) -> str:
    """A metric over the steps, as an SVG element."""
    with_values = [
        (rank_facts, history.points())
        for rank_facts in board.ranks.values()
        if (history := rank_facts.histories.get(metric_name)) is not None
    ]
    if max((len(points) for _, points in with_values), default=0) < 2:
        return ""
    chart_lines = _rank_lines(with_values)
    mean_line = _mean_line([points for _, points in with_values])
    if mean_line is not None:
        chart_lines.append(mean_line)
    leading_facts = leading_rank(board)
    return line_chart(
        chart_lines,
        title=plain_text(metric_name, _NAME_CHARS),
        x_label="step",
        marks=_thinned_marks(leading_facts) if leading_facts is not None else (),
        width=SMALL_WIDTH if is_small else CHART_WIDTH,
        height=SMALL_HEIGHT if is_small else CHART_HEIGHT,
        log_y=is_logarithmic(board, metric_name) if log_y is None else log_y,
        as_image=as_image,
    )


def is_logarithmic(board: RunBoard, metric_name: str) -> bool:
    """Whether a metric's range asks for a logarithmic axis: a loss falls fast at first."""
    finite_values = [
        value
        for rank_facts in board.ranks.values()
        if metric_name in rank_facts.histories
        for value in rank_facts.histories[metric_name].values()
        if math.isfinite(value)
    ]
    low_value = min(finite_values, default=0.0)
    high_value = max(finite_values, default=0.0)
    return low_value > 0 and high_value / LOGARITHMIC_RATIO >= low_value


def smoothed_value(board: RunBoard, metric_name: str) -> float | None:
    """The latest value of a metric's smoothed mean; None where there are too few values."""
    mean_line = _mean_line(
        [
            rank_facts.histories[metric_name].points()
            for rank_facts in board.ranks.values()
            if metric_name in rank_facts.histories
        ]
    )
    return None if mean_line is None else mean_line.points[-1][1]


def _rank_lines(
    with_values: Sequence[tuple[RankFacts, list[tuple[float, float]]]],
) -> list[ChartLine]:
    is_alone = len(with_values) == 1
    return [
        ChartLine(f"rank {rank_facts.rank}", points, "raw" if is_alone else "rank")
        for rank_facts, points in with_values[:_MAX_RANK_LINES]
    ]


def _mean_line(rank_points: Sequence[list[tuple[float, float]]]) -> ChartLine | None:
    points = mean_points(rank_points)
    if len(points) < _MIN_SMOOTHED_POINTS:
        return None
    # Of few points over few.
    decay = min(_MAX_DECAY, 1 - _MIN_SMOOTHED_POINTS / len(points))
    values = [value for _, value in points]
    # From both ends: an average of earlier values alone would lag behind a loss that falls.
    both_ways = zip(smoothed(values, decay), reversed(smoothed(values[::-1], decay)), strict=True)
    smooth_points = [
        (step, (forward + backward) / 2)
        for (step, _), (forward, backward) in zip(points, both_ways, strict=True)
    ]
    name = "smoothed" if len(rank_points) == 1 else "mean, smoothed"
    return ChartLine(name, smooth_points, "mean")


def _thinned_marks(rank_facts: RankFacts) -> list[tuple[float, str]]:
    """The starts of epochs, so few of them that their names can be read."""
    every = -(-len(rank_facts.epoch_marks) // _MAX_MARKS) or 1
    return [(step, plain_text(name, _NAME_CHARS)) for step, name in rank_facts.epoch_marks[::every]]
