"""A finished run as one line, as the summary that stays in its cell, and as a report.

A report is a list of sections, each of which is drawn in two forms: as lines for a terminal, and
as HTML for a notebook or a file of its own. The HTML has inline styles only and no script; the
file adds a style sheet for its page.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nbaccel.base.units import (
    count_noun,
    format_bytes,
    format_number,
    format_seconds,
    number_ranges,
)
from nbaccel.output.panel.curves import metric_chart, sparkline
from nbaccel.output.panel.facts import RunBoard, mean
from nbaccel.output.panel.live_html import (
    PANEL_STYLE,
    SUMMARY_STYLE,
    advice_html,
    html_table,
    lines_block,
    printed_html,
    quiet,
    rank_times_html,
    titled,
)
from nbaccel.output.panel.rank_times import (
    TIME_KINDS,
    percent_of,
    slowest_sentence,
    starting_sentence,
)
from nbaccel.output.panel.words import (
    LABEL_CHARS,
    filled_columns,
    plain_text,
    rate_text,
    step_words,
)
from nbaccel.output.report.run_facts import RankFigures, RunFacts

_MOST_CHARTS = 16  # as many as a rank reports
_SIGNS = {"": "✓", "stopped": "■", "failed": "✗", "timed out": "✗"}

_PART_STYLE = "font-size:13px;line-height:1.5;max-width:1120px"
_HEADING_STYLE = "font-size:14px;font-weight:600;margin:1.4em 0 0.5em"
_CHARTS_STYLE = (
    "display:grid;gap:0.8em 1.6em;"
    "grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr))"
)
_PAGE_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1c1f23; }
@media (prefers-color-scheme: dark) { :root { --page: #111418; --text: #e6e9ed; } }
body { margin: 0 auto; padding: 24px; max-width: 1120px; background: var(--page);
       color: var(--text); font-family: system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 20px; font-weight: 600; margin: 0 0 0.3em; }
"""


# ------------------------------------------------------------------------- one line


def finished_line(facts: RunFacts) -> str:
    """`2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 ▇▅▂ · up to 1 GiB each`."""
    parts = _finished_parts(facts, with_curve=True)
    return " · ".join([count_noun(len(facts.ranks), "rank"), *parts])


def _finished_parts(facts: RunFacts, *, with_curve: bool = False) -> list[str]:
    """How it ended, and the most important figures."""
    ending = f"{facts.ending} after " if facts.ending else ""
    parts = [f"{ending}{format_seconds(facts.seconds)}"]
    if leading := next((figures for figures in facts.ranks if figures.steps is not None), None):
        is_cut = facts.ending and leading.steps_in_all != leading.steps
        in_all = leading.steps_in_all if is_cut else None
        rate = leading.steps_per_s
        parts += step_words(leading.steps, in_all, rate, facts.samples_per_s, leading.compiled)
    if names := facts.metric_names:
        curves = [*facts.curves[names[0]].values()]
        loss = format_number(mean(points[-1][1] for points in curves))
        curve = f" {sparkline([y for _, y in curves[0]])}" if with_curve else ""
        parts.append(f"{plain_text(names[0], LABEL_CHARS)} {loss}{curve}")
    if facts.slowest is not None:
        share = facts.slowest.waited_share * 100
        parts.append(f"{share:.0f} % waited for rank {facts.slowest.rank}")
    if on_host := most_bytes(facts, "peak_host_bytes"):
        each = " each" if len(facts.ranks) > 1 else ""
        on_device = most_bytes(facts, "peak_device_bytes")
        parts.append(f"up to {on_host}{each}{f' (on the device {on_device})' if on_device else ''}")
    return parts


def most_bytes(facts: RunFacts, name: str) -> str:
    """`1.0 GiB`, the most of all ranks; empty where it is not known."""
    return _size(max((getattr(figures, name) or 0 for figures in facts.ranks), default=0))


