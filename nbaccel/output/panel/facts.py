"""The facts that a panel shows, by rank. Nothing is drawn or looked up here."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nbaccel.base.metric_history import MetricHistory, Point
from nbaccel.output.bars import BarText, SeenBar, note_outer_bar
from nbaccel.output.folded_lines import SeenWarnings
from nbaccel.output.panel.rank_times import TimeComparison

if TYPE_CHECKING:
    from nbaccel.base.outer_loop import OuterLoop
    from nbaccel.output.folded_lines import RecentLine
    from nbaccel.plan import Plan
    from nbaccel.workers.messaging import Metrics

__all__ = [
    "RankFacts",
    "RankStatus",
    "RunBoard",
    "StepPace",
    "loss_name",
    "mean",
    "mean_points",
]

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


class StepPace:
    """How fast steps are taken, by the clock of the rank that takes them."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def add(self, time: float, num_steps: int) -> None:
        """So many steps had been taken at this time."""
        # A new loop counts from the start again, and has its own speed.
        if self._points and num_steps < self._points[-1][1]:
            self._points.clear()
            self._first = None
        self._first = self._first or (time, num_steps)
        self._points.append((time, num_steps))
        while len(self._points) > 2 and self._points[1][0] < time - self._window_s:
            self._points.popleft()

    @property
    def overall(self) -> float | None:
        """Steps per second since the first one; None while there is too little to compute it."""
        return _rate(self._first, self._points[-1]) if self._first is not None else None

    def recent(self, now: float) -> float | None:
        """Steps per second in the window before now; 0 if none has come for long."""
        if len(self._points) < 2:
            return None
        gap = self._points[-1][0] - self._points[-2][0]
        # A step may take longer than the window; several missing ones mean a standstill.
        if now - self._points[-1][0] > max(self._window_s, 3 * gap):
            return 0.0
        return _rate(self._points[0], self._points[-1])


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float | None:
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds > 0 else None


@dataclass(kw_only=True, slots=True)
class MemoryUse:
    """What a rank holds, in bytes."""

    rss: int = 0
    peak_rss: int = 0
    device: int | None = None
    peak_device: int | None = None
    device_total: int | None = None
    """What there is on its device; None where that is not known."""
    is_weighed: bool = False
    """Whether the driver has measured the device's, which is more than its allocator knows."""

    def note_device(self, device_bytes: int | None) -> None:
        """Take in what it holds on its device."""
        if device_bytes is not None:
            self.device = device_bytes
            self.peak_device = max(self.peak_device or 0, device_bytes)


@dataclass(kw_only=True, slots=True)
class LoopFacts:
    """The loop over batches that a rank is in, or was last."""

    name: str = ""
    """What it is called, if that has a name."""
    epoch: int = 0
    """How many loops of this name and length have begun, this one included."""
    batches: int = 0
    total_batches: int | None = None
    outer: OuterLoop | None = None
    """The loop over epochs around it, if the rank reports one."""
    bar_is_whole: bool = False
    """Whether the outer bar that is drawn is that of the whole training."""
    began_at_step: int = 0
    is_seen: bool = False
    """Whether it was seen from outside: its own code may draw a bar of it."""
    marks: list[tuple[float, str]] = field(default_factory=list)
    """The step at which each loop over batches began, and the loop's name."""
    known: set[tuple[str, int, int | None]] = field(default_factory=set)
    """Loops over batches that have begun."""

    @property
    def label(self) -> str:
        """`epoch 3`, or what the loop is called; empty before the first loop."""
        return self.name or (f"epoch {self.epoch}" if self.epoch else "")

    def receive(self, message: Metrics) -> None:
        """Take in what a rank has reported."""
        before = (self.name, self.epoch, self.total_batches)
        began_anew = message.batches < self.batches
        self.name = message.loop_name
        self.epoch = message.epoch
        self.batches = message.batches
        self.total_batches = message.total_batches
        self.bar_is_whole = message.bar_is_whole
        self.outer = message.outer
        self.is_seen = message.loop_is_seen
        self.began_at_step = message.loop_began_at_step
        loop = (self.name, self.epoch, self.total_batches)
        # One that holds a validation now and then goes on after it.
        goes_on = message.batches > 0 and loop in self.known - {before}
        self.known.add(loop)
        if self.epoch and (began_anew or loop != before) and not goes_on:
            self._mark(float(self.began_at_step))

    def _mark(self, step: float) -> None:
        # A loop over epochs and the first loop within it begin at one step.
        if self.marks and self.marks[-1][0] == step:
            self.marks.pop()
        if len(self.marks) < _MAX_EPOCH_MARKS:
            self.marks.append((step, self.label))


