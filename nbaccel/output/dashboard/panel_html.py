"""A board as HTML: the panel while a call runs, and the summary that stays.

No script and no style sheet: what stays passes Jupyter's sanitizer, as it must in a notebook that
somebody else has made, and reads on light and dark backgrounds. Charts that stay are images, since
of an `<svg>` only the texts are left. Where images and styles are left out, too, as on GitHub, the
words say the same.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nbaccel.base.units import count_noun, format_bytes, format_seconds, number_ranges
from nbaccel.output.chart import ACCENT_COLOUR
from nbaccel.output.dashboard.board import RankFacts, RunBoard
from nbaccel.output.dashboard.css_bars import mean_time_html, rank_bars_html, slowest_sentence
from nbaccel.output.dashboard.curves import metric_chart
from nbaccel.output.dashboard.drawing import (
    LABEL_CHARS,
    LINE_CHARS,
    MOST_ROWS,
    NO_VALUE,
    ShownProgress,
    left_out_sentence,
    memory_range,
    number_text,
    plain_text,
    progress_of,
    rate_text,
    summary_parts,
)
from nbaccel.output.recent_lines import RecentLine

__all__ = [
    "final_html",
    "headline_html",
    "left_out_html",
    "library_html",
    "lines_html",
    "live_html",
    "ranks_html",
    "time_html",
]

BY_HAND = "Stop: interrupt the cell (■)"
LONG_OUTPUT_LINES = 20
"""From so many lines on the newest are shown in the panel, too: the cell's end is out of sight."""
_SHOWN_LINES = 100
_SAVED_LINES = 50
_SAME_S = 2.0
_MAX_SMALL_CHARTS = 6  # of a run that goes on: they are sent every second
_MAX_SAVED_CHARTS = 15  # as many as ranks report beside the first one

_LOSS_COLUMN = "loss"

_PANEL_STYLE = "font-size:0.9em;line-height:1.5"
_TABLE_STYLE = "border:none;border-collapse:collapse;margin:0.2em 0;table-layout:auto"
_CELL_STYLE = (
    "text-align:left;vertical-align:top;padding:0.1em 1.2em 0.1em "
    "0;border:none;background:none;font-weight:normal;white-space:nowrap;max-width:none"
)
_NUMBER_STYLE = f"{_CELL_STYLE};font-variant-numeric:tabular-nums"
_CODE_STYLE = f"{_CELL_STYLE};font-family:monospace;overflow:hidden;text-overflow:ellipsis"
_QUIET_STYLE = "opacity:0.65"
# The display is that of browsers, which Notebook 6 takes the triangle from.
_SUMMARY_STYLE = "cursor:pointer;display:list-item"
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
_ENDING_SIGNS = {"": "✓", "stopped": "■"}
_FAILED_SIGN = "✗"


# ------------------------------------------------------------------------- the whole


def live_html(board: RunBoard, *, by_hand: bool) -> str:
    """The run while it goes on, where a front end cannot take clicks."""
    names = board.metric_names()
    parts = [
        headline_html(board),
        ranks_html(board),
        time_html(board),
        _chart_html(board, names[:1]),
        _small_charts(board, names[1:], _MAX_SMALL_CHARTS),
        left_out_html(board),
        _folded("newest lines", lines_html(board)) if is_long(board) else "",
        library_html(board),
        f'<div style="{_QUIET_STYLE}">{BY_HAND}</div>' if by_hand else "",
    ]
    return f'<div style="{_PANEL_STYLE}">{"".join(parts)}</div>'


def final_html(board: RunBoard, *, folds_chart: bool = False) -> str:
    """What stays of the run: one line that unfolds, and the chart."""
    sign = _ENDING_SIGNS.get(board.ending, _FAILED_SIGN)
    head_html = (
        f'<summary style="{_SUMMARY_STYLE}">{sign} {_headline_text(board, is_live=False)}</summary>'
    )
    metric_names = board.metric_names()
    chart_html = _chart_html(board, metric_names[:1], as_image=True)
    parts = [
        chart_html if folds_chart else "",
        _table_html(board, _STATIC_COLUMNS),
        _rank_times_html(board),
        _small_charts(board, metric_names[1:], _MAX_SAVED_CHARTS, as_image=True),
        left_out_html(board),
        *(_saved_lines(board) if is_long(board) else ()),
        library_html(board),
        _warnings_html(board),
        _plan_html(board),
    ]
    details_html = f"<details>{head_html}{''.join(parts)}</details>"
    return f'<div style="{_PANEL_STYLE}">{details_html}{"" if folds_chart else chart_html}</div>'


