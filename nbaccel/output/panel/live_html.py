"""A run that goes on as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from nbaccel.base.units import (
    count_noun,
    format_bytes,
    format_number,
    format_seconds,
)
from nbaccel.output.panel.advice import advice_of
from nbaccel.output.panel.curves import ACCENT_COLOUR, is_logarithmic, metric_chart
from nbaccel.output.panel.facts import RankFacts, RunBoard
from nbaccel.output.panel.html_parts import (
    PANEL_STYLE,
    QUIET_STYLE,
    advice_html,
    folded,
    html_table,
    lines_block,
    mean_time_html,
    quiet,
    titled,
)
from nbaccel.output.panel.words import (
    LABEL_CHARS,
    LINE_CHARS,
    MOST_ROWS,
    ShownProgress,
    filled_columns,
    left_out_sentence,
    live_parts,
    memory_range,
    plain_text,
    progress_of,
    rate_text,
)

_STOP_HTML = (
    '<span class="nbaccel-stop-words" style="opacity:0.8">Stop: interrupt the cell (■)</span>'
)
"""Where the panel's script can put a button, it does so."""
_SAME_S = 2.0
_MOST_CHARTS = 6  # they are sent every second

_ROW_STYLE = "display:flex;flex-wrap:wrap;gap:0 1em"
# A grey that lets any background through, as the empty part of a bar.
_TRACK_STYLE = (
    "display:inline-block;vertical-align:middle;width:7em;height:0.6em;border-radius:0.3em;"
    "overflow:hidden;margin-right:0.6em;background:rgba(128,128,128,0.3)"
)
_FILL_STYLE = f"display:block;height:100%;background:{ACCENT_COLOUR}"
_STATES_WORST_FIRST = ("failed", "gone", "ended", "stopping", "starting", "running")


def live_html(board: RunBoard, *, is_stoppable: bool) -> str:
    """The run while it goes on."""
    headline = f"<b>{count_noun(len(board.ranks), 'rank')}</b> · " + html.escape(
        " · ".join(live_parts(board))
    )
    stop = _STOP_HTML if is_stoppable else ""
    # Side by side where there is room, below each other where there is not.
    figures = f"{ranks_html(board)}{mean_time_html(board.times.by_rank())}"
    return (
        f'<div style="{PANEL_STYLE}"><div style="{_ROW_STYLE};align-items:center">'
        f'<span style="flex:1 1 20em">{headline}</span>{stop}</div>{advice_html(advice_of(board))}'
        f'<div style="{_ROW_STYLE}"><div style="flex:0 1 auto;min-width:0">{figures}</div>'
        f'<div style="flex:1 1 24em;max-width:36em">{_charts(board)}</div></div>'
        f"{printed_html(board)}</div>"
    )


def printed_html(board: RunBoard) -> str:
    """Metrics that are not drawn, and messages of libraries."""
    left_out = left_out_sentence(board)
    messages = board.library_messages
    title = f"{count_noun(messages.count, 'message')} of libraries"
    return (f"<div>{quiet(left_out)}</div>" if left_out else "") + (
        folded(title, lines_block("\n".join(messages.lines()))) if messages.count else ""
    )


def _charts(board: RunBoard) -> str:
    """The first metric; its other kind of axis and other metrics folded away."""
    first, *others = board.metric_names() or [""]
    curves = board.curves(first)
    is_log = is_logarithmic(y for points in curves.values() for _, y in points)
    content = titled(first, metric_chart(curves, first, board.marks))
    if content:
        other_axis = metric_chart(curves, first, board.marks, log_y=not is_log)
        content += folded("linear axis" if is_log else "logarithmic axis", other_axis)
    charts = [
        titled(name, metric_chart(board.curves(name), name, board.marks))
        for name in others[:_MOST_CHARTS]
    ]
    if any(charts):
        content += folded(count_noun(len(charts), "other metric"), "".join(charts))
    return content


# ------------------------------------------------------------------------- the table


