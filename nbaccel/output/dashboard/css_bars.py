"""Where ranks' time goes, as bars: one per rank in a report, one of all ranks in the panel.

Parts differ in pattern as well as in colour, and their percentages stand beside them as text.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence

from nbaccel.base.units import format_seconds
from nbaccel.output.dashboard.rank_times import RankTimes, SlowestRank

__all__ = [
    "TIME_KINDS",
    "mean_time_html",
    "part_of_time",
    "percent_of",
    "rank_bars_html",
    "slowest_sentence",
    "spent_s",
    "starting_sentence",
]

TIME_KINDS = {
    "computing": "computing",
    "communicating": "communicating",
    "data": "waiting for data",
    "waiting": "waiting for others",
}
"""Parts of a rank's time: as attributes of `RankTimes` without `_s`, and in words."""

_MOST_BARS = 16
_LEAST_STARTING_SHARE = 0.02  # of the time, to be worth saying
_HIDDEN = 'aria-hidden="true"'
# White lines on the colour, in another direction for each: no colour is needed to tell them apart.
_STRIPES = "repeating-linear-gradient({angle},rgba(255,255,255,0.45) 0 2px,transparent 2px 6px)"
_BAR_LOOKS = {
    "computing": "background-color:#1976d2",
    "communicating": f"background-color:#d9730d;background-image:{_STRIPES.format(angle='45deg')}",
    "data": f"background-color:#8e44ad;background-image:{_STRIPES.format(angle='90deg')}",
    "waiting": (
        f"background-color:#7b8794;background-image:{_STRIPES.format(angle='45deg')},"
        f"{_STRIPES.format(angle='135deg')}"
    ),
}
"""Colour and pattern apart: of a notebook that is not trusted JupyterLab drops the patterns."""


def part_of_time(times: RankTimes, kind: str) -> float:
    """Seconds of one of `TIME_KINDS`."""
    seconds: float = getattr(times, f"{kind}_s")
    return seconds


def spent_s(seconds: float) -> str:
    """A duration as it is shown."""
    return format_seconds(seconds) if seconds >= 0.0005 else "0"


def percent_of(part: float, whole: float) -> str:
    """`12 %`."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


# ------------------------------------------------------------------------- words


def slowest_sentence(slowest: SlowestRank | None, timed_ranks: Sequence[RankTimes]) -> str:
    """Who holds the others up, and why, as far as that is known."""
    if slowest is None:
        return "No rank holds the others up."
    is_pair = len(timed_ranks) == 2
    others = "the other" if is_pair else "each of the others"
    sentence = (
        f"Rank {slowest.rank} holds the others up: {others} waited "
        f"{format_seconds(slowest.waited_s)} for it ({100 * slowest.waited_share:.0f} % of the "
        "time)"
    )
    reason = _reason_of(slowest, timed_ranks)
    than_others = "than the other" if is_pair else "than they do"
    return f"{sentence}; it {reason} {than_others}." if reason else f"{sentence}."


def _reason_of(slowest: SlowestRank, ranks: Sequence[RankTimes]) -> str:
    """In what it spends more than the others."""
    own_times = next((times for times in ranks if times.rank == slowest.rank), None)
    others = [times for times in ranks if times.rank != slowest.rank]
    if own_times is None or not others:
        return ""
    more_data_s = own_times.data_s - statistics.fmean(times.data_s for times in others)
    more_computing_s = own_times.computing_s - statistics.fmean(
        times.computing_s for times in others
    )
    more_starting_s = own_times.starting_s - statistics.fmean(times.starting_s for times in others)
    more_s, words = max(
        (more_data_s, "waits longer for data"),
        (more_computing_s, "computes longer"),
        (more_starting_s, "starts longer in its first step"),
    )
    return words if more_s > slowest.waited_s / 4 else ""


def starting_sentence(timed_ranks: Sequence[RankTimes]) -> str:
    """What the shares leave out; empty where that is too little to matter."""
    starting_s = statistics.fmean(times.starting_s for times in timed_ranks)
    if starting_s < _LEAST_STARTING_SHARE * statistics.fmean(t.total_s for t in timed_ranks):
        return ""
    on_average = " on average" if len(timed_ranks) > 1 else ""
    return (
        f"Left out is the start in the first step, {format_seconds(starting_s)}{on_average}: by "
        "that it computed longer than the second."
    )


# ------------------------------------------------------------------------- bars


def rank_bars_html(timed_ranks: Sequence[RankTimes], *, has_percents: bool = False) -> str:
    """A bar for each rank, and what its parts are."""
    longest_s = max((times.steady_s for times in timed_ranks), default=0.0) or 1.0
    bars = []
    for times in timed_ranks[:_MOST_BARS]:
        seconds = {kind: part_of_time(times, kind) for kind in TIME_KINDS}
        percents = [percent_of(part_s, times.steady_s) for part_s in seconds.values()]
        words = ", ".join(map(" ".join, zip(TIME_KINDS.values(), percents, strict=True)))
        spoken = f'role="img" aria-label="rank {times.rank}: {words}"'
        shown = f'<div style="width:13em">{" · ".join(percents)}</div>'
        bars.append(
            f"<div {spoken if has_percents else _HIDDEN} "
            'style="display:flex;align-items:center;gap:10px;margin:4px 0">'
            f'<div style="width:4.5em">rank {times.rank}</div>{_bar_html(seconds, longest_s)}'
            f"{shown if has_percents else ''}</div>"
        )
    return "".join(bars) + _legend_html(TIME_KINDS.values(), is_hidden=True)


def mean_time_html(timed_ranks: Sequence[RankTimes]) -> str:
    """One bar for all ranks together, with the part of each kind; empty where none is known."""
    seconds = {kind: sum(part_of_time(times, kind) for times in timed_ranks) for kind in TIME_KINDS}
    total_s = sum(seconds.values())
    if total_s <= 0:
        return ""
    words = [
        f"{TIME_KINDS[kind]} {percent_of(part_s, total_s)}" for kind, part_s in seconds.items()
    ]
    return (
        '<div style="display:flex;align-items:center;gap:10px;margin-top:6px;max-width:640px">'
        f'<div style="opacity:0.65">time</div>{_bar_html(seconds, total_s)}</div>'
        f"{_legend_html(words)}"
    )


def _bar_html(seconds: dict[str, float], full_s: float) -> str:
    parts = "".join(
        f'<div title="{TIME_KINDS[kind]}: {spent_s(part_s)}" '
        f'style="width:{100 * part_s / full_s:.2f}%;{_BAR_LOOKS[kind]}"></div>'
        for kind, part_s in seconds.items()
        if part_s > 0
    )
    return (
        '<div aria-hidden="true" style="flex:1;display:flex;height:14px;border-radius:3px;'
        f'overflow:hidden">{parts}</div>'
    )


def _legend_html(words: Iterable[str], *, is_hidden: bool = False) -> str:
    """What each pattern means; hidden from screen readers where a table says it again."""
    # Where styles are dropped, the blanks between keep the words apart.
    entries = " ".join(
        '<span style="display:inline-flex;align-items:center;gap:6px">'
        '<span aria-hidden="true" style="display:inline-block;width:18px;height:12px;'
        f'border-radius:2px;{looks}"></span>{html.escape(text)}</span>'
        for text, looks in zip(words, _BAR_LOOKS.values(), strict=True)
    )
    return (
        f'<div {_HIDDEN if is_hidden else ""} style="display:flex;flex-wrap:wrap;gap:4px 18px;'
        f'margin:6px 0 8px">{entries}</div>'
    )