def is_long(board: RunBoard) -> bool:
    """Whether so much has been printed that the newest lines are out of sight."""
    return board.num_lines > LONG_OUTPUT_LINES


# ------------------------------------------------------------------------- its parts


def headline_html(board: RunBoard) -> str:
    """The first line of a run that goes on."""
    return f"<div>{_headline_text(board, is_live=True)}</div>"


def _headline_text(board: RunBoard, *, is_live: bool) -> str:
    # The chart and the rows tell of the rest.
    parts = summary_parts(board, with_memory=not is_live, is_live=is_live)
    words = count_noun(len(board.ranks), "rank")
    return f"<b>{words}</b> · {html.escape(' · '.join(parts))}"


def ranks_html(board: RunBoard, *, with_metrics: bool = True) -> str:
    """The ranks of a run that goes on, a row each."""
    columns = [c for c in _LIVE_COLUMNS if with_metrics or c.of is not _other_metrics]
    return _table_html(board, columns)


def time_html(board: RunBoard) -> str:
    """Where the time of all ranks has gone, as a bar; empty where that is not known."""
    return mean_time_html(board.times.by_rank())


def _rank_times_html(board: RunBoard) -> str:
    """What each rank has spent its time on, and who has held the others up."""
    ranks = board.times.by_rank()
    if len(ranks) < 2:
        return mean_time_html(ranks)
    slowest = board.times.slowest()
    sentence = slowest_sentence(slowest, ranks) if slowest is not None else ""
    return f"<div>{html.escape(sentence)}</div>{rank_bars_html(ranks, has_percents=True)}"


def _warnings_html(board: RunBoard) -> str:
    by_text = board.warnings.by_text
    items = "".join(
        f"<li>{html.escape(text)} ({count_noun(seen.count, 'time')}, rank "
        f"{number_ranges(seen.ranks)})</li>"
        for text, seen in by_text.items()
    )
    return _folded(count_noun(len(by_text), "warning"), f"<ul>{items}</ul>") if items else ""


def _plan_html(board: RunBoard) -> str:
    plan = board.plan
    return "" if plan is None else _folded("plan", _lines_block(plan.explain(), scrolls=False))


def library_html(board: RunBoard) -> str:
    """The harmless messages of libraries, folded away; empty where there are none."""
    if not board.library_messages:
        return ""
    words = count_noun(board.num_library_messages, "message")
    return _folded(f"{words} of libraries", _lines_block("\n".join(board.library_messages)))


def left_out_html(board: RunBoard) -> str:
    """Which metrics are not drawn; empty where all are."""
    sentence = left_out_sentence(board)
    return f'<div style="{_QUIET_STYLE}">{html.escape(sentence)}</div>' if sentence else ""


def lines_html(board: RunBoard, shown_rank: int | None = None) -> str:
    """The newest lines, the newest first in sight."""
    recent_lines = _recent_lines(board, shown_rank)[-_SHOWN_LINES:]
    # Upside down twice: a box that scrolls opens at its end, where the newest line is.
    return (
        f'<div style="display:flex;flex-direction:column-reverse;{_SCROLLED_STYLE}">'
        f"{_lines_block(_lines_text(recent_lines, with_ranks=shown_rank is None), scrolls=False)}"
        "</div>"
    )


def _recent_lines(board: RunBoard, rank: int | None) -> list[RecentLine]:
    if rank is not None:
        return board.recent_lines.get(rank, [])
    by_number = {
        recent_line.number: recent_line
        for rank_lines in board.recent_lines.values()
        for recent_line in rank_lines
    }
    return [by_number[number] for number in sorted(by_number)]


def _lines_text(recent_lines: Iterable[RecentLine], *, with_ranks: bool) -> str:
    return "\n".join(
        f"[{number_ranges(recent_line.ranks)}] {recent_line.text}"
        if with_ranks and recent_line.ranks
        else recent_line.text
        for recent_line in recent_lines
    )