def ranks_html(board: RunBoard) -> str:
    """The ranks, a row each."""
    shown, others = _shown_ranks(board)
    columns = {"rank": [str(facts.rank) for facts in shown]}
    columns |= {
        name: [cell_of(facts, board) for facts in shown] for name, cell_of in _COLUMNS.items()
    }
    rows = filled_columns(columns, "rank")
    names = {_LOSS_COLUMN: html.escape(_common_loss_name(board)) or _LOSS_COLUMN}
    if board.host_total_bytes:  # all ranks share it
        names["memory"] = f"memory of {format_bytes(board.host_total_bytes)}"
    rows[0] = [names.get(name, name) for name in rows[0]]
    return html_table(rows, is_html=True, rest=_rest_words(others) if others else "")


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
    steps = math.inf if facts.told.steps is None else facts.told.steps
    return states.index(facts.state), steps, facts.rank


def _rest_words(ranks: Sequence[RankFacts]) -> str:
    states = sorted({facts.state for facts in ranks})
    parts = [f"and {count_noun(len(ranks), 'more rank')}: {', '.join(states)}"]
    steps = [facts.told.steps for facts in ranks if facts.told.steps is not None]
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
    words = plain_text(facts.told.phase or activity or facts.state, LINE_CHARS)
    # Not where that is the whole run, whose length the first line has.
    if facts.since >= board.began + _SAME_S:
        words += f", {format_seconds(max(0.0, board.now - facts.since))}"
    if not place:
        return html.escape(words)
    place = html.escape(plain_text(place.removesuffix(")"), LINE_CHARS))
    place_html = f'<span style="{QUIET_STYLE};font-family:monospace">{place}</span>'
    return f"{html.escape(words)}<br>{place_html}"


def _progress_html(loop: ShownProgress) -> str:
    if loop.fraction is None:
        return html.escape(str(loop))
    # The words say what the bar shows: a bar alone would say nothing to a screen reader.
    bar = f'<span style="{_FILL_STYLE};width:{loop.fraction:.1%}"></span>'
    return (
        f'<span style="{_TRACK_STYLE}">{bar}</span>{loop.fraction * 100:.0f} %<br>'
        f"{quiet(loop.words)}"
    )


def _step_cell(facts: RankFacts, board: RunBoard) -> str:
    """Where a loop shows how far a rank is, the first line's step is enough."""
    return "" if progress_of(facts) or not facts.told.steps else f"{facts.told.steps:,}"


def _loss_cell(facts: RankFacts, board: RunBoard) -> str:
    if facts.loss.last is None:
        return ""
    label = "" if _common_loss_name(board) else f"{plain_text(facts.loss_name, LABEL_CHARS)} "
    return html.escape(f"{label}{format_number(facts.loss.last)}")


def _common_loss_name(board: RunBoard) -> str:
    """The name of the loss's column, too; empty where ranks log different metrics."""
    names = {facts.loss_name for facts in board.ranks.values()} - {""}
    return plain_text(names.pop(), LABEL_CHARS) if len(names) == 1 else ""


def _other_metrics(facts: RankFacts, board: RunBoard) -> str:
    others = [
        f"{name} {format_number(value)}"
        for name, value in facts.metrics.items()
        if name != facts.loss_name
    ]
    return html.escape(plain_text(", ".join(others[:3]), LINE_CHARS))


def _of_total(held_bytes: int | None, total_bytes: int | None) -> str:
    if held_bytes is None:
        return ""
    of_total = f"<br>{quiet(f'of {format_bytes(total_bytes)}')}" if total_bytes else ""
    return f"{format_bytes(held_bytes)}{of_total}"


_LOSS_COLUMN = "loss"
_COLUMNS: dict[str, Callable[[RankFacts, RunBoard], str]] = {
    "progress": lambda facts, _: "<br>".join(map(_progress_html, progress_of(facts))),
    "state": _state_cell,
    "step": _step_cell,
    "steps/s": lambda facts, board: rate_text(facts.pace.recent(board.now)),
    "samples/s": lambda facts, board: (
        rate_text(facts.samples_pace.recent(board.now)) if facts.told.samples else ""
    ),
    _LOSS_COLUMN: _loss_cell,
    "metrics": _other_metrics,
    "memory": lambda facts, _: format_bytes(facts.memory.rss) if facts.memory.rss else "",
    "on device": lambda facts, _: _of_total(facts.memory.device, facts.memory.device_total),
}
"""From a column's name to the HTML of a rank's cell, which is empty for no value."""
