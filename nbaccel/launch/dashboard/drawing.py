"""A board as HTML and as text: live, and as what stays when all is over.

No script, no style sheet and no colour by name: what is drawn reads on light and on dark, and comes
through the sanitizers of GitHub and Jupyter. Curves are block characters, which are text anywhere.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbaccel.launch.dashboard.board import Board, RankFacts, mean
from nbaccel.units import counted, format_bytes, format_seconds, spans

__all__ = ["live_html", "live_text", "sparkline", "static_html", "summary"]

MOST_ROWS = 8  # a cluster's worth of ranks that all do something else is no longer read
CURVE_CHARS = 20
LINE_CHARS = 72
_SAME_S = 2.0
_LOGARITHMIC = 8.0
"""From this ratio of highest to lowest on, a curve shows factors: a loss falls fast at first, and
the rest of the run would be a flat line."""
BY_HAND = "Stop: interrupt the cell (■)"

_BLOCKS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "!"
_NOTHING = "-"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f-\x9f]")

_ALL = "font-size:0.9em;line-height:1.5;opacity:0.85"
_TABLE = "border:none;border-collapse:collapse;margin:0.2em 0;table-layout:auto"
_CELL = (
    "text-align:left;vertical-align:top;padding:0.1em 1.4em 0.1em 0;border:none;background:none;"
    "font-weight:normal;white-space:nowrap;max-width:none"
)
_NUMBER = f"{_CELL};font-variant-numeric:tabular-nums"
_CODE = f"{_CELL};font-family:monospace;overflow:hidden;text-overflow:ellipsis"
_QUIET = "opacity:0.65"

_WORST = ("failed", "gone", "ended", "stopping", "starting", "running")


# ------------------------------------------------------------------------- one line


def summary(board: Board, *, with_curve: bool = False) -> str:
    """All ranks in one line: `2 ranks · 12.0 s · step 840 (70/s) · loss 0.41 · up to 1.2 GiB each`.

    Args:
        board: The facts.
        with_curve: Whether the loss is drawn, too.
    """
    how = f"{board.ending} after " if board.ending else ""
    parts = [
        counted(len(board.ranks), "rank"),
        f"{how}{format_seconds(board.seconds)}",
        *_training(board, with_curve=with_curve),
        *_memory(board),
    ]
    return " · ".join(parts)


def _training(board: Board, *, with_curve: bool) -> list[str]:
    leading = _leading(board)
    parts = []
    if leading is not None and leading.steps is not None:
        rate = leading.pace.overall
        speed = f" ({_speed_of(rate)}/s)" if rate is not None else ""
        parts.append(f"step {leading.steps:,}{speed}")
    told = [facts for facts in board.ranks.values() if facts.loss.last is not None]
    if told:
        same = [f.loss.last for f in told if f.loss_name == told[0].loss_name]
        now = mean(value for value in same if value is not None)
        curve = f" {sparkline(told[0].loss.values())}" if with_curve else ""
        parts.append(f"{plain(told[0].loss_name, 24)} {_number(now)}{curve}")
    return parts


def _leading(board: Board) -> RankFacts | None:
    """The lowest rank that tells of its training: the others are in step with it, or silent."""
    return next((facts for facts in board.ranks.values() if facts.steps is not None), None)


def _memory(board: Board) -> list[str]:
    most = max((facts.peak_rss_bytes for facts in board.ranks.values()), default=0)
    if not most:
        return []
    each = " each" if len(board.ranks) > 1 else ""
    on_device = [f.peak_device_bytes for f in board.ranks.values() if f.peak_device_bytes]
    beside = f" (on the device {format_bytes(max(on_device))})" if on_device else ""
    return [f"up to {format_bytes(most)}{each}{beside}"]


# ------------------------------------------------------------------------- text


def live_text(board: Board) -> str:
    """The run as lines: the summary, and one for each thing that some rank does.

    Args:
        board: The facts.
    """
    groups: dict[str, list[RankFacts]] = {}
    for facts in board.ranks.values():
        if not facts.state:
            continue  # nobody has looked at it yet
        groups.setdefault(facts.doing or facts.state, []).append(facts)
    lines = [
        f"[{spans([facts.rank for facts in same])}] {doing} · {_held(same)}"
        for doing, same in groups.items()
    ]
    if len(lines) > MOST_ROWS:
        lines = [*lines[:MOST_ROWS], f"… and {len(lines) - MOST_ROWS} more"]
    return "\n".join([summary(board), *lines])


def _held(ranks: Sequence[RankFacts]) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    told = _from_to([facts.rss_bytes for facts in ranks])
    on_device = [facts.device_bytes for facts in ranks if facts.device_bytes is not None]
    return f"{told}, on the device {_from_to(on_device)}" if on_device else told


def _from_to(sizes: Sequence[int]) -> str:
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return most if least == most else f"{least} to {most}"


# ------------------------------------------------------------------------- HTML


def live_html(board: Board, *, by_hand: bool) -> str:
    """The run while it goes on.

    Args:
        board: The facts.
        by_hand: Whether to say how it is stopped, because no button does.
    """
    below = f'<div style="{_QUIET}">{BY_HAND}</div>' if by_hand else ""
    head = f"<div>{html.escape(summary(board))}</div>"
    return f'<div style="{_ALL}">{head}{_table(board, _LIVE)}{below}</div>'


def static_html(board: Board) -> str:
    """What stays of the run: its summary, and the ranks folded away below it.

    Args:
        board: The facts.
    """
    told = html.escape(summary(board, with_curve=True))
    head = f'<summary style="cursor:pointer">{told}</summary>'
    return f'<div style="{_ALL}"><details>{head}{_table(board, _STATIC)}</details></div>'


@dataclass(frozen=True)
class _Column:
    name: str
    of: Callable[[RankFacts, Board], str]
    style: str = _NUMBER


def _table(board: Board, columns: Sequence[_Column]) -> str:
    shown, others = _shown(board)
    cells = {c.name: [c.of(facts, board) for facts in shown] for c in columns}
    kept = [c for c in columns if any(cells[c.name])]
    names = "".join(
        f'<th scope="col" style="{_CELL};{_QUIET}">{html.escape(name)}</th>'
        for name in ("rank", *(c.name for c in kept))
    )
    rows = []
    for i, facts in enumerate(shown):
        told = "".join(
            f'<td style="{c.style}">{html.escape(cells[c.name][i]) or _NOTHING}</td>' for c in kept
        )
        row = f'<th scope="row" style="{_NUMBER}">{facts.rank}</th>{told}'
        rows.append(f'<tr style="background:none">{row}</tr>')
    if others:
        rows.append(
            f'<tr style="background:none"><td colspan="{len(kept) + 1}" style="{_CELL};{_QUIET}">'
            f"{html.escape(_rest(others))}</td></tr>"
        )
    return (
        f'<table style="{_TABLE}"><thead style="border:none">'
        f'<tr style="background:none">{names}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _shown(board: Board) -> tuple[list[RankFacts], list[RankFacts]]:
    """The ranks that get a row, and those that share the last one: the worst are shown first."""
    ranks = list(board.ranks.values())
    if len(ranks) <= MOST_ROWS:
        return ranks, []
    by_need = sorted(ranks, key=_need)
    return by_need[:MOST_ROWS], by_need[MOST_ROWS:]


def _need(facts: RankFacts) -> tuple[int, float, int]:
    """Failed ones before stragglers before the rest."""
    place = _WORST.index(facts.state) if facts.state in _WORST else len(_WORST)
    return place, math.inf if facts.steps is None else facts.steps, facts.rank


def _rest(ranks: Sequence[RankFacts]) -> str:
    states = sorted({facts.state for facts in ranks})
    steps = [facts.steps for facts in ranks if facts.steps is not None]
    parts = [f"and {counted(len(ranks), 'more rank')}: {', '.join(states)}"]
    if steps:
        least, most = min(steps), max(steps)
        parts.append(f"step {most:,}" if least == most else f"steps {least:,} to {most:,}")
    parts.append(_from_to([facts.rss_bytes for facts in ranks]))
    return " · ".join(parts)


# ------------------------------------------------------------------------- columns


def _state(facts: RankFacts, board: Board) -> str:
    return facts.state


def _for_how_long(facts: RankFacts, board: Board) -> str:
    """Where that is not the whole run, which the first line tells of."""
    if facts.since < board.began + _SAME_S:
        return ""
    return format_seconds(max(0.0, board.now - facts.since))


def _step(facts: RankFacts, board: Board) -> str:
    return "" if facts.steps is None else f"{facts.steps:,}"


def _speed(facts: RankFacts, board: Board) -> str:
    rate = facts.pace.recent(board.now)
    return "" if rate is None else _speed_of(rate)


def _mean_speed(facts: RankFacts, board: Board) -> str:
    rate = facts.pace.overall
    return "" if rate is None else _speed_of(rate)


def _loss(facts: RankFacts, board: Board) -> str:
    last = facts.loss.last
    if last is None:
        return ""
    return f"{sparkline(facts.loss.values())} {_named(facts)}{_number(last)}"


def _loss_from_to(facts: RankFacts, board: Board) -> str:
    first, last = facts.loss.first, facts.loss.last
    if first is None or last is None:
        return ""
    return f"{sparkline(facts.loss.values())} {_named(facts)}{_number(first)} → {_number(last)}"


def _named(facts: RankFacts) -> str:
    return "" if facts.loss_name == "loss" else f"{plain(facts.loss_name, 24)} "


def _other_metrics(facts: RankFacts, board: Board) -> str:
    others = [(name, v) for name, v in facts.metrics.items() if name != facts.loss_name]
    return plain(", ".join(f"{name} {_number(v)}" for name, v in others[:3]), LINE_CHARS)


def _rss(facts: RankFacts, board: Board) -> str:
    return format_bytes(facts.rss_bytes) if facts.rss_bytes else ""


def _peak_rss(facts: RankFacts, board: Board) -> str:
    return format_bytes(facts.peak_rss_bytes) if facts.peak_rss_bytes else ""


def _device(facts: RankFacts, board: Board) -> str:
    return "" if facts.device_bytes is None else format_bytes(facts.device_bytes)


def _peak_device(facts: RankFacts, board: Board) -> str:
    return "" if facts.peak_device_bytes is None else format_bytes(facts.peak_device_bytes)


def _doing(facts: RankFacts, board: Board) -> str:
    return plain(facts.doing, LINE_CHARS)


def _last_line(facts: RankFacts, board: Board) -> str:
    return plain(facts.last_line, LINE_CHARS)


_LIVE = (
    _Column("state", _state),
    _Column("for", _for_how_long),
    _Column("step", _step),
    _Column("steps/s", _speed),
    _Column("loss", _loss),
    _Column("metrics", _other_metrics),
    _Column("memory", _rss),
    _Column("on device", _device),
    _Column("at", _doing),
    _Column("last line", _last_line, _CODE),
)
_STATIC = (
    _Column("state", _state),
    _Column("step", _step),
    _Column("steps/s", _mean_speed),
    _Column("loss", _loss_from_to),
    _Column("metrics", _other_metrics),
    _Column("most memory", _peak_rss),
    _Column("most on device", _peak_device),
    _Column("last line", _last_line, _CODE),
)


# ------------------------------------------------------------------------- pieces


def sparkline(values: Sequence[float], chars: int = CURVE_CHARS) -> str:
    """A curve in block characters, over all of the values.

    Args:
        values: What is drawn; what is no number or infinite is drawn as an exclamation mark.
        chars: How wide it is at most.

    Returns:
        One character per value, or per group of neighbours where there are more.
    """
    points = list(values)
    if len(points) > chars:
        edges = [i * len(points) // chars for i in range(chars + 1)]
        points = [mean(points[a:b]) or 0.0 for a, b in itertools.pairwise(edges)]
    finite = [value for value in points if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low > 0 and high / low >= _LOGARITHMIC:
        points = [math.log(v) if math.isfinite(v) else v for v in points]
        low, high = math.log(low), math.log(high)
    return "".join(_block(value, low, high) for value in points)


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return _NO_NUMBER
    if high <= low:
        return _BLOCKS[3]
    # Halves first: high - low of two huge numbers would be infinite.
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]


def plain(text: str, chars: int) -> str:
    """A text without control characters, cut to a width.

    Args:
        text: Whatever a worker has printed.
        chars: The width.
    """
    told = _CONTROL.sub("", text[: 8 * chars]).strip()
    return told if len(told) <= chars else f"{told[: chars - 1]}…"


def _speed_of(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 10_000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
