"""What ranks spend their time on, compared: who waits for whom.

A rank's time in collectives is that of the exchange itself and of waiting for others. The rank
that comes last waits for nobody, so the least time of all ranks is the exchange's, and what a rank
has above that is waiting. It is compared interval by interval, because another rank may be last in
each.

Where ranks' time goes, as bars: one per rank in a report, one of all ranks in the panel.

Parts differ in pattern as well as in colour, and their percentages stand beside them as text.
"""

from __future__ import annotations

import bisect
import html
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbaccel.base.units import format_seconds

if TYPE_CHECKING:
    from nbaccel.base.spent_time import SpentTime

__all__ = [
    "TIME_KINDS",
    "RankTimes",
    "SlowestRank",
    "TimeComparison",
    "mean_time_html",
    "part_of_time",
    "percent_of",
    "rank_bars_html",
    "slowest_sentence",
    "spent_s",
    "starting_sentence",
]

_INTERVAL_S = 2.0
"""Ranks report at different moments, a quarter of a second apart: over shorter intervals that
difference would count as waiting."""
_MOST_SAMPLES = 256
_LEAST_WAITED_S = 0.05
_LEAST_SHARE = 0.03  # of the time, to be worth saying
_CLEAR_SHARE = 0.6  # of all waiting, to be one rank's doing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """What one rank has spent its time on, in seconds; the parts add up to the total."""

    rank: int
    total_s: float
    """Since its first loop over batches began."""
    computing_s: float
    """Computing, and whatever is none of the others."""
    communicating_s: float
    """In collectives while all ranks were there."""
    data_s: float
    """Waiting for batches."""
    waiting_s: float
    """In collectives, waiting for other ranks."""
    is_partial: bool
    """Whether some communication could not be measured, and is in `computing_s`."""
    starting_s: float = 0.0
    """What the first step computed for longer than the second; in no other part."""

    @property
    def steady_s(self) -> float:
        """The time of which shares are told: without the start, which is no part of a step."""
        return self.total_s - self.starting_s


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that the others wait for."""

    rank: int
    waited_s: float
    """For how long each of the others waited for it, on average."""
    waited_share: float
    """The same as a part of the time."""


class TimeComparison:
    """Compares the times of ranks as they are reported."""

    def __init__(self, worker_ranks: Iterable[int], interval_s: float = _INTERVAL_S) -> None:
        self._ranks = frozenset(worker_ranks)
        self._interval_s = interval_s
        self._interval_start: float | None = None
        self._latest: dict[int, SpentTime] = {}
        self._samples: dict[int, list[tuple[float, float]]] = {}
        """Rank → times and its seconds in collectives until then, since the interval's start."""
        self._waited: dict[int, float] = {}
        """Rank → seconds for which it has waited for others."""
        self._waited_for: dict[int, float] = {}
        """Rank → seconds for which the others have waited for it, on average."""

    def receive(self, worker_rank: int, received_at: float, spent: SpentTime) -> None:
        """Take in what a rank has reported."""
        self._latest[worker_rank] = spent
        rank_samples = self._samples.setdefault(worker_rank, [(received_at - spent.total_s, 0.0)])
        rank_samples.append((received_at, spent.communication_s))
        if len(rank_samples) > _MOST_SAMPLES:
            # Another rank has not reported for long. The first one is where the interval begins.
            del rank_samples[1:-1:2]
        if self._samples.keys() == self._ranks:
            self._close_interval()

    def _close_interval(self) -> None:
        """Compare up to the moment until which all ranks have reported, if it is time to."""
        interval_end = min(rank_samples[-1][0] for rank_samples in self._samples.values())
        if self._interval_start is None:
            self._interval_start = max(samples[0][0] for samples in self._samples.values())
        if interval_end - self._interval_start < self._interval_s:
            return
        added_s = {}
        for rank, rank_samples in self._samples.items():
            at_end = _interpolate(rank_samples, interval_end)
            added_s[rank] = at_end - rank_samples[0][1]
            later = [sample for sample in rank_samples if sample[0] > interval_end]
            self._samples[rank] = [(interval_end, at_end), *later]
        _add_waiting(added_s, self._waited, self._waited_for)
        self._interval_start = interval_end

    def _with_rest(self) -> tuple[dict[int, float], dict[int, float]]:
        """Waiting times up to the latest report of each rank."""
        waited = dict(self._waited)
        waited_for = dict(self._waited_for)
        rest_s = {rank: samples[-1][1] - samples[0][1] for rank, samples in self._samples.items()}
        _add_waiting(rest_s, waited, waited_for)
        return waited, waited_for

    def by_rank(self) -> list[RankTimes]:
        """The times of all ranks that have reported some, by rank."""
        waited, _ = self._with_rest()
        return [
            RankTimes(
                rank=rank,
                total_s=spent.total_s,
                computing_s=spent.computing_s,
                communicating_s=max(0.0, spent.communication_s - waited.get(rank, 0.0)),
                data_s=spent.data_s,
                waiting_s=min(waited.get(rank, 0.0), spent.communication_s),
                is_partial=spent.is_partial,
                starting_s=spent.starting_s,
            )
            for rank, spent in sorted(self._latest.items())
        ]

    def slowest(self) -> SlowestRank | None:
        """The rank that the others wait for; None where no single one stands out."""
        _, waited_for = self._with_rest()
        all_waited_s = sum(waited_for.values())
        if not all_waited_s:
            return None
        rank, waited_s = max(waited_for.items(), key=lambda entry: entry[1])
        mean_s = statistics.fmean(times.steady_s for times in self.by_rank())
        waited_share = waited_s / mean_s if mean_s > 0 else 0.0
        stands_out = waited_s >= _CLEAR_SHARE * all_waited_s
        is_much = waited_s >= _LEAST_WAITED_S and waited_share >= _LEAST_SHARE
        return SlowestRank(rank, waited_s, waited_share) if stands_out and is_much else None


def _add_waiting(
    added_s: Mapping[int, float], waited: dict[int, float], waited_for: dict[int, float]
) -> None:
    """Share out what ranks have spent in collectives in an interval."""
    # A rank alone waits for nobody who is known.
    if len(added_s) < 2:
        return
    last_rank = min(added_s, key=lambda rank: added_s[rank])
    exchange_s = added_s[last_rank]
    for rank, communication_s in added_s.items():
        waited[rank] = waited.get(rank, 0.0) + communication_s - exchange_s
    others_s = sum(added_s.values()) - exchange_s * len(added_s)
    waited_for[last_rank] = waited_for.get(last_rank, 0.0) + others_s / (len(added_s) - 1)


def _interpolate(samples: list[tuple[float, float]], wanted_time: float) -> float:
    """The value at a time between the first and the last sample."""
    place = bisect.bisect_left(samples, (wanted_time,))
    if place == 0:
        return samples[0][1]
    if place == len(samples):
        return samples[-1][1]
    (time_before, value_before), (time_after, value_after) = samples[place - 1 : place + 1]
    if time_after <= time_before:
        return value_after
    part = (wanted_time - time_before) / (time_after - time_before)
    return value_before + part * (value_after - value_before)


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
