"""A board as HTML and as text: live, and as the summary that stays.

No script, no style sheet and no colour by name: it is readable on light and dark backgrounds, and
passes the sanitizers of GitHub and Jupyter. Curves are block characters, which are text anywhere.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbaccel.output.dashboard.board import RankFacts, RunBoard, mean
from nbaccel.units import count_noun, format_bytes, format_seconds, number_ranges

__all__ = ["final_html", "live_html", "live_text", "sparkline", "summary_line"]


MOST_ROWS = 8  # more rows of ranks are not readable
CURVE_CHARS = 20
LINE_CHARS = 72
_SAME_S = 2.0
_LOGARITHMIC_RATIO = 8.0
"""From this ratio of highest to lowest on, a curve shows factors: a loss falls fast at first, and
the rest of the run would be a flat line."""
BY_HAND = "Stop: interrupt the cell (■)"

_SPARK_BLOCKS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "!"
_NO_VALUE = "-"
# Terminal sequences mean nothing in HTML and would count as characters of the width.
_CONTROL_CHARACTERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]")

_ALL_RANKS_STYLE = "font-size:0.9em;line-height:1.5;opacity:0.85"
_TABLE_STYLE = "border:none;border-collapse:collapse;margin:0.2em 0;table-layout:auto"
_BOARD_CELL_STYLE = (
    "text-align:left;vertical-align:top;padding:0.1em 1.4em 0.1em "
    "0;border:none;background:none;font-weight:normal;white-space:nowrap;max-width:none"
)
_NUMBER_STYLE = f"{_BOARD_CELL_STYLE};font-variant-numeric:tabular-nums"
_CODE_STYLE = f"{_BOARD_CELL_STYLE};font-family:monospace;overflow:hidden;text-overflow:ellipsis"
_QUIET_STYLE = "opacity:0.65"

_STATES_WORST_FIRST = ("failed", "gone", "ended", "stopping", "starting", "running")


# ------------------------------------------------------------------------- one line


def summary_line(run_board: RunBoard, *, with_curve: bool = False) -> str:
    """All ranks in one line: `2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 · up to 1.2 GiB each`.

    Args:
        run_board: The facts.
        with_curve: Whether the loss is drawn, too.
    """
    ending_words = f"{run_board.ending} after " if run_board.ending else ""
    line_parts = [
        count_noun(len(run_board.ranks), "rank"),
        f"{ending_words}{format_seconds(run_board.seconds)}",
        *_training_words(run_board, with_curve=with_curve),
        *_memory_words(run_board),
    ]
    return " · ".join(line_parts)


def _training_words(run_board: RunBoard, *, with_curve: bool) -> list[str]:
    leading_facts = _leading_rank(run_board)
    line_parts = []
    if leading_facts is not None and leading_facts.steps is not None:
        step_rate = leading_facts.pace.overall
        speed_words = f" ({_speed_of(step_rate)}/s)" if step_rate is not None else ""
        line_parts.append(f"step {leading_facts.steps:,}{speed_words}")
        line_parts += _compile_words(leading_facts)
    loss_facts = [
        rank_facts for rank_facts in run_board.ranks.values() if rank_facts.loss.last is not None
    ]
    if loss_facts:
        # Ranks may log different metrics, and only equal ones have a mean.
        same_losses = [
            other_facts.loss.last
            for other_facts in loss_facts
            if other_facts.loss_name == loss_facts[0].loss_name
        ]
        mean_loss = mean(shown_value for shown_value in same_losses if shown_value is not None)
        loss_curve = f" {sparkline(loss_facts[0].loss.values())}" if with_curve else ""
        line_parts.append(
            f"{plain_text(loss_facts[0].loss_name, 24)} {_number_text(mean_loss)}{loss_curve}"
        )
    return line_parts


def _compile_words(rank_facts: RankFacts) -> list[str]:
    """What a device's compiler is doing, or has done."""
    if rank_facts.phase:
        return [rank_facts.phase]
    if not rank_facts.programs:
        return []
    programs = count_noun(rank_facts.programs, "program")
    return [f"{programs} compiled in {format_seconds(rank_facts.compile_s)}"]


def _leading_rank(run_board: RunBoard) -> RankFacts | None:
    """The lowest rank that reports its training: the others are in step with it, or silent."""
    return next(
        (rank_facts for rank_facts in run_board.ranks.values() if rank_facts.steps is not None),
        None,
    )


