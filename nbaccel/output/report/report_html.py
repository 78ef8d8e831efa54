"""A report as HTML: a part of a notebook's output, or a file of its own.

The part has inline styles only, no colour that does not read on light and dark backgrounds, and no
script; the file adds a style sheet for its page. Parts of a bar differ in pattern, and each is
written out as a number, too.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from nbaccel.base.units import count_noun
from nbaccel.output.chart import line_chart
from nbaccel.output.panel.curves import few_marks, metric_lines
from nbaccel.output.panel.facts import RunBoard
from nbaccel.output.panel.live_html import (
    PANEL_STYLE,
    SUMMARY_STYLE,
    advice_html,
    folded,
    is_long,
    left_out_html,
    library_html,
    lines_block,
    lines_text,
    titled_chart,
)
from nbaccel.output.panel.rank_times import (
    TIME_KINDS,
    RankTimes,
    part_of_time,
    percent_of,
    rank_bars_html,
    slowest_sentence,
    spent_s,
    starting_sentence,
)
from nbaccel.output.panel.words import LINE_CHARS, plain_text
from nbaccel.output.report.report_text import figure_rows, finished_parts, title_of, warning_lines
from nbaccel.output.report.run_facts import RunFacts

__all__ = ["report_document", "report_part", "summary_html"]

_MOST_CHARTS = 16  # as many as a rank reports
_SAVED_LINES = 50
_ENDING_SIGNS = {"": "✓", "stopped": "■"}
_FAILED_SIGN = "✗"

_PART_STYLE = "font-size:13px;line-height:1.5;max-width:1120px"
_HEADING_STYLE = "font-size:14px;font-weight:600;margin:1.4em 0 0.5em"
_TABLE_CELL_STYLE = (
    "text-align:left;padding:0.15em 1.6em 0.15em 0;border:none;background:none;"
    "font-weight:normal;white-space:nowrap;font-variant-numeric:tabular-nums"
)
_SOFT_STYLE = "opacity:0.7"
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


def summary_html(board: RunBoard, facts: RunFacts, *, folds_chart: bool = False) -> str:
    """What stays of a run in its cell: one line that unfolds to the report, and the chart."""
    sign = _ENDING_SIGNS.get(facts.ending, _FAILED_SIGN)
    words = count_noun(len(facts.ranks), "rank")
    headline = f"{sign} <b>{words}</b> · {html.escape(' · '.join(finished_parts(facts)))}"
    details = "".join(
        [
            report_part(
                facts, has_headline=False, first_chart=int(not folds_chart), has_advice=False
            ),
            left_out_html(board),
            *(_saved_lines(board) if is_long(board) else ()),
            library_html(board),
        ]
    )
    name = "" if folds_chart else next(iter(facts.metric_names), "")
    chart = titled_chart(board, name, as_image=True)
    # In sight, and not only in the report.
    advice = advice_html(facts.advice)
    return (
        f'<div style="{PANEL_STYLE}"><details><summary style="{SUMMARY_STYLE}">{headline}</summary>'
        f"{details}</details>{advice}{chart}</div>"
    )


def _saved_lines(board: RunBoard) -> Iterable[str]:
    """The last lines of each rank, folded away; all that was printed stands below."""
    for rank, lines in sorted(board.recent_lines.items()):
        text = lines_text(lines[-_SAVED_LINES:], with_ranks=False)
        yield folded(f"last lines of rank {rank}", lines_block(text))


def report_document(facts: RunFacts) -> str:
    """A whole HTML file that needs nothing beside it."""
    title = title_of(facts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(' · '.join(finished_parts(facts)))}</p>\n"
        f"{report_part(facts, has_headline=False, charts_are_images=False)}\n"
        f'<p style="font-size:13px">{_soft(_origin_line(facts))}</p>\n</body>\n</html>\n'
    )


def report_part(
    facts: RunFacts,
    *,
    has_headline: bool = True,
    charts_are_images: bool = True,
    first_chart: int = 0,
    has_advice: bool = True,
) -> str:
    """The report as a part of a page; charts before `first_chart` are elsewhere on it."""
    parts = " · ".join(finished_parts(facts))
    headline = f"<div><b>{title_of(facts)}</b> {_soft(parts)}</div>" if has_headline else ""
    sections = (
        advice_html(facts.advice if has_advice else ()),
        _time_section(facts),
        _curve_section(facts, facts.metric_names[first_chart:], as_image=charts_are_images),
        _rank_section(facts),
        _warning_section(facts),
        _section("Plan", lines_block(facts.plan.text, scrolls=False)),
        _note_section(facts),
    )
    return f'<div style="{_PART_STYLE}">{headline}{"".join(sections)}</div>'


def _origin_line(facts: RunFacts) -> str:
    began = facts.began.replace("T", " ").replace("+00:00", " UTC")
    return f"Began {began} · nbaccel {facts.nbaccel_version}"


def _section(heading: str, content: str) -> str:
    # No heading element: the outline of a notebook would list it.
    heading_html = (
        f'<div role="heading" aria-level="2" style="{_HEADING_STYLE}">{html.escape(heading)}</div>'
    )
    return f"{heading_html}{content}" if content else ""


def _soft(text: str) -> str:
    return f'<span style="{_SOFT_STYLE}">{html.escape(text)}</span>'


# ------------------------------------------------------------------------- time


def _time_section(facts: RunFacts) -> str:
    ranks = facts.timed_ranks
    if not ranks:
        return _section("Time", f"<div>{_soft('No loop over batches was seen.')}</div>")
    sentence = slowest_sentence(facts.slowest, ranks) if len(ranks) > 1 else ""
    left_out = starting_sentence(ranks)
    return _section(
        "Time by rank",
        f"<div>{html.escape(sentence)}</div>{rank_bars_html(ranks)}{_time_table(ranks)}"
        + (f"<div>{_soft(left_out)}</div>" if left_out else ""),
    )


def _time_table(ranks: Sequence[RankTimes]) -> str:
    rows = [["rank", *TIME_KINDS.values(), "together"]]
    rows += [
        [
            str(times.rank),
            *(
                f"{spent_s(seconds)} ({percent_of(seconds, times.steady_s)})"
                for kind in TIME_KINDS
                for seconds in (part_of_time(times, kind),)
            ),
            spent_s(times.steady_s),
        ]
        for times in ranks
    ]
    return _html_table(rows)


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    head_html = "".join(
        f'<th scope="col" style="{_TABLE_CELL_STYLE};{_SOFT_STYLE}">{html.escape(cell)}</th>'
        for cell in head
    )
    body_html = "".join(
        f'<tr style="background:none"><th scope="row" style="{_TABLE_CELL_STYLE}">'
        f"{html.escape(rank)}</th>"
        + "".join(f'<td style="{_TABLE_CELL_STYLE}">{html.escape(cell)}</td>' for cell in row)
        + "</tr>"
        for rank, *row in body
    )
    return (
        '<div style="overflow-x:auto"><table style="border:none;border-collapse:collapse;margin:0">'
        f'<thead><tr style="background:none">{head_html}</tr></thead>'
        f"<tbody>{body_html}</tbody></table></div>"
    )


# ------------------------------------------------------------------------- curves


def _curve_section(facts: RunFacts, names: Sequence[str], *, as_image: bool) -> str:
    charts = [
        f'<div style="min-width:0"><div style="margin-bottom:2px">'
        f"{html.escape(plain_text(name, LINE_CHARS))}</div>"
        + line_chart(
            metric_lines(facts.curves_of(name)),
            title=name,
            x_label="step",
            marks=few_marks(facts.marks),
            as_image=as_image,
        )
        + "</div>"
        for name in names[:_MOST_CHARTS]
    ]
    if not charts:
        return ""
    more = f"<div>{_soft(', '.join(names[_MOST_CHARTS:]))}</div>" if names[_MOST_CHARTS:] else ""
    return _section("Curves", f'<div style="{_CHARTS_STYLE}">{"".join(charts)}</div>{more}')


# ------------------------------------------------------------------------- the rest


def _rank_section(facts: RunFacts) -> str:
    rows = figure_rows(facts)
    return _section("Steps and memory", _html_table(rows)) if len(rows) > 1 else ""


def _warning_section(facts: RunFacts) -> str:
    lines = warning_lines(facts)
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return _section("Warnings", f'<ul style="margin:0;padding-left:1.4em">{items}</ul>')


def _note_section(facts: RunFacts) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in facts.notes)
    return _section(
        "How it was measured",
        f'<ul style="margin:0;padding-left:1.4em;{_SOFT_STYLE}">{items}</ul>' if items else "",
    )