def _saved_lines(board: RunBoard) -> Iterable[str]:
    """The last lines of each rank, folded away; all that was printed stands below."""
    for rank, rank_lines in sorted(board.recent_lines.items()):
        if rank_lines:
            saved_text = _lines_text(rank_lines[-_SAVED_LINES:], with_ranks=False)
            yield _folded(f"last lines of rank {rank}", _lines_block(saved_text))


def _lines_block(block_text: str, *, scrolls: bool = True) -> str:
    # Front ends let a `<pre>` scroll by itself, and would show the start of it.
    style = _SCROLLED_STYLE if scrolls else "flex:none;overflow:visible"
    text = "\n".join(
        plain_text(line_text, LINE_CHARS * 4, keeps_start=True)
        for line_text in block_text.split("\n")
    )
    return f'<pre style="{_LINES_STYLE};{style}">{html.escape(text)}</pre>'


def _folded(title: str, content_html: str) -> str:
    return (
        f'<details><summary style="{_SUMMARY_STYLE};{_QUIET_STYLE}">{html.escape(title)}</summary>'
        f"{content_html}</details>"
    )


def _chart_html(board: RunBoard, metric_names: Sequence[str], *, as_image: bool = False) -> str:
    charts = [
        (metric_name, chart)
        for metric_name in metric_names
        if (chart := metric_chart(board, metric_name, as_image=as_image))
    ]
    return "".join(
        f'<div style="margin-top:0.3em"><span style="{_QUIET_STYLE}">'
        f"{html.escape(plain_text(metric_name, LINE_CHARS))}</span><br>{chart}</div>"
        for metric_name, chart in charts
    )


def _small_charts(
    board: RunBoard, metric_names: Sequence[str], max_charts: int, *, as_image: bool = False
) -> str:
    charts = [
        f'<div style="display:inline-block;margin-right:1em">{_metric_label(board, name)}<br>'
        f"{chart}</div>"
        for name in metric_names[:max_charts]
        if (chart := metric_chart(board, name, is_small=True, as_image=as_image))
    ]
    if not charts:
        return ""
    return _folded(f"{count_noun(len(charts), 'other metric')}", f"<div>{''.join(charts)}</div>")


def _metric_label(board: RunBoard, name: str) -> str:
    latest = next(
        (
            history.last
            for rank_facts in board.ranks.values()
            if (history := rank_facts.histories.get(name)) is not None
        ),
        None,
    )
    label_text = f"{plain_text(name, LINE_CHARS)} {number_text(latest)}"
    return f'<span style="{_QUIET_STYLE}">{html.escape(label_text)}</span>'


# ------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class _TableColumn:
    name: str
    of: Callable[[RankFacts, RunBoard], str]
    """The cell's HTML; empty for no value."""
    style: str = _NUMBER_STYLE


def _table_html(board: RunBoard, table_columns: Sequence[_TableColumn]) -> str:
    shown_facts, other_ranks = _shown_ranks(board)
    table_cells = {
        table_column.name: [table_column.of(rank_facts, board) for rank_facts in shown_facts]
        for table_column in table_columns
    }
    # A column without a value for any rank would only take space.
    kept_columns = [
        table_column for table_column in table_columns if any(table_cells[table_column.name])
    ]
    header_cells = "".join(
        f'<th scope="col" style="{_CELL_STYLE};{_QUIET_STYLE}">{html.escape(column_name)}</th>'
        for column_name in ("rank", *(_title(column, board) for column in kept_columns))
    )
    table_rows = []
    for position, rank_facts in enumerate(shown_facts):
        data_cells = "".join(
            f'<td style="{table_column.style}">'
            f"{table_cells[table_column.name][position] or NO_VALUE}</td>"
            for table_column in kept_columns
        )
        table_row = f'<th scope="row" style="{_NUMBER_STYLE}">{rank_facts.rank}</th>{data_cells}'
        table_rows.append(f'<tr style="background:none">{table_row}</tr>')
    if other_ranks:
        table_rows.append(
            f'<tr style="background:none"><td colspan="{len(kept_columns) + 1}" '
            f'style="{_CELL_STYLE};{_QUIET_STYLE}">{html.escape(_rest_words(other_ranks))}</td></tr>'
        )
    return (
        f'<div style="overflow-x:auto"><table style="{_TABLE_STYLE}"><thead '
        f'style="border:none"><tr style="background:none">{header_cells}</tr></thead>'
        f"<tbody>{''.join(table_rows)}</tbody></table></div>"
    )


