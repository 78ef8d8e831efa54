"""The facts that a dashboard shows, by rank. Nothing is drawn or looked up here."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbaccel.output.dashboard.rank_times import TimeComparison
from nbaccel.output.seen_warnings import SeenWarnings
from nbaccel.output.tqdm_text import BarText, SeenBar, note_outer_bar

if TYPE_CHECKING:
    from nbaccel.base.outer_loop import OuterLoop
    from nbaccel.output.recent_lines import RecentLine
    from nbaccel.plan import Plan
    from nbaccel.workers.messaging import Metrics


__all__ = [
    "MetricHistory",
    "RankFacts",
    "RankStatus",
    "RunBoard",
    "StepPace",
    "loss_name",
    "mean_points",
]


_HISTORY_POINTS = 240
_MEAN_POINTS = 120
_MAX_EPOCH_MARKS = 200
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
    bars: tuple[BarText, ...] = ()
    """The progress bars that its code draws, the outer one first."""
    names: tuple[str, ...] = ()
    """Of a live worker: names that it holds."""
    group: str = ""
    """Of a live worker: the process group that it has joined."""


class MetricHistory:
    """Values of a whole run in bounded memory: thinned out evenly when they become too many."""

    def __init__(self, max_points: int = _HISTORY_POINTS) -> None:
        self._most = max_points
        self._kept: list[tuple[float, float]] = []
        self._stride = 1
        self._offered = 0
        self._last: tuple[float, float] | None = None

    def add(self, new_value: float, step: float | None = None) -> None:
        """Take in the next value."""
        if step is None:
            step = 0.0 if self._last is None else self._last[0] + 1
        self._last = (step, new_value)
        if self._offered % self._stride == 0:
            self._kept.append(self._last)
        self._offered += 1
        if len(self._kept) > self._most:
            # Every second one: the rest stay evenly spaced, and the first value stays.
            self._kept = self._kept[::2]
            self._stride *= 2

    @property
    def first(self) -> float | None:
        """The first value of all."""
        return self._kept[0][1] if self._kept else None

    @property
    def last(self) -> float | None:
        """The latest value."""
        return None if self._last is None else self._last[1]

    @property
    def last_point(self) -> tuple[float, float] | None:
        """Step and value of the latest one."""
        return self._last

    def points(self) -> list[tuple[float, float]]:
        """Step and value, from the first to the latest, evenly thinned but for the latest."""
        left_out = (self._offered - 1) % self._stride != 0
        return [*self._kept, self._last] if left_out and self._last is not None else [*self._kept]

    def values(self) -> list[float]:
        """Values from the first to the latest, the same distance apart but for the latest."""
        return [value for _, value in self.points()]


class StepPace:
    """How fast steps are taken, by the clock of the rank that takes them."""

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
    seconds = end_point[0] - start_point[0]
    return (end_point[1] - start_point[1]) / seconds if seconds > 0 else None


@dataclass(kw_only=True, slots=True)
class RankFacts:
    """What is known of one rank."""

    rank: int
    state: str = ""
    since: float = 0.0
    """When it came into that state."""
    steps: int | None = None
    pace: StepPace = field(default_factory=StepPace)
    samples: int = 0
    """Samples that it has used in loops over batches."""
    samples_pace: StepPace = field(default_factory=StepPace)
    received_at: float = 0.0
    """When it has reported last, by the clock of the rank."""
    loop_name: str = ""
    """What its loop over batches is called, if that has a name."""
    epoch: int = 0
    """How many loops of this name and length have begun, this one included."""
    batches: int = 0
    total_batches: int | None = None
    outer: OuterLoop | None = None
    """The loop over epochs around it, if the rank reports one."""
    known_loops: set[tuple[str, int, int | None]] = field(default_factory=set)
    """Loops over batches that have begun."""
    epoch_marks: list[tuple[float, str]] = field(default_factory=list)
    """The step at which each loop over batches began, and the loop's name."""
    metrics: dict[str, float] = field(default_factory=dict)
    histories: dict[str, MetricHistory] = field(default_factory=dict)
    """Each metric over the whole run."""
    loss_name: str = ""
    """The metric that is shown first."""
    num_left_out: int = 0
    """Metrics that it has logged and that are not known here."""
    left_out: tuple[str, ...] = ()
    """The first of these by name."""
    bars: tuple[BarText, ...] = ()
    """Progress bars that its own code draws."""
    seen_bar: SeenBar | None = None
    """When the outer one of these has changed."""
    bar_is_whole: bool = False
    """Whether the outer one is that of the whole training."""
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
    device_total_bytes: int | None = None
    """What there is on its device; None where that is not known."""

    @property
    def loss(self) -> MetricHistory:
        """The history of the metric that is shown first; without values where there is none."""
        return self.histories.get(self.loss_name) or MetricHistory()

    @property
    def loop_label(self) -> str:
        """`epoch 3`, or what the loop is called; empty before the first loop."""
        return self.loop_name or (f"epoch {self.epoch}" if self.epoch else "")