def title_of(facts: RunFacts) -> str:
    """What was run."""
    name = plain_text(facts.title, LABEL_CHARS) or "Run"
    return f"{name} on {count_noun(facts.plan.num_processes, 'worker')}"


# ------------------------------------------------------------------------- sections


@dataclass(frozen=True, slots=True)
class _Section:
    heading: str
    lines: Sequence[str]
    html: str


def _sections(facts: RunFacts, names: Sequence[str], *, as_image: bool) -> Iterator[_Section]:
    yield _time_section(facts)
    yield _curve_section(facts, names, as_image=as_image)
    if rows := _figure_rows(facts):
        yield _Section("Steps and memory", indented(rows), html_table(rows))
    yield _list_section("Warnings", _warning_lines(facts))
    plan = [f"  {line}".rstrip() for line in facts.plan.text.split("\n")]
    yield _Section("Plan", plan, lines_block(facts.plan.text, scrolls=False))
    yield _list_section("How it was measured", facts.notes)


def _list_section(heading: str, items: Sequence[str]) -> _Section:
    entries = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    drawn = f'<ul style="margin:0;padding-left:1.4em">{entries}</ul>' if items else ""
    return _Section(heading, [f"  - {item}" for item in items], drawn)


def _time_section(facts: RunFacts) -> _Section:
    ranks = facts.timed_ranks
    if not ranks:
        words = "No loop over batches was seen."
        return _Section("Time by rank", [f"  {words}"], f"<div>{quiet(words)}</div>")
    slowest = slowest_sentence(facts.slowest, ranks) if len(ranks) > 1 else ""
    left_out = starting_sentence(ranks)
    rows = [["rank", *TIME_KINDS, "together"]]
    for rank, times in ranks.items():
        cells = [
            f"{format_seconds(part_s)} ({percent_of(part_s, times.steady_s)})"
            for part_s in times.parts.values()
        ]
        rows.append([str(rank), *cells, format_seconds(times.steady_s)])
    return _Section(
        "Time by rank",
        [*indented(rows), *(f"  {words}" for words in (slowest, left_out) if words)],
        f"<div>{html.escape(slowest)}</div>{rank_times_html(ranks)}{html_table(rows)}"
        + (f"<div>{quiet(left_out)}</div>" if left_out else ""),
    )


def _curve_section(facts: RunFacts, names: Sequence[str], *, as_image: bool) -> _Section:
    rows = []
    for name in facts.metric_names:
        points = next(iter(facts.curves[name].values()))
        rows.append([name, sparkline([y for _, y in points]), from_to(points)])
    charts = "".join(_chart(facts, name, as_image=as_image) for name in names[:_MOST_CHARTS])
    more = f"<div>{quiet(', '.join(names[_MOST_CHARTS:]))}</div>"
    drawn = f'<div style="{_CHARTS_STYLE}">{charts}</div>{more}' if charts else ""
    return _Section("Curves", indented(rows), drawn)


def _chart(facts: RunFacts, name: str, *, as_image: bool) -> str:
    return titled(name, metric_chart(facts.curves[name], name, facts.marks, as_image=as_image))


def from_to(points: Sequence[tuple[float, float]] | None) -> str:
    """`2.3 → 0.4`: the first and the last value of a curve."""
    return f"{format_number(points[0][1])} → {format_number(points[-1][1])}" if points else "-"


_FIGURE_COLUMNS: dict[str, Callable[[RankFigures], str]] = {
    "state": lambda figures: figures.state,
    "progress": lambda figures: figures.progress,
    "steps": lambda figures: f"{figures.steps:,}" if figures.steps else "",
    "steps/s": lambda figures: rate_text(figures.steps_per_s),
    "samples": lambda figures: f"{figures.samples:,}" if figures.samples else "",
    "samples/s": lambda figures: rate_text(figures.samples_per_s),
    "most host memory": lambda figures: _size(figures.peak_host_bytes),
    "most device memory": lambda figures: _size(figures.peak_device_bytes),
}