def _memory_words(run_board: RunBoard) -> list[str]:
    most_bytes = max(
        (rank_facts.peak_rss_bytes for rank_facts in run_board.ranks.values()), default=0
    )
    if not most_bytes:
        return []
    rank_memory = " each" if len(run_board.ranks) > 1 else ""
    on_device = [
        other_facts.peak_device_bytes
        for other_facts in run_board.ranks.values()
        if other_facts.peak_device_bytes
    ]
    beside_words = f" (on the device {format_bytes(max(on_device))})" if on_device else ""
    return [f"up to {format_bytes(most_bytes)}{rank_memory}{beside_words}"]


# ------------------------------------------------------------------------- text


def live_text(run_board: RunBoard) -> str:
    """The run as lines: the summary, and one for each thing that some rank does.

    Args:
        run_board: The facts.
    """
    activity_groups: dict[str, list[RankFacts]] = {}
    for rank_facts in run_board.ranks.values():
        if not rank_facts.state:
            # It has not been looked at yet.
            continue
        activity_groups.setdefault(rank_facts.doing or rank_facts.state, []).append(rank_facts)
    text_lines = [
        f"[{number_ranges([rank_facts.rank for rank_facts in group_facts])}] {activity_words} · "
        f"{_held_words(group_facts)}"
        for activity_words, group_facts in activity_groups.items()
    ]
    if len(text_lines) > MOST_ROWS:
        text_lines = [*text_lines[:MOST_ROWS], f"… and {len(text_lines) - MOST_ROWS} more"]
    return "\n".join([summary_line(run_board), *text_lines])


def _held_words(shown_ranks: Sequence[RankFacts]) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    memory_words = _from_to([rank_facts.rss_bytes for rank_facts in shown_ranks])
    on_device = [
        rank_facts.device_bytes for rank_facts in shown_ranks if rank_facts.device_bytes is not None
    ]
    return f"{memory_words}, on the device {_from_to(on_device)}" if on_device else memory_words


def _from_to(memory_sizes: Sequence[int]) -> str:
    least_bytes, most_bytes = format_bytes(min(memory_sizes)), format_bytes(max(memory_sizes))
    return most_bytes if least_bytes == most_bytes else f"{least_bytes} to {most_bytes}"


# ------------------------------------------------------------------------- HTML


def live_html(run_board: RunBoard, *, by_hand: bool) -> str:
    """The run while it goes on.

    Args:
        run_board: The facts.
        by_hand: Whether to say how it is stopped, because no button does.
    """
    below_html = f'<div style="{_QUIET_STYLE}">{BY_HAND}</div>' if by_hand else ""
    head_html = f"<div>{html.escape(summary_line(run_board))}</div>"
    table_html = _table_html(run_board, _LIVE_COLUMNS)
    return f'<div style="{_ALL_RANKS_STYLE}">{head_html}{table_html}{below_html}</div>'


def final_html(run_board: RunBoard) -> str:
    """What stays of the run: its summary, and the ranks folded away below it.

    Args:
        run_board: The facts.
    """
    summary_text = html.escape(summary_line(run_board, with_curve=True))
    head_html = f'<summary style="cursor:pointer">{summary_text}</summary>'
    table_html = _table_html(run_board, _STATIC_COLUMNS)
    return f'<div style="{_ALL_RANKS_STYLE}"><details>{head_html}{table_html}</details></div>'


@dataclass(frozen=True)
class _TableColumn:
    name: str
    of: Callable[[RankFacts, RunBoard], str]
    style: str = _NUMBER_STYLE