class RunBoard:
    """The facts of a run.

    Attributes:
        host_total_bytes: Memory of the machine, which all its ranks share; None where not known.
        library_messages: Harmless lines of libraries that are folded away.
        num_library_messages: How many there were, equal ones of several ranks counted each.
        recent_lines: The newest lines that each rank has printed.
        num_lines: How many lines have been shown in all.
        times: What ranks spend their time on, compared.
        plan: What was planned; None where it is not known here.
        warnings: Warnings that ranks have printed.
    """

    def __init__(self, worker_ranks: Iterable[int], *, began_at: float) -> None:
        self.host_total_bytes: int | None = None
        self.library_messages: list[str] = []
        self.num_library_messages = 0
        self.recent_lines: dict[int, list[RecentLine]] = {}
        self.num_lines = 0
        self.ranks: dict[int, RankFacts] = {
            worker_rank: RankFacts(rank=worker_rank, since=began_at)
            for worker_rank in sorted(worker_ranks)
        }
        self.times = TimeComparison(self.ranks)
        self.plan: Plan | None = None
        self.warnings = SeenWarnings()
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
            rank_facts.bars = rank_row.bars or tuple(
                bar for bar in rank_facts.bars if not bar.is_elsewhere
            )
            rank_facts.seen_bar = note_outer_bar(rank_facts.seen_bar, rank_facts.bars, self.now)
            # A process that has ended has 0: the last value that was seen is kept.
            if rank_row.rss_bytes:
                rank_facts.rss_bytes = rank_row.rss_bytes
                rank_facts.peak_rss_bytes = max(rank_facts.peak_rss_bytes, rank_row.rss_bytes)
            rank_facts.is_weighed = rank_row.device_bytes is not None
            _weigh_device(rank_facts, rank_row.device_bytes)

    def receive(self, worker_rank: int, message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        rank_facts = self.ranks.get(worker_rank)
        if rank_facts is None:
            return
        _take_loop(rank_facts, message)
        rank_facts.steps = message.steps
        rank_facts.pace.add(message.time, message.steps)
        rank_facts.phase = message.phase
        rank_facts.programs = message.programs
        rank_facts.compile_s = message.compile_s
        if message.spent is not None:
            self.times.receive(worker_rank, message.time, message.spent)
        if not rank_facts.is_weighed:
            _weigh_device(rank_facts, message.device_bytes)
        _take_values(rank_facts, message)

    def metric_names(self) -> list[str]:
        """All metrics that some rank has reported, the one that is shown first in front."""
        names = dict.fromkeys(
            name for rank_facts in self.ranks.values() for name in rank_facts.histories
        )
        first_name = loss_name(dict.fromkeys(names, 0.0))
        return sorted(names, key=lambda name: name != first_name)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second now, of all ranks together; None where none is known."""
        rates = [
            rate
            for rank_facts in self.ranks.values()
            if rank_facts.samples and (rate := rank_facts.samples_pace.recent(self.now)) is not None
        ]
        return math.fsum(rates) if rates else None


def _take_loop(rank_facts: RankFacts, message: Metrics) -> None:
    """What is known of the loop over batches."""
    loop_before = (rank_facts.loop_name, rank_facts.epoch, rank_facts.total_batches)
    began_anew = message.batches < rank_facts.batches
    rank_facts.loop_name = message.loop_name
    rank_facts.epoch = message.epoch
    rank_facts.batches = message.batches
    rank_facts.total_batches = message.total_batches
    rank_facts.bar_is_whole = message.bar_is_whole
    rank_facts.outer = message.outer
    rank_facts.received_at = message.time
    loop_now = (rank_facts.loop_name, rank_facts.epoch, rank_facts.total_batches)
    # One that holds a validation now and then goes on after it.
    goes_on = message.batches > 0 and loop_now in rank_facts.known_loops - {loop_before}
    rank_facts.known_loops.add(loop_now)
    if rank_facts.epoch and (began_anew or loop_now != loop_before) and not goes_on:
        began_at_step = float(message.steps - message.batches)
        # A loop over epochs and the first loop within it begin at one step.
        if rank_facts.epoch_marks and rank_facts.epoch_marks[-1][0] == began_at_step:
            rank_facts.epoch_marks.pop()
        if len(rank_facts.epoch_marks) < _MAX_EPOCH_MARKS:
            rank_facts.epoch_marks.append((began_at_step, rank_facts.loop_label))
    rank_facts.samples = message.samples
    rank_facts.samples_pace.add(message.time, message.samples)


def _take_values(rank_facts: RankFacts, message: Metrics) -> None:
    rank_facts.metrics = dict(message.values)
    rank_facts.loss_name = loss_name(rank_facts.metrics) or ""
    rank_facts.num_left_out = message.num_left_out
    rank_facts.left_out = message.left_out
    for position, (metric_name, metric_value) in enumerate(message.values):
        history = rank_facts.histories.setdefault(metric_name, MetricHistory())
        if not message.value_steps:
            history.add(metric_value, float(message.steps))
        # Values that were reported before come with each message: those are no new points.
        elif (float(message.value_steps[position]), metric_value) != history.last_point:
            history.add(metric_value, float(message.value_steps[position]))


def mean_points(
    rank_points: Sequence[Sequence[tuple[float, float]]], max_points: int = _MEAN_POINTS
) -> list[tuple[float, float]]:
    """The mean of all ranks over the steps."""
    all_points = sorted(
        point for points in rank_points for point in points if math.isfinite(point[1])
    )
    # Only finite ones: else there would be more groups than steps, and a rank's alone in some.
    longest = max(
        (sum(math.isfinite(value) for _, value in points) for points in rank_points), default=0
    )
    num_groups = min(longest, max_points, len(all_points))
    edges = (
        [place * len(all_points) // num_groups for place in range(num_groups + 1)]
        if (num_groups)
        else []
    )
    means = []
    for first_place, last_place in itertools.pairwise(edges):
        group = all_points[first_place:last_place]
        means.append(
            (
                math.fsum(step for step, _ in group) / len(group),
                math.fsum(value / len(group) for _, value in group),
            )
        )
    return means


def loss_name(histories: Mapping[str, float]) -> str | None:
    """The metric to draw: `loss`, or what has that in its name, or the first one there is."""
    by_fit = sorted(histories, key=_how_far_from_loss)
    return by_fit[0] if by_fit else None


def mean(rank_values: Iterable[float]) -> float | None:
    """The mean; a value that is not finite wins, so that it shows. None without values."""
    values = list(rank_values)
    return (
        math.fsum(values) / len(values)
        if all(map(math.isfinite, values)) and values
        else _odd(values)
    )


def _odd(rank_values: Sequence[float]) -> float | None:
    return next((rank_value for rank_value in rank_values if not math.isfinite(rank_value)), None)


def _how_far_from_loss(metric_name: str) -> int:
    plain_name = metric_name.lower()
    if plain_name == "loss":
        return 0
    return 1 if "loss" in plain_name else 2


def _weigh_device(rank_facts: RankFacts, device_bytes: int | None) -> None:
    if device_bytes is not None:
        rank_facts.device_bytes = device_bytes
        rank_facts.peak_device_bytes = max(rank_facts.peak_device_bytes or 0, device_bytes)
