"""A line chart as one SVG element, or one image, readable on light and dark backgrounds.

No style sheet, no script and no ids: several charts of a page cannot disturb each other, and a
saved notebook shows them without a kernel. Axes have the colour of the text around the chart;
lines differ in width and dash pattern, not in colour alone.
"""

from __future__ import annotations

import base64
import html
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["LOGARITHMIC_RATIO", "ChartLine", "line_chart", "short_number", "smoothed"]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    """Pairs of x and y, by ascending x. A y that is not finite interrupts the line."""
    role: Literal["mean", "rank", "raw"]
    """`mean` is drawn thick; `rank` thin and faint, each rank with its own dash pattern; `raw` thin
    (what a smoothed line was made of)."""


ACCENT_COLOUR = "#1e88e5"
"""At least 3.6:1 against white and 5:1 against the dark themes' backgrounds."""

_IMAGE_GREY = "#787878"
"""Axes and labels of an image, which does not know the colour of the text around it: 4.4:1 against
white, 4.3:1 against JupyterLab's dark background. An image could ask for the browser's preference,
but JupyterLab's theme may be another."""

_MOST_POINTS = 240
_MARK_GAP = 48  # px between two marks, at least: less is a grey area
_MOST_LEGEND_LINES = 4
LOGARITHMIC_RATIO = 8.0
"""From this ratio of highest to lowest on, the scale may be logarithmic: a loss falls fast at
first, and the rest of the run would be a flat line."""
_LARGEST_SHOWN = 1e300
"""Differences of larger numbers may be infinite; they are marked like those that are none."""
_SMALLEST_POSITIVE = 1e-300
"""Below it lie numbers of few digits, whose quotients and logarithms fail."""
_SAME_VALUE = 1e-9
"""Values whose range is below this part of their size are drawn as constant."""

_RANK_DASHES = ("", "4 2", "1 2", "7 2 1 2", "2 4")
_CHAR_WIDTH = 6.2  # of a digit in 11 px, in px
_LABEL_HEIGHT = 11
_TICK_GAP_Y = 21  # px between two labels of the y axis, at least
_TICK_GAP_X = 70


def smoothed(values: Sequence[float], decay: float | None = None) -> list[float]:
    """An exponential moving average whose start is not pulled towards zero.

    The average starts at zero, and after `t` values it holds `1 - decay**t` of their weight;
    dividing by that corrects it, as for the moments of Adam (Kingma & Ba 2015, section 3).
    """
    smooth_values: list[float] = []
    if decay is None:
        # Of few values, a long average would still show the first ones at the end.
        decay = 1 - 1 / min(10.0, max(1.0, len(values) / 12))
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


