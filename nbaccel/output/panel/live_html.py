"""A run that goes on as HTML: for front ends without widgets, and as the parts of the panel's.

No script and no style sheet: it passes Jupyter's sanitizer, and reads on light and dark
backgrounds. Where styles are left out, too, the words say the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges
from nbaccel.output.chart import ACCENT_COLOUR
from nbaccel.output.folded_lines import RecentLine
from nbaccel.output.panel.advice import advice_of
from nbaccel.output.panel.curves import metric_chart
from nbaccel.output.panel.facts import RankFacts, RunBoard
from nbaccel.output.panel.rank_times import mean_time_html
from nbaccel.output.panel.words import (
    LABEL_CHARS,
    LINE_CHARS,
    MOST_ROWS,
    NO_VALUE,
    ShownProgress,
    left_out_sentence,
    live_parts,
    memory_range,
    number_text,
    plain_text,
    progress_of,
    rate_text,
)

__all__ = [
    "advice_html",
    "folded",
    "headline_html",
    "is_long",
    "left_out_html",
    "library_html",
    "lines_block",
    "lines_html",
    "lines_text",
    "live_html",
    "ranks_html",
    "titled_chart",
]

BY_HAND = "Stop: interrupt the cell (■)"
LONG_OUTPUT_LINES = 20
"""From so many lines on the newest are shown in the panel, too: the cell's end is out of sight."""
_SHOWN_LINES = 100
_SAME_S = 2.0
ADVICE_COLOUR = "#d9730d"
"""Beside the text, which has its own colour: it is seen on light and on dark."""
_MAX_SMALL_CHARTS = 6  # they are sent every second

PANEL_STYLE = "font-size:0.9em;line-height:1.5"
_TABLE_STYLE = "border:none;border-collapse:collapse;margin:0.2em 0;table-layout:auto"
_CELL_STYLE = (
    "text-align:left;vertical-align:top;padding:0.1em 1.2em 0.1em "
    "0;border:none;background:none;font-weight:normal;white-space:nowrap;max-width:none"
)
_NUMBER_STYLE = f"{_CELL_STYLE};font-variant-numeric:tabular-nums"
QUIET_STYLE = "opacity:0.65"
ADVICE_STYLE = f"border-left:3px solid {ADVICE_COLOUR};padding-left:0.6em;margin:0.3em 0"
# The display is that of browsers, which Notebook 6 takes the triangle from.
SUMMARY_STYLE = "cursor:pointer;display:list-item"
# A grey that lets any background through, as the empty part of a bar.
_TRACK_STYLE = (
    "display:inline-block;vertical-align:middle;width:7em;height:0.6em;border-radius:0.3em;"
    "overflow:hidden;margin-right:0.6em;background:rgba(128,128,128,0.3)"
)
_FILL_STYLE = f"display:block;height:100%;background:{ACCENT_COLOUR}"
_LINES_STYLE = (
    "margin:0.3em 0 0 0;padding:0.3em 0;white-space:pre-wrap;"
    "overflow-wrap:anywhere;line-height:1.35;background:none"
)
_SCROLLED_STYLE = "max-height:14em;overflow:auto"
_STATES_WORST_FIRST = ("failed", "gone", "ended", "stopping", "starting", "running")


def live_html(board: RunBoard, *, by_hand: bool) -> str:
    """The run while it goes on, where a front end cannot take clicks."""
    first, *others = board.metric_names() or [""]
    parts = [
        headline_html(board),
        advice_html(advice_of(board)),
        ranks_html(board),
        mean_time_html(board.times.by_rank()),
        titled_chart(board, first),
        _small_charts(board, others[:_MAX_SMALL_CHARTS]),
        left_out_html(board),
        folded("newest lines", lines_html(board)) if is_long(board) else "",
        library_html(board),
        f'<div style="{QUIET_STYLE}">{BY_HAND}</div>' if by_hand else "",
    ]
    return f'<div style="{PANEL_STYLE}">{"".join(parts)}</div>'


def is_long(board: RunBoard) -> bool:
    """Whether so much has been printed that the newest lines are out of sight."""
    return board.num_lines > LONG_OUTPUT_LINES


# ------------------------------------------------------------------------- its parts


def headline_html(board: RunBoard) -> str:
    """The first line: the chart and the rows tell of the rest."""
    parts = live_parts(board)
    words = count_noun(len(board.ranks), "rank")
    return f"<div><b>{words}</b> · {html.escape(' · '.join(parts))}</div>"


def advice_html(sentences: Iterable[str]) -> str:
    """What is wrong, and what to do; empty for nothing."""
    return "".join(
        f'<div style="{ADVICE_STYLE}">{html.escape(sentence)}</div>' for sentence in sentences
    )


def library_html(board: RunBoard) -> str:
    """The harmless messages of libraries, folded away; empty where there are none."""
    if not board.library_messages:
        return ""
    words = count_noun(board.num_library_messages, "message")
    return folded(f"{words} of libraries", lines_block("\n".join(board.library_messages)))


