"""A report as lines for a terminal, and the words that all its forms share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges
from nbaccel.output.chart import short_number
from nbaccel.output.dashboard.css_bars import (
    TIME_KINDS,
    part_of_time,
    percent_of,
    slowest_sentence,
    starting_sentence,
)
from nbaccel.output.dashboard.drawing import sparkline
from nbaccel.output.dashboard.rank_times import RankTimes
from nbaccel.output.report.report_facts import RankFigures, RunFacts

__all__ = [
    "figure_rows",
    "headline_of",
    "report_lines",
    "warning_lines",
]

_BAR_CHARS = 32
_BAR_LETTERS = {"computing": "█", "communicating": "▒", "data": "d", "waiting": "·"}


def headline_of(facts: RunFacts) -> tuple[str, list[str]]:
    """What was run and how it ended, and the most important figures."""
    workers = count_noun(facts.plan.num_processes, "worker")
    ending = f"{facts.ending} after " if facts.ending else ""
    details = [f"{ending}{format_seconds(facts.seconds)}"]
    steps = [figures.steps for figures in facts.ranks if figures.steps is not None]
    if steps:
        details.append(f"{max(steps):,} steps")
    rates = [figures.steps_per_s for figures in facts.ranks if figures.steps_per_s is not None]
    if rates:
        details.append(f"{_rate_text(max(rates))} steps/s")
    if facts.samples_per_s is not None:
        details.append(f"{_rate_text(facts.samples_per_s)} samples/s")
    names = facts.metric_names
    if names:
        last_values = [curve.values[-1] for curve in facts.curves if curve.name == names[0]]
        details.append(f"{names[0]} {short_number(sum(last_values) / len(last_values))}")
    return f"Run on {workers}", details


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def figure_rows(facts: RunFacts) -> list[list[str]]:
    """Steps and memory as a table, its head first; columns without any value are left out."""
    columns: list[list[str]] = [["rank", *(str(figures.rank) for figures in facts.ranks)]]
    for name, text_of in _FIGURE_COLUMNS.items():
        cells = [text_of(figures) for figures in facts.ranks]
        if any(cells):
            columns.append([name, *(cell or "-" for cell in cells)])
    return [list(row) for row in zip(*columns, strict=True)] if len(columns) > 1 else []


def _count_cell(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _rate_cell(rate: float | None) -> str:
    return "" if rate is None else _rate_text(rate)


def _bytes_cell(size: int | None) -> str:
    return format_bytes(size) if size else ""


_FIGURE_COLUMNS: dict[str, Callable[[RankFigures], str]] = {
    "steps": lambda figures: _count_cell(figures.steps),
    "steps/s": lambda figures: _rate_cell(figures.steps_per_s),
    "samples": lambda figures: _count_cell(figures.samples),
    "samples/s": lambda figures: _rate_cell(figures.samples_per_s),
    "most host memory": lambda figures: _bytes_cell(figures.peak_host_bytes),
    "most device memory": lambda figures: _bytes_cell(figures.peak_device_bytes),
}


def warning_lines(facts: RunFacts) -> list[str]:
    """Each warning with how often and where it was seen."""
    has_ranks = len(facts.ranks) > 1
    return [
        f"{seen.text} ({count_noun(seen.count, 'time')}"
        + (f", rank {number_ranges(seen.ranks)})" if has_ranks else ")")
        for seen in facts.warnings
    ]


def report_lines(facts: RunFacts) -> list[str]:
    """The report for a terminal."""
    title, details = headline_of(facts)
    lines = [f"{title} · {' · '.join(details)}"]
    timed_ranks = facts.timed_ranks
    if timed_ranks:
        lines += ["", "Time by rank", *_indented(_time_rows(timed_ranks))]
        key = ", ".join(f"{_BAR_LETTERS[kind]} {label}" for kind, label in TIME_KINDS.items())
        lines += [f"  {key}"]
        if len(timed_ranks) > 1:
            lines += [f"  {slowest_sentence(facts.slowest, timed_ranks)}"]
        if left_out := starting_sentence(timed_ranks):
            lines += [f"  {left_out}"]
    else:
        lines += ["", "Time by rank: no loop over batches was seen."]
    if facts.metric_names:
        lines += ["", "Curves", *_indented(_curve_rows(facts))]
    if rows := figure_rows(facts):
        lines += ["", "Steps and memory", *_indented(rows)]
    if warnings := warning_lines(facts):
        lines += ["", "Warnings", *(f"  - {line}" for line in warnings)]
    lines += ["", "Plan", *(f"  {line}".rstrip() for line in facts.plan.text.split("\n"))]
    if facts.notes:
        lines += ["", "How it was measured", *(f"  - {note}" for note in facts.notes)]
    return lines


def _time_rows(ranks: Sequence[RankTimes]) -> list[list[str]]:
    rows = [["rank", "", *TIME_KINDS.values()]]
    for times in ranks:
        seconds = {kind: part_of_time(times, kind) for kind in TIME_KINDS}
        cells = [percent_of(part_s, times.steady_s) for part_s in seconds.values()]
        rows.append([str(times.rank), _text_bar(seconds, times.steady_s), *cells])
    return rows


def _text_bar(seconds: dict[str, float], total_s: float) -> str:
    bar = ""
    ended_s = 0.0
    for kind, part_s in seconds.items():
        ended_s += part_s
        # From the sum, so that all bars are equally long.
        until = round(_BAR_CHARS * min(1.0, ended_s / total_s)) if total_s > 0 else 0
        bar += _BAR_LETTERS[kind] * (until - len(bar))
    return bar


def _curve_rows(facts: RunFacts) -> list[list[str]]:
    rows = []
    for name in facts.metric_names:
        curve = next(curve for curve in facts.curves if curve.name == name)
        first = short_number(curve.values[0])
        last = short_number(curve.values[-1])
        rows.append([name, sparkline(curve.values), f"{first} → {last}"])
    return rows


def _indented(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]
