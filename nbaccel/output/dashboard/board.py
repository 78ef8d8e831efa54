"""The facts that a dashboard shows, by rank. Nothing is drawn or looked up here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbaccel.output.dashboard.rank_times import TimeComparison

if TYPE_CHECKING:
    from nbaccel.workers.messaging import Metrics


__all__ = ["MetricHistory", "RankFacts", "RankStatus", "RunBoard", "StepPace", "loss_name"]


_HISTORY_POINTS = 240
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, at one moment."""

    rank: int
    state: str
    """In a word or two: `idle`, `running`, `stopped`."""
    seconds: float
    """For how long it has been in that state."""
    rss_bytes: int
    device_bytes: int | None = None
    """What it holds on its device; None where there is none, or it is not known."""
    doing: str = ""
    """`waiting in all_reduce (Cell In[3], line 5)`"""
    last_line: str = ""
    """What it printed last."""


class MetricHistory:
    """Values of a whole run in bounded memory: thinned out evenly when they become too many.

    Args:
        max_points: How many values are kept.
    """

    def __init__(self, max_points: int = _HISTORY_POINTS) -> None:
        self._most = max_points
        self._kept: list[float] = []
        self._stride = 1
        self._offered = 0
        self._last: float | None = None

    def add(self, new_value: float) -> None:
        """Take in the next value."""
        self._last = new_value
        if self._offered % self._stride == 0:
            self._kept.append(new_value)
        self._offered += 1
        if len(self._kept) > self._most:
            # Every second one: the rest stay evenly spaced, and the first value stays.
            self._kept = self._kept[::2]
            self._stride *= 2

    @property
    def first(self) -> float | None:
        """The first value of all."""
        return self._kept[0] if self._kept else None

    @property
    def last(self) -> float | None:
        """The latest value."""
        return self._last

    def values(self) -> list[float]:
        """Values from the first to the latest, the same distance apart but for the latest."""
        left_out = (self._offered - 1) % self._stride != 0
        return [*self._kept, self._last] if left_out and self._last is not None else [*self._kept]


class StepPace:
    """How fast steps are taken, by the clock of the rank that takes them.

    Args:
        window_s: Seconds that "now" reaches back.
    """

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def add(self, point_time: float, num_steps: int) -> None:
        """So many steps had been taken at this time."""
        # A new loop counts from the start again, and has its own speed.
        if self._points and num_steps < self._points[-1][1]:
            self._points.clear()
            self._first = None
        self._first = self._first or (point_time, num_steps)
        self._points.append((point_time, num_steps))
        while len(self._points) > 2 and self._points[1][0] < point_time - self._window_s:
            self._points.popleft()

    @property
    def overall(self) -> float | None:
        """Steps per second since the first one; None while there is too little to compute it."""
        return _rate(self._first, self._points[-1]) if self._first is not None else None

    def recent(self, current_time: float) -> float | None:
        """Steps per second in the window before now; 0 if none has come for long."""
        if len(self._points) < 2:
            return None
        point_gap = self._points[-1][0] - self._points[-2][0]
        # A step may take longer than the window; several missing ones mean a standstill.
        if current_time - self._points[-1][0] > max(self._window_s, 3 * point_gap):
            return 0.0
        return _rate(self._points[0], self._points[-1])


def _rate(start_point: tuple[float, int], end_point: tuple[float, int]) -> float | None:
    point_seconds = end_point[0] - start_point[0]
    return (end_point[1] - start_point[1]) / point_seconds if point_seconds > 0 else None


@dataclass(kw_only=True, slots=True)
class RankFacts:
    """What is known of one rank."""

    rank: int
    state: str = ""
    since: float = 0.0
    """When it came into that state."""
    steps: int | None = None
    pace: StepPace = field(default_factory=StepPace)
    metrics: dict[str, float] = field(default_factory=dict)
    loss: MetricHistory = field(default_factory=MetricHistory)
    loss_name: str = ""
    """Which metric `loss` is."""
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    device_bytes: int | None = None
    peak_device_bytes: int | None = None
    is_weighed: bool = False
    """Whether the driver has measured its device memory, which is more than its allocator knows."""
    last_line: str = ""
    doing: str = ""
    phase: str = ""
    """What its step is doing beside training: `compiling, step 2 of about 3`."""
    programs: int | None = None
    """Programs that its device's compiler has made; None where there is none."""
    compile_s: float = 0.0


