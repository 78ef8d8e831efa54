"""What ranks spend their time on, compared: who waits for whom.

The rank that comes last into a collective waits for nobody, so the least time of all ranks is the
exchange's, and what a rank has above that is waiting. It is compared interval by interval, because
another rank may be last in each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbaccel.base.units import format_seconds

if TYPE_CHECKING:
    from nbaccel.base.spent_time import SpentTime


TIME_KINDS = ("computing", "communicating", "waiting for data", "waiting for others")
_LEAST_STARTING_SHARE = 0.02  # of the time, to be worth saying
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

    total_s: float  # since its first loop over batches began
    computing_s: float  # computing, and whatever is none of the others
    communicating_s: float  # in collectives while all ranks were there
    data_s: float  # waiting for batches
    waiting_s: float  # in collectives, waiting for other ranks
    is_partial: bool  # whether some communication could not be measured, and is in `computing_s`
    starting_s: float = 0.0  # what the first step computed for longer; in no other part

    @property
    def parts(self) -> dict[str, float]:
        """`TIME_KINDS`, each with its seconds."""
        seconds = (self.computing_s, self.communicating_s, self.data_s, self.waiting_s)
        return dict(zip(TIME_KINDS, seconds, strict=True))

    @property
    def steady_s(self) -> float:
        """The time of which shares are told: without the start, which is no part of a step."""
        return self.total_s - self.starting_s


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that the others wait for."""

    rank: int
    waited_s: float  # for how long each of the others waited for it, on average
    waited_share: float  # the same as a part of the time


class TimeComparison:
    """Compares the times of ranks as they are reported."""

    def __init__(self, worker_ranks: Iterable[int]) -> None:
        self._ranks = frozenset(worker_ranks)
        self._interval_start: float | None = None
        self._latest: dict[int, SpentTime] = {}
        self._samples: dict[int, list[tuple[float, float]]] = {}
        """Rank → times and its seconds in collectives until then, since the interval's start."""
        self._waited: dict[int, float] = {}  # rank → seconds for which it has waited for others
        self._waited_for: dict[int, float] = {}  # rank → seconds that others waited for it

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
        if interval_end - self._interval_start < _INTERVAL_S:
            return
        import numpy as np  # here: most cells compare no ranks, and it takes a tenth of a second

        added_s = {}
        for rank, rank_samples in self._samples.items():
            times, seconds = zip(*rank_samples, strict=True)
            at_end = float(np.interp(interval_end, times, seconds))
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

    def by_rank(self) -> dict[int, RankTimes]:
        """The times of all ranks that have reported some, by rank."""
        waited, _ = self._with_rest()
        return {
            rank: RankTimes(
                total_s=spent.total_s,
                computing_s=spent.computing_s,
                communicating_s=max(0.0, spent.communication_s - waited.get(rank, 0.0)),
                data_s=spent.data_s,
                waiting_s=min(waited.get(rank, 0.0), spent.communication_s),
                is_partial=spent.is_partial,
                starting_s=spent.starting_s,
            )
            for rank, spent in sorted(self._latest.items())
        }

    def slowest(self) -> SlowestRank | None:
        """The rank that the others wait for; None where no single one stands out."""
        _, waited_for = self._with_rest()
        all_waited_s = sum(waited_for.values())
        if not all_waited_s:
            return None
        rank, waited_s = max(waited_for.items(), key=lambda entry: entry[1])
        mean_s = statistics.fmean(times.steady_s for times in self.by_rank().values())
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


def percent_of(part: float, whole: float) -> str:
    """`12 %`."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


def slowest_sentence(slowest: SlowestRank | None, timed_ranks: Mapping[int, RankTimes]) -> str:
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


def _reason_of(slowest: SlowestRank, timed_ranks: Mapping[int, RankTimes]) -> str:
    """In what it spends more than the others."""
    others = [times for rank, times in timed_ranks.items() if rank != slowest.rank]
    if slowest.rank not in timed_ranks or not others:
        return ""
    words = {
        "data_s": "waits longer for data",
        "computing_s": "computes longer",
        "starting_s": "starts longer in its first step",
    }
    more_s = {
        name: getattr(timed_ranks[slowest.rank], name)
        - statistics.fmean(getattr(times, name) for times in others)
        for name in words
    }
    most = max(more_s, key=lambda name: more_s[name])
    return words[most] if more_s[most] > slowest.waited_s / 4 else ""


def starting_sentence(timed_ranks: Mapping[int, RankTimes]) -> str:
    """What the shares leave out; empty where that is too little to matter."""
    starting_s = statistics.fmean(times.starting_s for times in timed_ranks.values())
    total_s = statistics.fmean(times.total_s for times in timed_ranks.values())
    if starting_s < _LEAST_STARTING_SHARE * total_s:
        return ""
    on_average = " on average" if len(timed_ranks) > 1 else ""
    return (
        f"Left out is the start in the first step, {format_seconds(starting_s)}{on_average}: by "
        "that it computed longer than the second."
    )