def left_out_html(board: RunBoard) -> str:
    """Which metrics are not drawn; empty where all are."""
    sentence = left_out_sentence(board)
    return f'<div style="{QUIET_STYLE}">{html.escape(sentence)}</div>' if sentence else ""


def lines_html(board: RunBoard, rank: int | None = None) -> str:
    """The newest lines, the newest first in sight."""
    lines = _recent_lines(board, rank)[-_SHOWN_LINES:]
    text = lines_text(lines, with_ranks=rank is None)
    # Upside down twice: a box that scrolls opens at its end, where the newest line is.
    return (
        f'<div style="display:flex;flex-direction:column-reverse;{_SCROLLED_STYLE}">'
        f"{lines_block(text, scrolls=False)}</div>"
    )


def _recent_lines(board: RunBoard, rank: int | None) -> list[RecentLine]:
    if rank is not None:
        return board.recent_lines.get(rank, [])
    by_number = {line.number: line for lines in board.recent_lines.values() for line in lines}
    return [by_number[number] for number in sorted(by_number)]


def lines_text(lines: Sequence[RecentLine], *, with_ranks: bool) -> str:
    """`[0-1] epoch 3`, or without the ranks."""
    return "\n".join(
        f"[{number_ranges(line.ranks)}] {line.text}" if with_ranks and line.ranks else line.text
        for line in lines
    )


def lines_block(text: str, *, scrolls: bool = True) -> str:
    """A text as it is."""
    # Front ends let a `<pre>` scroll by itself, and would show the start of it.
    style = _SCROLLED_STYLE if scrolls else "flex:none;overflow:visible"
    lines = [plain_text(line, LINE_CHARS * 4, keeps_start=True) for line in text.split("\n")]
    return f'<pre style="{_LINES_STYLE};{style}">{html.escape(chr(10).join(lines))}</pre>'


def folded(title: str, content: str) -> str:
    """Something behind a title that unfolds it."""
    return (
        f'<details><summary style="{SUMMARY_STYLE};{QUIET_STYLE}">{html.escape(title)}</summary>'
        f"{content}</details>"
    )


def titled_chart(board: RunBoard, name: str, *, as_image: bool = False) -> str:
    """A metric's chart below its name; empty where there is none."""
    chart = metric_chart(board, name, as_image=as_image)
    if not chart:
        return ""
    title = html.escape(plain_text(name, LINE_CHARS))
    return (
        f'<div style="margin-top:0.3em"><span style="{QUIET_STYLE}">{title}</span><br>{chart}</div>'
    )


def _small_charts(board: RunBoard, names: Sequence[str]) -> str:
    charts = [
        f'<div style="display:inline-block;margin-right:1em">{_metric_label(board, name)}<br>'
        f"{chart}</div>"
        for name in names
        if (chart := metric_chart(board, name, is_small=True))
    ]
    if not charts:
        return ""
    return folded(count_noun(len(charts), "other metric"), f"<div>{''.join(charts)}</div>")


def _metric_label(board: RunBoard, name: str) -> str:
    points = next(iter(board.curves(name).values()))
    label = f"{plain_text(name, LINE_CHARS)} {number_text(points[-1][1])}"
    return f'<span style="{QUIET_STYLE}">{html.escape(label)}</span>'


# ------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class _TableColumn:
    name: str
    cell: Callable[[RankFacts, RunBoard], str]
    """The cell's HTML; empty for no value."""