@dataclass(kw_only=True, slots=True)
class RankFacts:
    """What is known of one rank."""

    rank: int
    state: str = ""
    since: float = 0.0
    """When it came into that state."""
    doing: str = ""
    last_line: str = ""
    memory: MemoryUse = field(default_factory=MemoryUse)

    steps: int | None = None
    """None of a rank that reports none."""
    pace: StepPace = field(default_factory=StepPace)
    batch_pace: StepPace = field(default_factory=StepPace)
    """Of batches: a step may take several."""
    samples: int = 0
    """Samples that it has used in loops over batches."""
    samples_pace: StepPace = field(default_factory=StepPace)
    had_group: bool = False
    """Whether it has been in a process group."""
    received_at: float = 0.0
    """When it has reported last, by the clock of the rank."""
    loop: LoopFacts = field(default_factory=LoopFacts)

    histories: dict[str, MetricHistory] = field(default_factory=dict)
    """Each metric over the whole run."""
    left_out: tuple[str, ...] = ()
    """The first metrics by name that it has logged and that are not known here."""
    num_left_out: int = 0
    """How many these are in all."""

    bars: tuple[BarText, ...] = ()
    """Progress bars that its own code draws."""
    seen_bar: SeenBar | None = None
    """When the outer one of these has changed."""

    phase: str = ""
    """What its step is doing beside training: `compiling, step 2 of about 3`."""
    programs: int | None = None
    """Programs that its device's compiler has made; None where there is none."""
    compile_s: float = 0.0

    @property
    def has_bar(self) -> bool:
        """Whether the panel shows a bar that the function has made."""
        is_told = bool(self.loop.epoch) and not self.loop.is_seen
        return is_told or any(not bar.is_elsewhere for bar in self.bars)

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of each metric."""
        last = {name: history.last for name, history in self.histories.items()}
        return {name: value for name, value in last.items() if value is not None}

    @property
    def loss_name(self) -> str:
        """The metric that is shown first; empty where there is none."""
        return loss_name(self.histories) or ""

    @property
    def loss(self) -> MetricHistory:
        """The history of the metric that is shown first; without values where there is none."""
        return self.histories.get(self.loss_name) or MetricHistory()

    def see(self, row: RankStatus, now: float) -> None:
        """Take in what a look at the worker has found."""
        if not self.state:
            # At the first look the rank may have been in its state for some time.
            self.since = now - row.seconds
        elif self.state != row.state:
            self.since = now
        self.state = row.state
        self.doing = row.doing
        self.last_line = row.last_line or self.last_line
        self.bars = row.bars or tuple(bar for bar in self.bars if not bar.is_elsewhere)
        self.seen_bar = note_outer_bar(self.seen_bar, self.bars, now)
        # A process that has ended has 0: the last value that was seen is kept.
        if row.rss_bytes:
            self.memory.rss = row.rss_bytes
            self.memory.peak_rss = max(self.memory.peak_rss, row.rss_bytes)
        self.memory.is_weighed = row.device_bytes is not None
        self.memory.note_device(row.device_bytes)

    def receive(self, message: Metrics) -> None:
        """Take in what the rank has reported of its training."""
        self.loop.receive(message)
        self.received_at = message.time
        self.had_group = message.had_group
        self.steps = message.steps
        if message.steps is not None:
            self.pace.add(message.time, message.steps)
        self.batch_pace.add(message.time, message.batches_in_all)
        self.samples = message.samples
        self.samples_pace.add(message.time, message.samples)
        self.phase = message.phase
        self.programs = message.programs
        self.compile_s = message.compile_s
        if not self.memory.is_weighed:
            self.memory.note_device(message.device_bytes)
        self.left_out = message.left_out
        self.num_left_out = message.num_left_out
        for name in message.replaced:
            self.histories.pop(name, None)
        for name, points in message.points:
            history = self.histories.setdefault(name, MetricHistory())
            for step, value in points:
                history.add(value, step)


class RunBoard:
    """The facts of a run.

    Attributes:
        host_total_bytes: Memory of the machine, which all its ranks share; None where not known.
        library_messages: Harmless lines of libraries that are folded away.
        num_library_messages: How many there were, equal ones of several ranks counted each.
        recent_lines: The newest lines that each rank has printed.
        num_lines: How many lines have been shown in all.
        plan: What was planned; None where it is not known here.
        warnings: Warnings that ranks have printed.
        began_on: When it began, by the calendar, in UTC.
        now: The time of the latest look.
        ending: How it ended, if not well: `failed`, `stopped`, `timed out`.
    """

    def __init__(self, ranks: Iterable[int], *, began_at: float, plan: Plan | None = None) -> None:
        self.host_total_bytes: int | None = None
        self.library_messages: list[str] = []
        self.num_library_messages = 0
        self.recent_lines: dict[int, list[RecentLine]] = {}
        self.num_lines = 0
        self.ranks = {rank: RankFacts(rank=rank, since=began_at) for rank in sorted(ranks)}
        self.plan = plan
        self.warnings = SeenWarnings()
        self.began = began_at
        self.began_on = dt.datetime.now(dt.timezone.utc)
        self.now = began_at
        self.ending = ""

    @functools.cached_property
    def times(self) -> TimeComparison:
        """What ranks spend their time on, compared."""
        return TimeComparison(self.ranks)

    @property
    def seconds(self) -> float:
        """How long it has taken, up to the latest look."""
        return self.now - self.began

    def see(self, rows: Sequence[RankStatus]) -> None:
        """Take in what a look at the workers has found."""
        for row in rows:
            self.ranks.setdefault(row.rank, RankFacts(rank=row.rank)).see(row, self.now)

    def receive(self, rank: int, message: Metrics) -> None:
        """Take in what a rank has reported of its training."""
        facts = self.ranks.get(rank)
        if facts is None:
            return
        facts.receive(message)
        if message.spent is not None:
            self.times.receive(rank, message.time, message.spent)

    def metric_names(self) -> list[str]:
        """All metrics that some rank has reported, the one that is shown first in front."""
        names = dict.fromkeys(name for facts in self.ranks.values() for name in facts.histories)
        first = loss_name(names)
        return sorted(names, key=lambda name: name != first)

    def curves(self, name: str) -> dict[int, list[Point]]:
        """Rank → the points of a metric, of ranks that have some."""
        return {
            rank: facts.histories[name].points()
            for rank, facts in self.ranks.items()
            if name in facts.histories
        }

    @property
    def leading_rank(self) -> RankFacts | None:
        """The lowest rank that reports its training: others are in step with it, or silent."""
        return next((facts for facts in self.ranks.values() if facts.steps is not None), None)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second now, of all ranks together; None where none is known."""
        rates = [
            rate
            for facts in self.ranks.values()
            if facts.samples and (rate := facts.samples_pace.recent(self.now)) is not None
        ]
        return math.fsum(rates) if rates else None