def _table_html(run_board: RunBoard, table_columns: Sequence[_TableColumn]) -> str:
    shown_facts, other_ranks = _shown_ranks(run_board)
    table_cells = {
        table_column.name: [table_column.of(rank_facts, run_board) for rank_facts in shown_facts]
        for table_column in table_columns
    }
    # A column without a value for any rank would only take space.
    kept_columns = [
        table_column for table_column in table_columns if any(table_cells[table_column.name])
    ]
    header_cells = "".join(
        f'<th scope="col" '
        f'style="{_BOARD_CELL_STYLE};{_QUIET_STYLE}">{html.escape(column_name)}</th>'
        for column_name in ("rank", *(table_column.name for table_column in kept_columns))
    )
    table_rows = []
    for position, rank_facts in enumerate(shown_facts):
        data_cells = "".join(
            f'<td style="{table_column.style}">'
            f"{html.escape(table_cells[table_column.name][position]) or _NO_VALUE}</td>"
            for table_column in kept_columns
        )
        table_row = f'<th scope="row" style="{_NUMBER_STYLE}">{rank_facts.rank}</th>{data_cells}'
        table_rows.append(f'<tr style="background:none">{table_row}</tr>')
    if other_ranks:
        table_rows.append(
            f'<tr style="background:none"><td colspan="{len(kept_columns) + 1}" '
            f'style="{_BOARD_CELL_STYLE};{_QUIET_STYLE}">{html.escape(_rest_words(other_ranks))}</td></tr>'
        )
    return (
        f'<table style="{_TABLE_STYLE}"><thead style="border:none"><tr '
        f'style="background:none">{header_cells}</tr></thead><tbody>{"".join(table_rows)}</tbody></table>'
    )


def _shown_ranks(run_board: RunBoard) -> tuple[list[RankFacts], list[RankFacts]]:
    """The ranks that get a row, and those that share the last one: the worst are shown first."""
    shown_ranks = list(run_board.ranks.values())
    if len(shown_ranks) <= MOST_ROWS:
        return shown_ranks, []
    by_need = sorted(shown_ranks, key=_attention_need)
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


def _rest_words(shown_ranks: Sequence[RankFacts]) -> str:
    rest_states = sorted({rank_facts.state for rank_facts in shown_ranks})
    rest_steps = [rank_facts.steps for rank_facts in shown_ranks if rank_facts.steps is not None]
    line_parts = [f"and {count_noun(len(shown_ranks), 'more rank')}: {', '.join(rest_states)}"]
    if rest_steps:
        least_step, most_steps = min(rest_steps), max(rest_steps)
        line_parts.append(
            f"step {most_steps:,}"
            if least_step == most_steps
            else f"steps {least_step:,} to {most_steps:,}"
        )
    line_parts.append(_from_to([rank_facts.rss_bytes for rank_facts in shown_ranks]))
    return " · ".join(line_parts)


# ------------------------------------------------------------------------- columns


def _state_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return rank_facts.phase or rank_facts.state


def _for_how_long(rank_facts: RankFacts, run_board: RunBoard) -> str:
    """Empty where that is the whole run, whose length the first line has."""
    if rank_facts.since < run_board.began + _SAME_S:
        return ""
    return format_seconds(max(0.0, run_board.now - rank_facts.since))


def _step_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return "" if rank_facts.steps is None else f"{rank_facts.steps:,}"


def _speed_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    step_rate = rank_facts.pace.recent(run_board.now)
    return "" if step_rate is None else _speed_of(step_rate)


def _mean_speed(rank_facts: RankFacts, run_board: RunBoard) -> str:
    step_rate = rank_facts.pace.overall
    return "" if step_rate is None else _speed_of(step_rate)


def _loss_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    last_value = rank_facts.loss.last
    if last_value is None:
        return ""
    return (
        f"{sparkline(rank_facts.loss.values())} {_loss_label(rank_facts)}{_number_text(last_value)}"
    )


def _loss_from_to(rank_facts: RankFacts, run_board: RunBoard) -> str:
    first_value, last_value = rank_facts.loss.first, rank_facts.loss.last
    if first_value is None or last_value is None:
        return ""
    return (
        f"{sparkline(rank_facts.loss.values())} "
        f"{_loss_label(rank_facts)}{_number_text(first_value)} → {_number_text(last_value)}"
    )


def _loss_label(rank_facts: RankFacts) -> str:
    return "" if rank_facts.loss_name == "loss" else f"{plain_text(rank_facts.loss_name, 24)} "


def _other_metrics(rank_facts: RankFacts, run_board: RunBoard) -> str:
    other_metrics = [
        (metric_name, metric_value)
        for metric_name, metric_value in rank_facts.metrics.items()
        if metric_name != rank_facts.loss_name
    ]
    return plain_text(
        ", ".join(
            f"{metric_name} {_number_text(metric_value)}"
            for metric_name, metric_value in other_metrics[:3]
        ),
        LINE_CHARS,
    )


def _memory_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return format_bytes(rank_facts.rss_bytes) if rank_facts.rss_bytes else ""