def ranks_html(board: RunBoard, *, with_metrics: bool = True) -> str:
    """The ranks, a row each."""
    shown, others = _shown_ranks(board)
    columns = [
        (_title(column.name, board), cells)
        for column in _COLUMNS
        if with_metrics or column.cell is not _other_metrics
        # A column without a value for any rank would only take space.
        if any(cells := [column.cell(facts, board) for facts in shown])
    ]
    head = "".join(
        f'<th scope="col" style="{_CELL_STYLE};{QUIET_STYLE}">{html.escape(name)}</th>'
        for name in ("rank", *(title for title, _ in columns))
    )
    rows = [
        f'<tr style="background:none"><th scope="row" style="{_NUMBER_STYLE}">{facts.rank}</th>'
        + "".join(
            f'<td style="{_NUMBER_STYLE}">{cells[row] or NO_VALUE}</td>' for _, cells in columns
        )
        + "</tr>"
        for row, facts in enumerate(shown)
    ]
    if others:
        rows.append(
            f'<tr style="background:none"><td colspan="{len(columns) + 1}" '
            f'style="{_CELL_STYLE};{QUIET_STYLE}">{html.escape(_rest_words(others))}</td></tr>'
        )
    return (
        f'<div style="overflow-x:auto"><table style="{_TABLE_STYLE}"><thead '
        f'style="border:none"><tr style="background:none">{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _shown_ranks(board: RunBoard) -> tuple[list[RankFacts], list[RankFacts]]:
    """The ranks that get a row, and those that share the last one: the worst are shown first."""
    ranks = list(board.ranks.values())
    if len(ranks) <= MOST_ROWS:
        return ranks, []
    by_need = sorted(ranks, key=_attention_need)
    return by_need[:MOST_ROWS], by_need[MOST_ROWS:]


def _attention_need(facts: RankFacts) -> tuple[int, float, int]:
    """Failed ones before stragglers before the rest."""
    states = [*_STATES_WORST_FIRST, facts.state]
    # Ranks that report no steps come behind those that are slow.
    steps = math.inf if facts.steps is None else facts.steps
    return states.index(facts.state), steps, facts.rank


def _rest_words(ranks: Sequence[RankFacts]) -> str:
    states = sorted({facts.state for facts in ranks})
    parts = [f"and {count_noun(len(ranks), 'more rank')}: {', '.join(states)}"]
    steps = [facts.steps for facts in ranks if facts.steps is not None]
    if steps:
        least = min(steps)
        most = max(steps)
        parts.append(f"step {most:,}" if least == most else f"steps {least:,} to {most:,}")
    parts.append(memory_range([facts.memory.rss for facts in ranks]))
    return " · ".join(parts)


# ------------------------------------------------------------------------- columns


def _state_cell(facts: RankFacts, board: RunBoard) -> str:
    """`training`, or `waiting in all_reduce, 12.0 s` with the line of code below it."""
    activity, _, place = facts.doing.partition(" (")
    words = plain_text(facts.phase or activity or facts.state, LINE_CHARS)
    # Not where that is the whole run, whose length the first line has.
    if facts.since >= board.began + _SAME_S:
        words += f", {format_seconds(max(0.0, board.now - facts.since))}"
    if not place:
        return html.escape(words)
    place = html.escape(plain_text(place.removesuffix(")"), LINE_CHARS))
    place_html = f'<span style="{QUIET_STYLE};font-family:monospace">{place}</span>'
    return f"{html.escape(words)}<br>{place_html}"


def _progress_cell(facts: RankFacts, board: RunBoard) -> str:
    return "<br>".join(map(_progress_html, progress_of(facts)))


def _progress_html(loop: ShownProgress) -> str:
    if loop.fraction is None:
        return html.escape(str(loop))
    # The words say what the bar shows: a bar alone would say nothing to a screen reader.
    bar = f'<span style="{_FILL_STYLE};width:{loop.fraction:.1%}"></span>'
    return (
        f'<span style="{_TRACK_STYLE}">{bar}</span>{loop.fraction * 100:.0f} %'
        f'<br><span style="{QUIET_STYLE}">{html.escape(loop.words)}</span>'
    )


def _step_cell(facts: RankFacts, board: RunBoard) -> str:
    """Where a loop shows how far a rank is, the first line's step is enough."""
    return "" if progress_of(facts) or not facts.steps else f"{facts.steps:,}"


def _speed_cell(facts: RankFacts, board: RunBoard) -> str:
    rate = facts.pace.recent(board.now)
    return "" if rate is None else rate_text(rate)


def _samples_cell(facts: RankFacts, board: RunBoard) -> str:
    rate = facts.samples_pace.recent(board.now)
    return "" if rate is None or not facts.samples else rate_text(rate)


_LOSS_COLUMN = "loss"


def _loss_cell(facts: RankFacts, board: RunBoard) -> str:
    if facts.loss.last is None:
        return ""
    label = "" if _common_loss_name(board) else f"{plain_text(facts.loss_name, LABEL_CHARS)} "
    return html.escape(f"{label}{number_text(facts.loss.last)}")


def _title(column_name: str, board: RunBoard) -> str:
    """The name of a column; that of the loss is the metric's, where all ranks log the same."""
    if column_name != _LOSS_COLUMN:
        return column_name
    return plain_text(_common_loss_name(board), LABEL_CHARS) or _LOSS_COLUMN


def _common_loss_name(board: RunBoard) -> str:
    """Empty where ranks log different metrics."""
    names = {facts.loss_name for facts in board.ranks.values()} - {""}
    return names.pop() if len(names) == 1 else ""


def _other_metrics(facts: RankFacts, board: RunBoard) -> str:
    others = [
        f"{name} {number_text(value)}"
        for name, value in facts.metrics.items()
        if name != facts.loss_name
    ]
    return html.escape(plain_text(", ".join(others[:3]), LINE_CHARS))


def _of_total(held_bytes: int, total_bytes: int | None) -> str:
    text = format_bytes(held_bytes)
    if not total_bytes:
        return text
    return f'{text}<br><span style="{QUIET_STYLE}">of {format_bytes(total_bytes)}</span>'


def _memory_cell(facts: RankFacts, board: RunBoard) -> str:
    return _of_total(facts.memory.rss, board.host_total_bytes) if facts.memory.rss else ""


def _device_cell(facts: RankFacts, board: RunBoard) -> str:
    held = facts.memory.device
    return "" if held is None else _of_total(held, facts.memory.device_total)


_COLUMNS = (
    _TableColumn("progress", _progress_cell),
    _TableColumn("state", _state_cell),
    _TableColumn("step", _step_cell),
    _TableColumn("steps/s", _speed_cell),
    _TableColumn("samples/s", _samples_cell),
    _TableColumn(_LOSS_COLUMN, _loss_cell),
    _TableColumn("metrics", _other_metrics),
    _TableColumn("memory", _memory_cell),
    _TableColumn("on device", _device_cell),
)
