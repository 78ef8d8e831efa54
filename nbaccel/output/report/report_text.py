"""A finished run as one line, and its report as lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges
from nbaccel.output.chart import short_number
from nbaccel.output.panel.facts import mean
from nbaccel.output.panel.rank_times import (
    TIME_KINDS,
    RankTimes,
    part_of_time,
    percent_of,
    slowest_sentence,
    starting_sentence,
)
from nbaccel.output.panel.words import LABEL_CHARS, number_text, plain_text, rate_text, sparkline
from nbaccel.output.report.run_facts import RankFigures, RunFacts

__all__ = [
    "figure_rows",
    "finished_line",
    "finished_parts",
    "report_lines",
    "title_of",
    "warning_lines",
]

_BAR_CHARS = 32
_BAR_LETTERS = {"computing": "█", "communicating": "▒", "data": "d", "waiting": "·"}


def finished_line(facts: RunFacts) -> str:
    """`2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 ▇▅▂ · up to 1 GiB each`."""
    parts = finished_parts(facts, with_curve=True)
    return " · ".join([count_noun(len(facts.ranks), "rank"), *parts])


def finished_parts(facts: RunFacts, *, with_curve: bool = False) -> list[str]:
    """How it ended, and the most important figures."""
    ending = f"{facts.ending} after " if facts.ending else ""
    parts = [f"{ending}{format_seconds(facts.seconds)}", *_training_words(facts)]
    if names := facts.metric_names:
        curves = [curve for curve in facts.curves if curve.name == names[0]]
        curve = f" {sparkline(curves[0].values)}" if with_curve else ""
        loss = mean(curve.values[-1] for curve in curves)
        parts.append(f"{plain_text(names[0], LABEL_CHARS)} {number_text(loss)}{curve}")
    if facts.slowest is not None:
        share = facts.slowest.waited_share * 100
        parts.append(f"{share:.0f} % waited for rank {facts.slowest.rank}")
    return [*parts, *_memory_words(facts)]


def _training_words(facts: RunFacts) -> list[str]:
    """`step 280 of 840 (70/s)`, `560 samples/s`."""
    leading = next((figures for figures in facts.ranks if figures.steps is not None), None)
    if leading is None:
        return []
    parts = []
    # 0 of a function that only has times to tell: it counts no steps.
    if leading.steps:
        is_cut = facts.ending and leading.steps_in_all not in (None, leading.steps)
        of_words = f" of {leading.steps_in_all:,}" if is_cut else ""
        rate = leading.steps_per_s
        speed = f" ({rate_text(rate)}/s)" if rate is not None else ""
        parts.append(f"step {leading.steps:,}{of_words}{speed}")
        if facts.samples_per_s:
            parts.append(f"{rate_text(facts.samples_per_s)} samples/s")
    return [*parts, leading.compiled] if leading.compiled else parts


def _memory_words(facts: RunFacts) -> list[str]:
    """`up to 1 GiB each (on the device 3 GiB)`."""
    most = max((figures.peak_host_bytes or 0 for figures in facts.ranks), default=0)
    if not most:
        return []
    each = " each" if len(facts.ranks) > 1 else ""
    on_device = max((figures.peak_device_bytes or 0 for figures in facts.ranks), default=0)
    beside = f" (on the device {format_bytes(on_device)})" if on_device else ""
    return [f"up to {format_bytes(most)}{each}{beside}"]


def title_of(facts: RunFacts) -> str:
    """What was run."""
    return f"Run on {count_noun(facts.plan.num_processes, 'worker')}"


def figure_rows(facts: RunFacts) -> list[list[str]]:
    """What each rank has done and needed; columns without any value are left out."""
    columns = [["rank", *(str(figures.rank) for figures in facts.ranks)]]
    for name, text_of in _FIGURE_COLUMNS.items():
        cells = [plain_text(text_of(figures), 2 * LABEL_CHARS) for figures in facts.ranks]
        if any(cells):
            columns.append([name, *(cell or "-" for cell in cells)])
    if names := facts.metric_names:
        cells = [_from_to(facts.curves_of(names[0]).get(figures.rank)) for figures in facts.ranks]
        columns.append([plain_text(names[0], LABEL_CHARS), *cells])
    return [list(row) for row in zip(*columns, strict=True)] if len(columns) > 1 else []


def _from_to(points: Sequence[tuple[float, float]] | None) -> str:
    return f"{number_text(points[0][1])} → {number_text(points[-1][1])}" if points else "-"


def _count_cell(count: int | None) -> str:
    return f"{count:,}" if count else ""


def _rate_cell(rate: float | None) -> str:
    return "" if rate is None else rate_text(rate)


def _bytes_cell(size: int | None) -> str:
    return format_bytes(size) if size else ""


_FIGURE_COLUMNS: dict[str, Callable[[RankFigures], str]] = {
    "state": lambda figures: figures.state,
    "progress": lambda figures: figures.progress,
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
    lines = [f"{title_of(facts)} · {' · '.join(finished_parts(facts))}"]
    lines += [f"! {sentence}" for sentence in facts.advice]
    times = facts.timed_ranks
    if times:
        lines += ["", "Time by rank", *_indented(_time_rows(times))]
        key = ", ".join(f"{_BAR_LETTERS[kind]} {label}" for kind, label in TIME_KINDS.items())
        lines += [f"  {key}"]
        if len(times) > 1:
            lines += [f"  {slowest_sentence(facts.slowest, times)}"]
        if left_out := starting_sentence(times):
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
