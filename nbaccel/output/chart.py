"""A line chart as one SVG element, or one image, readable on light and dark backgrounds.

No style sheet, no script and no ids: several charts of a page cannot disturb each other, and a
saved notebook shows them without a kernel. Axes have the colour of the text around the chart;
lines differ in width and dash pattern, not in colour alone.
"""

from __future__ import annotations

import base64
import html
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from nbaccel.base.metric_history import Point
from nbaccel.base.units import format_number


class ChartLine(NamedTuple):
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    """At least one, by ascending x. A y that is not finite interrupts the line."""
    role: Literal["mean", "rank", "raw"]
    """`mean` is drawn thick; `rank` thin, each with its own dashes; `raw` is what was smoothed."""


ACCENT_COLOUR = "#1e88e5"
"""At least 3.6:1 against white and 5:1 against the dark themes' backgrounds."""
_IMAGE_GREY = "#787878"
"""An image does not know the colour of the text around it: 4.4:1 against white, 4.3:1 against
JupyterLab's dark background."""
_CHAR_WIDTH = 6.2  # of a digit in 11 px, in px
_LOOKS = {
    "raw": (1.0, 0.6),
    "rank": (1.0, 0.7),
    "mean": (2.2, 1.0),
}  # width, opacity; in this order
_RANK_DASHES = ("", "4 2", "1 2", "7 2 1 2", "2 4")
_FAINT = 'stroke="currentColor" stroke-opacity='


def is_drawn(value: float) -> bool:
    """Whether a value is a number; differences of larger ones may be infinite."""
    return abs(value) < 1e250


def line_chart(
    lines: Sequence[ChartLine],
    *,
    title: str,
    marks: Sequence[tuple[float, str]] = (),
    width: int = 480,
    height: int = 160,
    log_y: bool = False,
    as_image: bool = False,
) -> str:
    """Draw lines over the steps of a training."""
    # Later elements cover earlier ones.
    lines = sorted(lines, key=lambda line: [*_LOOKS].index(line.role))
    ends = [lines[-1].points[0], lines[-1].points[-1]]
    first, last = (f"{format_number(y)} at step {format_number(x)}" for x, y in ends)
    spoken = f"{title}: from {first} to {last}"
    values = [y for line in lines for _, y in line.points if is_drawn(y) and (y > 0 or not log_y)]
    if not values:
        text = _text(width / 2, height / 2, "no numbers", anchor="middle")
        return _svg(spoken, text, width, height, as_image=as_image)
    top = (18 if len(lines) > 1 else 6) + (12 if marks else 0)
    y_axis = _Axis(values, height - 20, top, 21, is_log=log_y)
    left = 10 + _CHAR_WIDTH * max((len(label) for _, label in y_axis.labels), default=0)
    steps = [x for line in lines for x, _ in line.points]
    x_axis = _Axis(steps, left, width - 8, 70, is_log=False)
    looked = [(line, _look(line, number)) for number, line in enumerate(lines)]
    elements = [*_axes(x_axis, y_axis), *_marks(x_axis, y_axis, marks)]
    for line, look in looked:
        elements += _line(x_axis, y_axis, line, look)
    if len(lines) > 1:
        # The mean, which was drawn last, is named first.
        elements += _legend(x_axis, sorted(looked, key=lambda entry: entry[0].role != "mean"))
    return _svg(spoken, "".join(elements), width, height, as_image=as_image)


class _Axis:
    """An axis from one place to another, in pixels, and its labelled values."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, tick_gap: int, *, is_log: bool
    ) -> None:
        self.start = start
        self.end = end
        self.is_log = is_log
        low, high = (math.log10(value) if is_log else value for value in (min(values), max(values)))
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            around = abs(low) / 10 or 1.0  # a constant lies in the middle
            low, high = low - around, low + around
        margin = 0.04 if end < start else 0.0  # above and below
        self._low = low - (high - low) * margin
        self._length = (high - low) * (1 + 2 * margin)
        num_ticks = max(int(abs(end - start)) // tick_gap, 3 if is_log else 2)
        ticks = self._log_ticks(num_ticks) if is_log else self._linear_ticks(num_ticks)
        self.labels = [(tick, text) for tick, text in ticks if self.holds(tick)]

    def _share(self, value: float) -> float:
        return ((math.log10(value) if self.is_log else value) - self._low) / self._length

    def at(self, value: float) -> float:
        """Where a value lies."""
        return self.start + self._share(value) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether a value lies on it."""
        return (
            is_drawn(value) and (value > 0 or not self.is_log) and -1e-9 < self._share(value) <= 1
        )

    def _linear_ticks(self, num_ticks: int) -> list[tuple[float, str]]:
        least_step = self._length / num_ticks * 0.999
        power = 10.0 ** math.floor(math.log10(least_step))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step)
        first = math.ceil(self._low / step - 1e-9)
        # Multiples, not sums: 0.1 added up would be labelled 0.30000000000000004.
        ticks = [number * step for number in range(first, first + 20)]
        if step >= 1e4 or step < 1e-5:
            return [(tick, format_number(tick)) for tick in ticks]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(tick, f"{tick + 0.0:,.{decimals}f}") for tick in ticks]

    def _log_ticks(self, num_ticks: int) -> list[tuple[float, str]]:
        """Powers of ten, with 2 and 5 between them where there is room, or fewer."""
        decades = range(math.floor(self._low), math.floor(self._low + self._length) + 1)
        ticks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
        if sum(map(self.holds, ticks)) > num_ticks:
            stride = math.ceil(self._length / num_ticks)
            ticks = [10.0**decade for decade in decades if decade % stride == 0]
        return [(tick, format_number(tick)) for tick in ticks]


