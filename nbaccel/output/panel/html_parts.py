"""Pieces of HTML that the panel, the summary of a run and reports are made of.

No script and no style sheet: they pass Jupyter's sanitizer, and read on light and dark
backgrounds. Where styles are left out, too, the words say the same.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Mapping, Sequence

from nbaccel.base.units import format_seconds
from nbaccel.output.panel.rank_times import TIME_KINDS, RankTimes, percent_of
from nbaccel.output.panel.words import LINE_CHARS, plain_text

PANEL_STYLE = "font-size:0.9em;line-height:1.5"
QUIET_STYLE = "opacity:0.65"
ADVICE_COLOUR = "#d9730d"
"""Beside the text, which has its own colour: it is seen on light and on dark."""
# The display is that of browsers, which Notebook 6 takes the triangle from.
SUMMARY_STYLE = "cursor:pointer;display:list-item"
_CELL_STYLE = (
    "text-align:left;vertical-align:top;padding:0.1em 1.2em 0.1em 0;border:none;background:none;"
    "font-weight:normal;white-space:nowrap;max-width:none;font-variant-numeric:tabular-nums"
)
_LINES_STYLE = (
    "margin:0.3em 0 0 0;padding:0.3em 0;white-space:pre-wrap;"
    "overflow-wrap:anywhere;line-height:1.35;background:none"
)
_ROW_STYLE = "display:flex;align-items:center;gap:10px;margin:4px 0;max-width:640px"
# White lines on the colour, in another direction for each: no colour is needed to tell them apart.
_STRIPES = "repeating-linear-gradient({angle},rgba(255,255,255,0.45) 0 2px,transparent 2px 6px)"
_BAR_LOOKS = {
    "computing": "background-color:#1976d2",
    "communicating": f"background-color:#d9730d;background-image:{_STRIPES.format(angle='45deg')}",
    "waiting for data": (
        f"background-color:#8e44ad;background-image:{_STRIPES.format(angle='90deg')}"
    ),
    "waiting for others": (
        f"background-color:#7b8794;background-image:{_STRIPES.format(angle='45deg')},"
        f"{_STRIPES.format(angle='135deg')}"
    ),
}
"""Colour and pattern apart: of a notebook that is not trusted JupyterLab drops the patterns."""
_MOST_BARS = 16


def quiet(text: str) -> str:
    """A text of less weight."""
    return f'<span style="{QUIET_STYLE}">{html.escape(text)}</span>'


def folded(title: str, content: str) -> str:
    """Something behind a title that unfolds it."""
    style = f"{SUMMARY_STYLE};{QUIET_STYLE}"
    return f'<details><summary style="{style}">{html.escape(title)}</summary>{content}</details>'


def advice_html(sentences: Iterable[str]) -> str:
    """What is wrong, and what to do; empty for nothing."""
    style = f"border-left:3px solid {ADVICE_COLOUR};padding-left:0.6em;margin:0.3em 0"
    return "".join(f'<div style="{style}">{html.escape(sentence)}</div>' for sentence in sentences)


def html_table(rows: Sequence[Sequence[str]], *, is_html: bool = False, rest: str = "") -> str:
    """A table; the first row and the first column are heads, and `rest` fills a row at the end."""
    if not is_html:
        rows = [[html.escape(cell) for cell in row] for row in rows]
    head, *body = rows
    lines = "".join(
        f'<tr style="background:none"><th scope="row" style="{_CELL_STYLE}">{first}</th>'
        + "".join(f'<td style="{_CELL_STYLE}">{cell}</td>' for cell in cells)
        + "</tr>"
        for first, *cells in body
    )
    if rest:
        lines += (
            f'<tr style="background:none"><td colspan="{len(head)}" '
            f'style="{_CELL_STYLE};{QUIET_STYLE}">{html.escape(rest)}</td></tr>'
        )
    heads = "".join(
        f'<th scope="col" style="{_CELL_STYLE};{QUIET_STYLE}">{cell}</th>' for cell in head
    )
    return (
        '<div style="overflow-x:auto"><table style="border:none;border-collapse:collapse;'
        'margin:0.2em 0;table-layout:auto"><thead style="border:none"><tr style="background:none">'
        f"{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def lines_block(text: str, *, scrolls: bool = True) -> str:
    """A text as it is."""
    # Front ends let a `<pre>` scroll by itself, and would show the start of it.
    style = "max-height:14em;overflow:auto" if scrolls else "flex:none;overflow:visible"
    lines = [plain_text(line, LINE_CHARS * 4, keeps_start=True) for line in text.split("\n")]
    return f'<pre style="{_LINES_STYLE};{style}">{html.escape(chr(10).join(lines))}</pre>'


def titled(name: str, chart: str) -> str:
    """A chart below its name; empty where there is none."""
    title = quiet(plain_text(name, LINE_CHARS))
    return f'<div style="margin-top:0.3em">{title}<br>{chart}</div>' if chart else ""


def rank_times_html(timed_ranks: Mapping[int, RankTimes]) -> str:
    """A bar for each rank; a table beside them says the same to screen readers."""
    longest_s = max((times.steady_s for times in timed_ranks.values()), default=0.0) or 1.0
    rows = "".join(
        f'<div style="{_ROW_STYLE}"><div style="width:4.5em">rank {rank}</div>'
        f"{_time_bar(times.parts, longest_s)}</div>"
        for rank, times in itertools.islice(timed_ranks.items(), _MOST_BARS)
    )
    return f'<div aria-hidden="true">{rows}{_time_legend(TIME_KINDS)}</div>'


def mean_time_html(timed_ranks: Mapping[int, RankTimes]) -> str:
    """One bar for all ranks together, with the part of each kind; empty where none is known."""
    seconds = {kind: sum(one.parts[kind] for one in timed_ranks.values()) for kind in TIME_KINDS}
    total_s = sum(seconds.values())
    if total_s <= 0:
        return ""
    words = [f"{kind} {percent_of(part_s, total_s)}" for kind, part_s in seconds.items()]
    bar = _time_bar(seconds, total_s)
    return f'<div style="{_ROW_STYLE}">{quiet("time")}{bar}</div>{_time_legend(words)}'


def _time_bar(seconds: Mapping[str, float], full_s: float) -> str:
    parts = "".join(
        f'<div title="{kind}: {format_seconds(part_s)}" '
        f'style="width:{100 * part_s / full_s:.2f}%;{_BAR_LOOKS[kind]}"></div>'
        for kind, part_s in seconds.items()
        if part_s > 0
    )
    style = "flex:1;display:flex;height:14px;border-radius:3px;overflow:hidden"
    return f'<div aria-hidden="true" style="{style}">{parts}</div>'


def _time_legend(words: Iterable[str]) -> str:
    """What each pattern means."""
    # Where styles are dropped, the blanks between keep the words apart.
    entries = " ".join(
        '<span style="display:inline-flex;align-items:center;gap:6px">'
        '<span aria-hidden="true" style="display:inline-block;width:18px;height:12px;'
        f'border-radius:2px;{looks}"></span>{html.escape(text)}</span>'
        for text, looks in zip(words, _BAR_LOOKS.values(), strict=True)
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 8px">{entries}</div>'