def _shown_ranks(board: RunBoard) -> tuple[list[RankFacts], list[RankFacts]]:
    """The ranks that get a row, and those that share the last one: the worst are shown first."""
    ranks = list(board.ranks.values())
    if len(ranks) <= MOST_ROWS:
        return ranks, []
    by_need = sorted(ranks, key=_attention_need)
    return by_need[:MOST_ROWS], by_need[MOST_ROWS:]


def _attention_need(rank_facts: RankFacts) -> tuple[int, float, int]:
    """Failed ones before stragglers before the rest."""
    rank_place = (
        _STATES_WORST_FIRST.index(rank_facts.state)
        if rank_facts.state in _STATES_WORST_FIRST
        else len(_STATES_WORST_FIRST)
    )
    # Ranks that report no steps come behind those that are slow.
    return rank_place, math.inf if rank_facts.steps is None else rank_facts.steps, rank_facts.rank


def _rest_words(ranks: Sequence[RankFacts]) -> str:
    states = sorted({rank_facts.state for rank_facts in ranks})
    rest_steps = [rank_facts.steps for rank_facts in ranks if rank_facts.steps is not None]
    parts = [f"and {count_noun(len(ranks), 'more rank')}: {', '.join(states)}"]
    if rest_steps:
        least_step = min(rest_steps)
        most_steps = max(rest_steps)
        parts.append(
            f"step {most_steps:,}"
            if least_step == most_steps
            else f"steps {least_step:,} to {most_steps:,}"
        )
    parts.append(memory_range([rank_facts.rss_bytes for rank_facts in ranks]))
    return " · ".join(parts)


# ------------------------------------------------------------------------- columns


def _state_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    """`training`, or `waiting in all_reduce, 12.0 s` with the line of code below it."""
    activity, _, place = rank_facts.doing.partition(" (")
    state_words = plain_text(rank_facts.phase or activity or rank_facts.state, LINE_CHARS)
    for_seconds = _for_how_long(rank_facts, board)
    state_html = html.escape(f"{state_words}, {for_seconds}" if for_seconds else state_words)
    if not place:
        return state_html
    place_words = html.escape(plain_text(place.removesuffix(")"), LINE_CHARS))
    return (
        f'{state_html}<br><span style="{_QUIET_STYLE};font-family:monospace">{place_words}</span>'
    )


def _last_state(rank_facts: RankFacts, board: RunBoard) -> str:
    return html.escape(plain_text(rank_facts.phase or rank_facts.state, LINE_CHARS))


def _for_how_long(rank_facts: RankFacts, board: RunBoard) -> str:
    """Empty where that is the whole run, whose length the first line has."""
    if rank_facts.since < board.began + _SAME_S:
        return ""
    return format_seconds(max(0.0, board.now - rank_facts.since))


def _progress_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    return "<br>".join(map(_progress_html, progress_of(rank_facts)))


def _progress_html(loop: ShownProgress) -> str:
    if loop.fraction is None:
        return html.escape(str(loop))
    # The words say what the bar shows: a bar alone would say nothing to a screen reader.
    filled = f'<span style="{_FILL_STYLE};width:{loop.fraction:.1%}"></span>'
    words = f"{loop.label}, {loop.done}" if loop.label else loop.done
    return (
        f'<span style="{_TRACK_STYLE}">{filled}</span>{loop.fraction * 100:.0f} %'
        f'<br><span style="{_QUIET_STYLE}">{html.escape(words)}</span>'
    )


def _live_steps(rank_facts: RankFacts, board: RunBoard) -> str:
    """Where a loop shows how far a rank is, the first line's step is enough."""
    return "" if progress_of(rank_facts) else _step_cell(rank_facts, board)


def _step_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    return f"{rank_facts.steps:,}" if rank_facts.steps else ""


def _speed_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    step_rate = rank_facts.pace.recent(board.now)
    return "" if step_rate is None else rate_text(step_rate)


def _mean_speed(rank_facts: RankFacts, board: RunBoard) -> str:
    step_rate = rank_facts.pace.overall
    return "" if step_rate is None else rate_text(step_rate)