def _peak_rss(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return format_bytes(rank_facts.peak_rss_bytes) if rank_facts.peak_rss_bytes else ""


def _device_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return "" if rank_facts.device_bytes is None else format_bytes(rank_facts.device_bytes)


def _peak_device(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return (
        "" if rank_facts.peak_device_bytes is None else format_bytes(rank_facts.peak_device_bytes)
    )


def _activity_cell(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return plain_text(rank_facts.doing, LINE_CHARS)


def _last_line(rank_facts: RankFacts, run_board: RunBoard) -> str:
    return plain_text(rank_facts.last_line, LINE_CHARS)


_LIVE_COLUMNS = (
    _TableColumn("state", _state_cell),
    _TableColumn("for", _for_how_long),
    _TableColumn("step", _step_cell),
    _TableColumn("steps/s", _speed_cell),
    _TableColumn("loss", _loss_cell),
    _TableColumn("metrics", _other_metrics),
    _TableColumn("memory", _memory_cell),
    _TableColumn("on device", _device_cell),
    _TableColumn("at", _activity_cell),
    _TableColumn("last line", _last_line, _CODE_STYLE),
)
_STATIC_COLUMNS = (
    _TableColumn("state", _state_cell),
    _TableColumn("step", _step_cell),
    _TableColumn("steps/s", _mean_speed),
    _TableColumn("loss", _loss_from_to),
    _TableColumn("metrics", _other_metrics),
    _TableColumn("most memory", _peak_rss),
    _TableColumn("most on device", _peak_device),
    _TableColumn("last line", _last_line, _CODE_STYLE),
)


# ------------------------------------------------------------------------- pieces


def sparkline(spark_values: Sequence[float], max_chars: int = CURVE_CHARS) -> str:
    """A curve in block characters, over all of the values.

    Args:
        spark_values: What is drawn; what is no number or infinite is drawn as an exclamation mark.
        max_chars: How wide it is at most.

    Returns:
        One character per value, or per group of neighbours where there are more.
    """
    spark_points = list(spark_values)
    if len(spark_points) > max_chars:
        point_edges = [
            position * len(spark_points) // max_chars for position in range(max_chars + 1)
        ]
        spark_points = [
            # `mean` lets a value that is not finite win, so that the curve shows it.
            mean(spark_points[first_point:last_point]) or 0.0
            for first_point, last_point in itertools.pairwise(point_edges)
        ]
    finite_values = [shown_value for shown_value in spark_points if math.isfinite(shown_value)]
    low_value, high_value = min(finite_values, default=0.0), max(finite_values, default=0.0)
    if low_value > 0 and high_value / low_value >= _LOGARITHMIC_RATIO:
        spark_points = [
            math.log(metric_value) if math.isfinite(metric_value) else metric_value
            for metric_value in spark_points
        ]
        low_value, high_value = math.log(low_value), math.log(high_value)
    return "".join(_spark_block(shown_value, low_value, high_value) for shown_value in spark_points)


def _spark_block(shown_value: float, low_value: float, high_value: float) -> str:
    if not math.isfinite(shown_value):
        return _NO_NUMBER
    if high_value <= low_value:
        return _SPARK_BLOCKS[3]
    # Halves first: high - low of two huge numbers would be infinite.
    value_share = (shown_value / 2 - low_value / 2) / (high_value / 2 - low_value / 2)
    return _SPARK_BLOCKS[min(int(value_share * len(_SPARK_BLOCKS)), len(_SPARK_BLOCKS) - 1)]


def plain_text(raw_text: str, max_chars: int) -> str:
    """A text without control characters, cut to a width.

    Args:
        raw_text: Whatever a worker has printed.
        max_chars: The width.
    """
    # Cut first: a line may have megabytes, and control characters take few of them.
    shown_text = _CONTROL_CHARACTERS.sub("", raw_text[: 8 * max_chars]).strip()
    return shown_text if len(shown_text) <= max_chars else f"{shown_text[: max_chars - 1]}…"


def _speed_of(step_rate: float) -> str:
    return f"{step_rate:,.0f}" if step_rate >= 100 else f"{step_rate:.3g}"


def _number_text(shown_value: float | None) -> str:
    if shown_value is None:
        return _NO_VALUE
    if not math.isfinite(shown_value):
        return str(shown_value)
    if abs(shown_value) < 10_000:
        return f"{shown_value:.4g}"
    return f"{shown_value:,.0f}" if abs(shown_value) < 1e9 else f"{shown_value:.3g}"