class RunBoard:
    """The facts of a run.

    Args:
        worker_ranks: The ranks that take part.
        began_at: When it began (CLOCK_MONOTONIC, as all times here).
    """

    def __init__(self, worker_ranks: Iterable[int], *, began_at: float) -> None:
        self.ranks: dict[int, RankFacts] = {
            worker_rank: RankFacts(rank=worker_rank, since=began_at)
            for worker_rank in sorted(worker_ranks)
        }
        self.times = TimeComparison(self.ranks)
        self.began = began_at
        self.now = began_at
        """The time of the latest look."""
        self.ending = ""
        """How it ended, if not well: `failed`, `stopped`, `timed out`."""

    @property
    def seconds(self) -> float:
        """How long it has taken, up to the latest look."""
        return self.now - self.began

    def see(self, rank_rows: Sequence[RankStatus]) -> None:
        """Take in what a look at the workers has found."""
        for rank_row in rank_rows:
            rank_facts = self.ranks.setdefault(rank_row.rank, RankFacts(rank=rank_row.rank))
            if not rank_facts.state:
                # At the first look the rank may have been in its state for some time.
                rank_facts.since = self.now - rank_row.seconds
            elif rank_facts.state != rank_row.state:
                rank_facts.since = self.now
            rank_facts.state = rank_row.state
            rank_facts.doing = rank_row.doing
            rank_facts.last_line = rank_row.last_line or rank_facts.last_line
            # A process that has ended has 0: the last value that was seen is kept.
            if rank_row.rss_bytes:
                rank_facts.rss_bytes = rank_row.rss_bytes
                rank_facts.peak_rss_bytes = max(rank_facts.peak_rss_bytes, rank_row.rss_bytes)
            rank_facts.is_weighed = rank_row.device_bytes is not None
            _weigh_device(rank_facts, rank_row.device_bytes)

    def hear(self, worker_rank: int, metrics_message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        rank_facts = self.ranks.get(worker_rank)
        if rank_facts is None:
            return
        rank_facts.steps = metrics_message.steps
        rank_facts.pace.add(metrics_message.time, metrics_message.steps)
        rank_facts.metrics = dict(metrics_message.values)
        rank_facts.phase = metrics_message.phase
        rank_facts.programs = metrics_message.programs
        rank_facts.compile_s = metrics_message.compile_s
        if metrics_message.spent is not None:
            self.times.hear(worker_rank, metrics_message.time, metrics_message.spent)
        if not rank_facts.is_weighed:
            _weigh_device(rank_facts, metrics_message.device_bytes)
        metric_name = loss_name(rank_facts.metrics)
        if metric_name is None:
            return
        # Another metric: one curve must not join the values of two.
        if metric_name != rank_facts.loss_name:
            rank_facts.loss_name, rank_facts.loss = metric_name, MetricHistory()
        rank_facts.loss.add(rank_facts.metrics[metric_name])


def loss_name(metric_histories: Mapping[str, float]) -> str | None:
    """The metric to draw: `loss`, or what has that in its name, or the first one there is."""
    by_fit = sorted(metric_histories, key=_how_far_from_loss)
    return by_fit[0] if by_fit else None


def mean(rank_values: Iterable[float]) -> float | None:
    """The mean; a value that is not finite wins, so that it shows. None without values."""
    known_values = list(rank_values)
    return (
        math.fsum(known_values) / len(known_values)
        if all(map(math.isfinite, known_values)) and known_values
        else _odd(known_values)
    )


def _odd(rank_values: Sequence[float]) -> float | None:
    return next((rank_value for rank_value in rank_values if not math.isfinite(rank_value)), None)


def _how_far_from_loss(metric_name: str) -> int:
    plain_name = metric_name.lower()
    return 0 if plain_name == "loss" else 1 if "loss" in plain_name else 2


def _weigh_device(rank_facts: RankFacts, device_bytes: int | None) -> None:
    if device_bytes is not None:
        rank_facts.device_bytes = device_bytes
        rank_facts.peak_device_bytes = max(rank_facts.peak_device_bytes or 0, device_bytes)