def _size(num_bytes: int | None) -> str:
    return format_bytes(num_bytes) if num_bytes else ""


def _figure_rows(facts: RunFacts) -> list[list[str]]:
    """What each rank has done and needed; columns without any value are left out."""
    columns = {"rank": [str(figures.rank) for figures in facts.ranks]}
    for name, text_of in _FIGURE_COLUMNS.items():
        columns[name] = [plain_text(text_of(one), 2 * LABEL_CHARS) for one in facts.ranks]
    for name in facts.metric_names[:1]:
        cells = [from_to(facts.curves[name].get(figures.rank)) for figures in facts.ranks]
        columns[plain_text(name, LABEL_CHARS)] = cells
    rows = filled_columns(columns, "rank")
    return rows if len(rows[0]) > 1 else []


def _warning_lines(facts: RunFacts) -> list[str]:
    """Each warning with how often and where it was seen."""
    has_ranks = len(facts.ranks) > 1
    return [
        f"{seen.text} ({count_noun(seen.count, 'time')}"
        + (f", rank {number_ranges(seen.ranks)})" if has_ranks else ")")
        for seen in facts.warnings
    ]


# ------------------------------------------------------------------------- as text


def report_lines(facts: RunFacts) -> list[str]:
    """The report for a terminal."""
    lines = [f"{title_of(facts)} · {' · '.join(_finished_parts(facts))}"]
    lines += [f"! {sentence}" for sentence in facts.advice]
    for section in _sections(facts, (), as_image=False):
        if section.lines:
            lines += ["", section.heading, *section.lines]
    return lines


def indented(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


# ------------------------------------------------------------------------- as HTML


def report_part(facts: RunFacts) -> str:
    """The report as a part of a page."""
    title = html.escape(title_of(facts))
    parts = quiet(" · ".join(_finished_parts(facts)))
    headline = f"<div><b>{title}</b> {parts}</div>"
    return _part_html(facts, headline + advice_html(facts.advice), facts.metric_names)


def _part_html(facts: RunFacts, above: str, names: Sequence[str], *, as_image: bool = True) -> str:
    sections = "".join(
        # No heading element: the outline of a notebook would list it.
        f'<div role="heading" aria-level="2" style="{_HEADING_STYLE}">{section.heading}</div>'
        f"{section.html}"
        for section in _sections(facts, names, as_image=as_image)
        if section.html
    )
    return f'<div style="{_PART_STYLE}">{above}{sections}</div>'


def report_document(facts: RunFacts) -> str:
    """A whole HTML file that needs nothing beside it."""
    title = html.escape(title_of(facts))
    advice = advice_html(facts.advice)
    began = facts.began.replace("T", " ").replace("+00:00", " UTC")
    origin = quiet(f"Began {began} · nbaccel {facts.nbaccel_version}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n<p>{html.escape(' · '.join(_finished_parts(facts)))}</p>\n"
        f"{_part_html(facts, advice, facts.metric_names, as_image=False)}\n"
        f'<p style="font-size:13px">{origin}</p>\n</body>\n</html>\n'
    )


def summary_html(board: RunBoard, facts: RunFacts, *, folds_chart: bool = False) -> str:
    """What stays of a run in its cell: one line that unfolds to the report, and the chart."""
    words = html.escape(" · ".join(_finished_parts(facts)))
    headline = f"{_SIGNS[facts.ending]} <b>{count_noun(len(facts.ranks), 'rank')}</b> · {words}"
    names = facts.metric_names
    in_sight = [] if folds_chart else names[:1]
    report = _part_html(facts, "", names[len(in_sight) :]) + printed_html(board)
    charts = "".join(_chart(facts, name, as_image=True) for name in in_sight)
    return (
        f'<div style="{PANEL_STYLE}"><details><summary style="{SUMMARY_STYLE}">{headline}</summary>'
        # In sight, and not only in the report.
        f"{report}</details>{advice_html(facts.advice)}{charts}</div>"
    )