def line_chart(
    lines: Sequence[ChartLine],
    *,
    title: str,
    x_label: str,
    marks: Sequence[tuple[float, str]] = (),
    width: int = 520,
    height: int = 160,
    log_y: bool | None = None,
    as_image: bool = False,
) -> str:
    """Draw lines over a common x axis."""
    svg = _Svg(
        spoken=_spoken_summary(lines, title, x_label), width=width, height=height, is_image=as_image
    )
    thinned_lines = [
        ChartLine(line.name, _thinned(line.points), line.role) for line in lines if line.points
    ]
    shown_values = [
        y for line in thinned_lines for x, y in line.points if _is_shown(x) and _is_shown(y)
    ]
    is_log = _is_logarithmic(shown_values, log_y)
    if is_log:
        shown_values = [value for value in shown_values if value >= _SMALLEST_POSITIVE]
    shown_x = [x for line in thinned_lines for x, _ in line.points if _is_shown(x)]
    if not shown_values:
        empty_words = "no numbers" if shown_x else "no values yet"
        empty_text = _text(width / 2, height / 2, empty_words, anchor="middle")
        return svg.of([empty_text])
    legend_lines = _legend_lines(thinned_lines)
    top = (18 if legend_lines else 6) + (12 if marks else 0)
    bottom = height - 20
    y_scale = _Scale.of(shown_values, is_log=is_log, most_ticks=(bottom - top) // _TICK_GAP_Y)
    y_labels = y_scale.labels()
    x_scale = _Scale.of(
        shown_x,
        most_ticks=width // _TICK_GAP_X,
        margin=0.0,
        least_step=1.0 if all(float(x).is_integer() for x in shown_x) else 0.0,
    )
    area = _PlotArea(
        left=10 + _CHAR_WIDTH * max((len(label) for label in y_labels), default=0),
        right=width - 8,
        top=top,
        bottom=bottom,
        x_scale=x_scale,
        y_scale=y_scale,
    )
    return svg.of(
        [
            *_axis_elements(area, y_labels, x_label),
            *_mark_elements(area, marks),
            *_line_elements(area, thinned_lines),
            *_legend_elements(area, legend_lines),
        ]
    )


def short_number(value: float) -> str:
    """A number in few characters: `0.0912`, `1,904`, `2e6`."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000 and abs(value) < 1e6:
        return f"{value:,.0f}"
    return _without_zeros(f"{value:.4g}")


def _without_zeros(text: str) -> str:
    """`1e+06` as `1e6`."""
    mantissa, has_exponent, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if has_exponent else mantissa


# ------------------------------------------------------------------------- values


def _is_shown(value: float) -> bool:
    return math.isfinite(value) and abs(value) < _LARGEST_SHOWN


def _is_logarithmic(shown_values: Sequence[float], log_y: bool | None) -> bool:
    if log_y is not None:
        return log_y and any(value >= _SMALLEST_POSITIVE for value in shown_values)
    low = min(shown_values, default=0.0)
    high = max(shown_values, default=0.0)
    if low < _SMALLEST_POSITIVE or high / LOGARITHMIC_RATIO < low:
        return False
    # Not for a learning rate that falls evenly to nearly nothing: whichever scale has as many
    # values above its middle as below shows more of them.
    median = statistics.median(shown_values)
    place = (median - low) / (high - low)
    log_place = (math.log(median) - math.log(low)) / (math.log(high) - math.log(low))
    return abs(log_place - 0.5) < abs(place - 0.5)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most so many points that a chart of this size shows a difference.

    Of each stretch the lowest and the highest are kept and, if there is one, a value that is no
    number: a spike must not disappear.
    """
    if len(points) <= _MOST_POINTS:
        return [*points]
    stretches = (_MOST_POINTS - 2) // 3
    kept = {0, len(points) - 1}
    for stretch in range(stretches):
        places = range(stretch * len(points) // stretches, (stretch + 1) * len(points) // stretches)
        finite_places = [place for place in places if _is_shown(points[place][1])]
        if len(finite_places) < len(places):
            kept.add(next(place for place in places if not _is_shown(points[place][1])))
        if finite_places:
            kept.add(min(finite_places, key=lambda place: points[place][1]))
            kept.add(max(finite_places, key=lambda place: points[place][1]))
    return [points[place] for place in sorted(kept)]


def _spoken_summary(lines: Sequence[ChartLine], title: str, label: str) -> str:
    """What a screen reader says of the chart: the first and the last value of its main line."""
    by_weight = sorted(lines, key=lambda line: line.role != "mean")
    points = by_weight[0].points if by_weight else ()
    if not points:
        return f"{title}: no values yet"
    (first_x, first_y) = points[0]
    (last_x, last_y) = points[-1]
    return (
        f"{title}: from {short_number(first_y)} at {label} {short_number(first_x)} "
        f"to {short_number(last_y)} at {label} {short_number(last_x)}"
    )


# ------------------------------------------------------------------------- scales


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """One axis: its ends and the values that are labelled."""

    low: float
    high: float
    ticks: tuple[float, ...]
    tick_step: float
    """Distance of two ticks; 0 on a logarithmic scale."""
    is_log: bool = False

    @classmethod
    def of(
        cls,
        values: Sequence[float],
        *,
        most_ticks: int,
        is_log: bool = False,
        margin: float = 0.04,
        least_step: float = 0.0,
    ) -> _Scale:
        """The scale on which all values lie."""
        low = min(values)
        high = max(values)
        if high - low <= max(_SAME_VALUE * max(abs(low), abs(high)), _SMALLEST_POSITIVE):
            # Something around a constant, so that it lies in the middle.
            middle = low
            around = abs(middle) / 10 or 1.0
            low = middle - around
            high = middle + around
        if is_log:
            low_power = math.log10(low)
            high_power = math.log10(high)
            free_powers = (high_power - low_power) * margin
            low = max(10.0 ** (low_power - free_powers), sys.float_info.min)
            high = 10.0 ** min(high_power + free_powers, sys.float_info.max_10_exp - 1)
            ticks = _log_ticks(low, high, most_ticks)
            return cls(low=low, high=high, ticks=ticks, tick_step=0, is_log=True)
        free_length = (high - low) * margin
        low = low - free_length
        high = high + free_length
        tick_step = max(_round_step((high - low) / max(most_ticks, 2)), least_step)
        first_tick = math.ceil(low / tick_step)
        # Multiples of the step, not sums: 0.1 added up would be labelled 0.30000000000000004.
        candidates = (number * tick_step for number in range(first_tick, first_tick + 50))
        shown_ticks = tuple(tick for tick in candidates if tick <= high + tick_step * 1e-9)
        return cls(low=low, high=high, ticks=shown_ticks, tick_step=tick_step)

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        if self.is_log:
            low_power = math.log10(self.low)
            return (math.log10(value) - low_power) / (math.log10(self.high) - low_power)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """The text of each tick."""
        if self.is_log:
            return [short_number(tick) for tick in self.ticks]
        largest = max(abs(self.low), abs(self.high))
        if largest < 1e-4 or largest >= 1e12 or (largest >= 1e6 and self.tick_step >= 1e4):
            digits = math.floor(math.log10(largest)) - math.floor(math.log10(self.tick_step)) + 1
            return [_without_zeros(f"{tick:.{max(digits, 1)}g}") for tick in self.ticks]
        decimals = max(0, -math.floor(math.log10(self.tick_step) + 1e-9))
        return [f"{tick + 0.0:,.{decimals}f}" for tick in self.ticks]


def _round_step(least_step: float) -> float:
    """The smallest of 1, 2, 5, 10, … times a power of ten that is not below a step."""
    power = 10.0 ** math.floor(math.log10(least_step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least_step * 0.999)


def _log_ticks(low: float, high: float, most_ticks: int) -> tuple[float, ...]:
    """Powers of ten, with 2 and 5 between them where there is room, fewer where there is little."""
    first_decade = math.floor(math.log10(low))
    last_decade = math.floor(math.log10(high))
    finest = _ticks_between(low, high, range(first_decade, last_decade + 1), (1.0, 2.0, 5.0))
    if len(finest) <= max(most_ticks, 3):
        return finest
    for stride in range(1, last_decade - first_decade + 2):
        decades = range(-(-first_decade // stride) * stride, last_decade + 1, stride)
        ticks = _ticks_between(low, high, decades, (1.0,))
        if len(ticks) <= max(most_ticks, 2):
            # Fewer than two powers of ten in the range: then rather too many labels than none.
            return ticks if len(ticks) > 1 else finest
    return finest


def _ticks_between(
    low: float, high: float, decades: Iterable[int], factors: Sequence[float]
) -> tuple[float, ...]:
    ticks = (factor * 10.0**decade for decade in decades for factor in factors)
    return tuple(tick for tick in ticks if low <= tick <= high)


# ------------------------------------------------------------------------- elements

_FONT = 'font-family="system-ui, sans-serif" font-size="11"'


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlotArea:
    """Where values lie, in pixels."""

    left: float
    right: float
    top: float
    bottom: float
    x_scale: _Scale
    y_scale: _Scale

    def x_of(self, value: float) -> float:
        return self.left + self.x_scale.place(value) * (self.right - self.left)

    def y_of(self, value: float) -> float:
        return self.bottom - self.y_scale.place(value) * (self.bottom - self.top)

    def has_place(self, x: float, y: float) -> bool:
        """Whether there is a place for this point."""
        is_positive = y >= _SMALLEST_POSITIVE
        return _is_shown(x) and _is_shown(y) and (is_positive or not self.y_scale.is_log)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Svg:
    """The element around what is drawn."""

    spoken: str
    """What a screen reader says."""
    width: int
    height: int
    is_image: bool

    def of(self, elements: Iterable[str]) -> str:
        """The whole element."""
        text = html.escape(self.spoken)
        size = f'width="{self.width}" height="{self.height}"'
        style = 'style="max-width:100%;height:auto"'
        view = f'{size} viewBox="0 0 {self.width} {self.height}" fill="none" {_FONT}'
        title = f"<title>{text}</title>"
        drawn = "".join(elements)
        if not self.is_image:
            return f'<svg role="img" aria-label="{text}" {style} {view}>{title}{drawn}</svg>'
        # In an image a style sheet disturbs nothing else; labels that are grey need no opacity.
        image = (
            f'<svg xmlns="http://www.w3.org/2000/svg" color="{_IMAGE_GREY}" {view}>{title}'
            f"<style>text{{fill-opacity:1}}</style>{drawn}</svg>"
        )
        address = f"data:image/svg+xml;base64,{base64.b64encode(image.encode()).decode()}"
        return f'<img src="{address}" alt="{text}" {size} {style}>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", opacity: float = 0.75) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" '
        f'fill-opacity="{opacity}">{html.escape(text)}</text>'
    )


def _stroke(points: Iterable[tuple[float, float]], attributes: str) -> str:
    path = "".join(
        f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points)
    )
    return f'<path d="{path}" {attributes}/>'


def _axis_elements(area: _PlotArea, y_labels: Sequence[str], x_label: str) -> list[str]:
    elements = []
    for tick, label in zip(area.y_scale.ticks, y_labels, strict=True):
        tick_y = area.y_of(tick)
        elements += [
            _stroke(
                [(area.left, tick_y), (area.right, tick_y)],
                'stroke="currentColor" stroke-opacity="0.15"',
            ),
            _text(area.left - 5, tick_y + 4, label, anchor="end"),
        ]
    elements.append(
        _stroke(
            [(area.left, area.bottom), (area.right, area.bottom)],
            'stroke="currentColor" stroke-opacity="0.4"',
        )
    )
    # The name of the axis stands at its right end; labels that would run into it are left out.
    free_until = area.right - _CHAR_WIDTH * len(x_label) - 12
    text_y = area.bottom + _LABEL_HEIGHT + 4
    for tick, label in zip(area.x_scale.ticks, area.x_scale.labels(), strict=True):
        tick_x = area.x_of(tick)
        elements.append(
            _stroke(
                [(tick_x, area.bottom), (tick_x, area.bottom + 3)],
                'stroke="currentColor" stroke-opacity="0.4"',
            )
        )
        if tick_x + _CHAR_WIDTH * len(label) / 2 < free_until:
            elements.append(_text(tick_x, text_y, label, anchor="middle"))
    elements.append(_text(area.right, text_y, x_label, anchor="end"))
    return elements


def _mark_elements(area: _PlotArea, marks: Sequence[tuple[float, str]]) -> list[str]:
    """Dashed lines; those whose text would lie on another's have none."""
    elements = []
    free_from = area.left - 1
    shown_marks = [
        (x, text) for x, text in marks if _is_shown(x) and -1e-9 <= area.x_scale.place(x) <= 1
    ]
    most_marks = max(1, int((area.right - area.left) / _MARK_GAP))
    stride = -(-len(shown_marks) // most_marks) or 1
    for x, mark_text in shown_marks[::stride]:
        mark_x = area.x_of(x)
        elements.append(
            _stroke(
                [(mark_x, area.top - 12), (mark_x, area.bottom)],
                'stroke="currentColor" stroke-opacity="0.3" stroke-dasharray="2 3"',
            )
        )
        width = _CHAR_WIDTH * len(mark_text) + 8
        if mark_x >= free_from and mark_x + width <= area.right + 8:
            elements.append(_text(mark_x + 3, area.top - 4, mark_text, opacity=0.6))
            free_from = mark_x + width
    return elements


def _line_elements(area: _PlotArea, lines: Sequence[ChartLine]) -> list[str]:
    elements = []
    # Later elements cover earlier ones.
    for number, line in enumerate(sorted(lines, key=_drawing_order)):
        attributes = _line_attributes(line, number)
        for stretch in _stretches(area, line.points):
            if len(stretch) > 1:
                elements.append(_stroke(stretch, attributes))
            else:
                # A line of a single point has no length.
                ((x, y),) = stretch
                elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{ACCENT_COLOUR}"/>')
        elements += [
            _missing_marker(area, x, y)
            for x, y in line.points
            if _is_shown(x) and not area.has_place(x, y)
        ]
    return elements


def _drawing_order(line: ChartLine) -> int:
    return ("raw", "rank", "mean").index(line.role)


def _line_attributes(line: ChartLine, number: int) -> str:
    width, opacity, dashes = {
        "mean": (2.2, 1.0, ""),
        "rank": (1.0, 0.7, _RANK_DASHES[number % len(_RANK_DASHES)]),
        "raw": (1.0, 0.6, ""),
    }[line.role]
    attribute = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'stroke="{ACCENT_COLOUR}" stroke-width="{width}" stroke-opacity="{opacity}" '
        f'stroke-linejoin="round" stroke-linecap="round"{attribute}'
    )


def _stretches(
    area: _PlotArea, points: Sequence[tuple[float, float]]
) -> list[list[tuple[float, float]]]:
    """The parts of a line between values that have no place, in pixels."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if area.has_place(x, y):
            stretches[-1].append((area.x_of(x), area.y_of(y)))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _missing_marker(area: _PlotArea, x: float, y: float) -> str:
    """A cross above the axis, where there is no number."""
    middle_x = area.x_of(x)
    middle_y = area.bottom - 6
    reach = 3
    return (
        f'<path d="M{middle_x - reach:.1f} {middle_y - reach}l6 6m0 -6l-6 6" stroke="currentColor" '
        f'stroke-width="1.5"><title>{html.escape(short_number(y))}</title></path>'
    )


def _legend_lines(lines: Sequence[ChartLine]) -> list[tuple[ChartLine, int]]:
    """All lines, the mean first, with their numbers for the dash pattern; none for a single one."""
    if len(lines) < 2:
        return []
    numbered_lines = [
        (line, number) for number, line in enumerate(sorted(lines, key=_drawing_order))
    ]
    return sorted(numbered_lines, key=lambda numbered: numbered[0].role != "mean")


def _legend_elements(area: _PlotArea, legend_lines: Sequence[tuple[ChartLine, int]]) -> list[str]:
    """A row that names the first few lines, and says how many more there are."""
    elements = []
    next_x = area.left
    for line_number, (line, rank_number) in enumerate(legend_lines):
        name = line.name if len(line.name) <= 24 else f"{line.name[:23]}…"
        is_too_long = next_x + 100 + _CHAR_WIDTH * len(name) > area.right
        if line_number == _MOST_LEGEND_LINES or is_too_long:
            words = f"and {len(legend_lines) - line_number} more"
            elements.append(_text(next_x, 12, words))
            break
        elements += [
            _stroke([(next_x, 8), (next_x + 18, 8)], _line_attributes(line, rank_number)),
            _text(next_x + 23, 12, name),
        ]
        next_x += 23 + _CHAR_WIDTH * len(name) + 14
    return elements
