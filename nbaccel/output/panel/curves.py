"""Charts of a run's metrics: each rank as a thin line, the mean of all as a thick one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from nbaccel.base.metric_history import Point
from nbaccel.output.chart import LOGARITHMIC_RATIO, ChartLine, line_chart, smoothed
from nbaccel.output.panel.facts import RunBoard, mean_points
from nbaccel.output.panel.words import plain_text

__all__ = ["is_logarithmic", "metric_chart", "metric_lines", "smoothed_value"]

_MAX_RANK_LINES = 16
_MIN_SMOOTHED_POINTS = 8
_MAX_DECAY = 0.9
_NOISY_SHARE = 0.25  # of the steps that go against the one before
_MAX_MARKS = 12
_NAME_CHARS = 40


def metric_chart(
    board: RunBoard,
    name: str,
    *,
    is_small: bool = False,
    log_y: bool | None = None,
    as_image: bool = False,
) -> str:
    """A metric over the steps, as an SVG element; empty where there is less than a line."""
    curves = board.curves(name)
    if max(map(len, curves.values()), default=0) < 2:
        return ""
    leading = board.leading_rank
    return line_chart(
        metric_lines(curves),
        title=plain_text(name, _NAME_CHARS),
        x_label="step",
        marks=few_marks(leading.loop.marks) if leading is not None else (),
        width=320 if is_small else 480,
        height=110 if is_small else 150,
        log_y=is_logarithmic(board, name) if log_y is None else log_y,
        as_image=as_image,
    )


def is_logarithmic(board: RunBoard, name: str) -> bool:
    """Whether a metric's range asks for a logarithmic axis: a loss falls fast at first."""
    points = itertools.chain.from_iterable(board.curves(name).values())
    values = [value for _, value in points if math.isfinite(value)]
    return bool(values) and min(values) > 0 and max(values) / LOGARITHMIC_RATIO >= min(values)


def smoothed_value(board: RunBoard, name: str) -> float | None:
    """The latest value of a metric's smoothed mean; None where there are too few values."""
    points = mean_points(board.curves(name).values())
    return _smooth(points)[-1][1] if len(points) >= _MIN_SMOOTHED_POINTS else None


def metric_lines(curves: Mapping[int, Sequence[Point]]) -> list[ChartLine]:
    """The lines of one metric's chart: ranks thin, their mean thick and smoothed if it is noisy."""
    is_alone = len(curves) == 1
    ranks = [
        ChartLine(f"rank {rank}", points, "raw" if is_alone else "rank")
        for rank, points in itertools.islice(curves.items(), _MAX_RANK_LINES)
    ]
    if is_alone:
        name = ranks[0].name
        points = ranks[0].points
    else:
        name = "mean of ranks"
        points = mean_points(curves.values())
    if _is_noisy([value for _, value in points]):
        return [*ranks, ChartLine(f"{name}, smoothed", _smooth(points), "mean")]
    # Drawn as it is, it would cover the only rank's own line.
    return [*([] if is_alone else ranks), ChartLine(name, points, "mean")]


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


def _is_noisy(values: Sequence[float]) -> bool:
    """Whether a curve often turns; smoothing would only delay one that does not."""
    rises = [after > before for before, after in itertools.pairwise(values) if after != before]
    turns = sum(after != before for before, after in itertools.pairwise(rises))
    return len(rises) >= _MIN_SMOOTHED_POINTS and turns > _NOISY_SHARE * len(rises)


def few_marks(marks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The starts of epochs, so few of them that their names can be read."""
    stride = -(-len(marks) // _MAX_MARKS) or 1
    return [(step, plain_text(name, _NAME_CHARS)) for step, name in marks[::stride]]