def _samples_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    sample_rate = rank_facts.samples_pace.recent(board.now)
    return "" if sample_rate is None or not rank_facts.samples else rate_text(sample_rate)


def _mean_samples(rank_facts: RankFacts, board: RunBoard) -> str:
    sample_rate = rank_facts.samples_pace.overall
    return "" if sample_rate is None or not rank_facts.samples else rate_text(sample_rate)


def _loss_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    last_value = rank_facts.loss.last
    if last_value is None:
        return ""
    return _loss_label(rank_facts, board) + number_text(last_value)


def _loss_from_to(rank_facts: RankFacts, board: RunBoard) -> str:
    first_value = rank_facts.loss.first
    last_value = rank_facts.loss.last
    if first_value is None or last_value is None:
        return ""
    values = f"{number_text(first_value)} → {number_text(last_value)}"
    return _loss_label(rank_facts, board) + values


def _title(column: _TableColumn, board: RunBoard) -> str:
    """The name of a column; that of the loss is the metric's, where all ranks log the same."""
    if column.name != _LOSS_COLUMN:
        return column.name
    return plain_text(_common_loss_name(board), LABEL_CHARS) or _LOSS_COLUMN


def _common_loss_name(board: RunBoard) -> str:
    """Empty where ranks log different metrics."""
    loss_names = {rank_facts.loss_name for rank_facts in board.ranks.values()} - {""}
    return loss_names.pop() if len(loss_names) == 1 else ""


def _loss_label(rank_facts: RankFacts, board: RunBoard) -> str:
    if _common_loss_name(board):
        return ""
    return html.escape(f"{plain_text(rank_facts.loss_name, 24)} ")


def _other_metrics(rank_facts: RankFacts, board: RunBoard) -> str:
    other_metrics = [
        f"{name} {number_text(value)}"
        for name, value in rank_facts.metrics.items()
        if name != rank_facts.loss_name
    ]
    return html.escape(plain_text(", ".join(other_metrics[:3]), LINE_CHARS))


def _of_total(held_bytes: int, total_bytes: int | None) -> str:
    text = format_bytes(held_bytes)
    if not total_bytes:
        return text
    of_words = html.escape(f"of {format_bytes(total_bytes)}")
    return f'{text}<br><span style="{_QUIET_STYLE}">{of_words}</span>'


def _memory_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    if not rank_facts.rss_bytes:
        return ""
    return _of_total(rank_facts.rss_bytes, board.host_total_bytes)


def _peak_rss(rank_facts: RankFacts, board: RunBoard) -> str:
    return format_bytes(rank_facts.peak_rss_bytes) if rank_facts.peak_rss_bytes else ""


def _device_cell(rank_facts: RankFacts, board: RunBoard) -> str:
    if rank_facts.device_bytes is None:
        return ""
    return _of_total(rank_facts.device_bytes, rank_facts.device_total_bytes)


def _peak_device(rank_facts: RankFacts, board: RunBoard) -> str:
    if rank_facts.peak_device_bytes is None:
        return ""
    return _of_total(rank_facts.peak_device_bytes, rank_facts.device_total_bytes)


def _last_line(rank_facts: RankFacts, board: RunBoard) -> str:
    return html.escape(plain_text(rank_facts.last_line, LINE_CHARS))


_LIVE_COLUMNS = (
    _TableColumn("progress", _progress_cell),
    _TableColumn("state", _state_cell),
    _TableColumn("step", _live_steps),
    _TableColumn("steps/s", _speed_cell),
    _TableColumn("samples/s", _samples_cell),
    _TableColumn(_LOSS_COLUMN, _loss_cell),
    _TableColumn("metrics", _other_metrics),
    _TableColumn("memory", _memory_cell),
    _TableColumn("on device", _device_cell),
)
_STATIC_COLUMNS = (
    _TableColumn("state", _last_state),
    _TableColumn("progress", _progress_cell),
    _TableColumn("step", _step_cell),
    _TableColumn("steps/s", _mean_speed),
    _TableColumn("samples/s", _mean_samples),
    _TableColumn(_LOSS_COLUMN, _loss_from_to),
    _TableColumn("metrics", _other_metrics),
    _TableColumn("most memory", _peak_rss),
    _TableColumn("most on device", _peak_device),
    _TableColumn("last line", _last_line, _CODE_STYLE),
)