def mean_points(curves: Iterable[Sequence[Point]], max_points: int = _MEAN_POINTS) -> list[Point]:
    """The mean of all ranks over the steps."""
    finite = [[point for point in points if math.isfinite(point[1])] for points in curves]
    points = sorted(itertools.chain.from_iterable(finite))
    # Only finite ones: else there would be more groups than steps, and a rank's alone in some.
    longest = max(map(len, finite), default=0)
    num_groups = min(longest, max_points, len(points))
    edges = [place * len(points) // num_groups for place in range(num_groups + 1) if num_groups]
    means = []
    for first, last in itertools.pairwise(edges):
        group = points[first:last]
        step = math.fsum(step for step, _ in group) / len(group)
        means.append((step, math.fsum(value / len(group) for _, value in group)))
    return means


def loss_name(metrics: Iterable[str]) -> str | None:
    """The metric to draw: `loss`, or what has that in its name, or the first one there is."""
    return min(metrics, key=_how_far_from_loss, default=None)


def _how_far_from_loss(name: str) -> int:
    if name.lower() == "loss":
        return 0
    return 1 if "loss" in name.lower() else 2


def mean(values: Iterable[float]) -> float | None:
    """The mean; a value that is not finite wins, so that it shows. None without values."""
    values = list(values)
    odd = next((value for value in values if not math.isfinite(value)), None)
    return odd if odd is not None or not values else math.fsum(values) / len(values)