def _axes(x_axis: _Axis, y_axis: _Axis) -> Iterable[str]:
    for tick, label in y_axis.labels:
        y = y_axis.at(tick)
        yield _path([(x_axis.start, y), (x_axis.end, y)], f'{_FAINT}"0.15"')
        yield _text(x_axis.start - 5, y + 4, label, anchor="end")
    bottom = y_axis.start
    yield _path([(x_axis.start, bottom), (x_axis.end, bottom)], f'{_FAINT}"0.4"')
    yield _text(x_axis.end, bottom + 15, "step", anchor="end")
    for tick, label in x_axis.labels:
        x = x_axis.at(tick)
        yield _path([(x, bottom), (x, bottom + 3)], f'{_FAINT}"0.4"')
        if x + _CHAR_WIDTH * len(label) / 2 < x_axis.end - 36:  # where "step" stands
            yield _text(x, bottom + 15, label, anchor="middle")


def _marks(x_axis: _Axis, y_axis: _Axis, marks: Sequence[tuple[float, str]]) -> Iterable[str]:
    """Dashed lines; those whose text would lie on another's have none."""
    free_from = x_axis.start - 1
    for step, text in marks:
        if not x_axis.holds(step):
            continue
        x = x_axis.at(step)
        look = f'{_FAINT}"0.3" stroke-dasharray="2 3"'
        yield _path([(x, y_axis.end - 12), (x, y_axis.start)], look)
        text_end = x + _CHAR_WIDTH * len(text) + 8
        if x >= free_from and text_end <= x_axis.end + 8:
            yield _text(x + 3, y_axis.end - 4, text)
            free_from = text_end


def _line(x_axis: _Axis, y_axis: _Axis, line: ChartLine, look: str) -> Iterable[str]:
    """Its stretches of numbers, and a cross where there is none."""
    for has_place, group in itertools.groupby(line.points, lambda point: y_axis.holds(point[1])):
        if has_place:
            stretch = [(x_axis.at(x), y_axis.at(y)) for x, y in group]
            # A single point is a line without a length, drawn as its round ends.
            yield _path(stretch if len(stretch) > 1 else stretch * 2, look)
        else:
            for x, _ in group:
                yield _text(x_axis.at(x), y_axis.start - 3, "\u00d7", anchor="middle")


def _legend(x_axis: _Axis, looked: Sequence[tuple[ChartLine, str]]) -> Iterable[str]:
    """A row that names the first few lines, and says how many more there are."""
    x = x_axis.start
    for number, (line, look) in enumerate(looked):
        name = line.name if len(line.name) <= 24 else f"{line.name[:23]}…"
        if number == 4 or x + 100 + _CHAR_WIDTH * len(name) > x_axis.end:
            yield _text(x, 12, f"and {len(looked) - number} more")
            return
        yield _path([(x, 8), (x + 18, 8)], look)
        yield _text(x + 23, 12, name)
        x += 37 + _CHAR_WIDTH * len(name)


def _look(line: ChartLine, number: int) -> str:
    width, opacity = _LOOKS[line.role]
    dashes = _RANK_DASHES[number % len(_RANK_DASHES)] if line.role == "rank" else ""
    return (
        f'stroke="{ACCENT_COLOUR}" stroke-width="{width}" stroke-opacity="{opacity}" '
        f'stroke-linejoin="round" stroke-linecap="round" stroke-dasharray="{dashes}"'
    )


def _path(points: Iterable[tuple[float, float]], look: str) -> str:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M{way}" {look}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity="0.75">{html.escape(text)}</text>'
    )


def _svg(spoken: str, drawn: str, width: int, height: int, *, as_image: bool) -> str:
    said = html.escape(spoken)
    size = f'width="{width}" height="{height}"'
    style = 'style="max-width:100%;height:auto"'
    font = 'font-family="system-ui, sans-serif" font-size="11"'
    view = f'{size} viewBox="0 0 {width} {height}" fill="none" {font}'
    if not as_image:
        return (
            f'<svg role="img" aria-label="{said}" {style} {view}><title>{said}</title>{drawn}</svg>'
        )
    # In an image a style sheet disturbs nothing else; labels that are grey need no opacity.
    image = (
        f'<svg xmlns="http://www.w3.org/2000/svg" color="{_IMAGE_GREY}" {view}>'
        f"<title>{said}</title><style>text{{fill-opacity:1}}</style>{drawn}</svg>"
    )
    data = base64.b64encode(image.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{said}" {size} {style}>'
