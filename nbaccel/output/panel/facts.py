"""The facts that a panel shows, by rank; who waits for whom. Nothing is drawn or looked up here.

The rank that comes last into a collective waits for nobody, so the least time of all ranks is the
exchange's, and what a rank has above that is waiting. It is compared interval by interval, because
another rank may be last in each.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbaccel.base.spent_time import SpentTime
from nbaccel.base.training_metrics import MetricHistory, Metrics, OuterLoop, Point
from nbaccel.base.units import format_seconds, number_ranges, shorten_text
from nbaccel.plan import Plan

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
        if self._samples.keys() != self._ranks:
            return
        # Compared up to the moment until which all ranks have reported, if it is time to.
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


_MAX_EPOCH_MARKS = 200
_WINDOW_S = 10.0
_UNTOLD = Metrics(time=0.0, steps=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, at one moment."""

    rank: int
    state: str  # in a word or two: `idle`, `running`, `stopped`
    seconds: float  # for how long it has been in that state
    rss_bytes: int
    device_bytes: int | None = None  # what it holds there; None where that is not known
    doing: str = ""  # `waiting in all_reduce (Cell In[3], line 5)`
    rewritten_lines: tuple[str, ...] = ()  # unfinished lines that its code draws in place
    names: tuple[str, ...] = ()  # of a live worker: names that it holds
    group: str = ""  # of a live worker: the process group that it has joined


class StepPace:
    """How fast steps are taken, by the clock of the rank that takes them."""

    def __init__(self) -> None:
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
        while len(self._points) > 2 and self._points[1][0] < time - _WINDOW_S:
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
        if now - self._points[-1][0] > max(_WINDOW_S, 3 * gap):
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
    device_total: int | None = None  # what there is on its device; None where that is not known
    is_weighed: bool = False  # measured by the driver, which knows more than the allocator

    def note_device(self, device_bytes: int | None) -> None:
        """Take in what it holds on its device."""
        if device_bytes is not None:
            self.device = device_bytes
            self.peak_device = max(self.peak_device or 0, device_bytes)


@dataclass(kw_only=True, slots=True)
class RankFacts:
    """What is known of one rank."""

    rank: int
    state: str = ""
    since: float = 0.0  # when it came into that state
    doing: str = ""
    memory: MemoryUse = field(default_factory=MemoryUse)
    told: Metrics = _UNTOLD  # what it has reported last; steps are None of one that reports none
    pace: StepPace = field(default_factory=StepPace)
    batch_pace: StepPace = field(default_factory=StepPace)  # of batches: a step may take several
    samples_pace: StepPace = field(default_factory=StepPace)
    histories: dict[str, MetricHistory] = field(default_factory=dict)  # metrics over the whole run
    marks: list[tuple[float, str]] = field(default_factory=list)  # step and name of each loop
    known_loops: set[tuple[str, int, int | None]] = field(default_factory=set)
    rewritten_lines: tuple[str, ...] = ()  # unfinished lines that its code draws in place

    @property
    def has_bar(self) -> bool:
        """Whether the panel shows a bar that the function has made."""
        is_told = bool(self.told.epoch) and not self.told.loop_is_seen
        return is_told or any(not bar.is_elsewhere for bar in self.told.bars)

    @property
    def loop_label(self) -> str:
        """`epoch 3`, or what the loop is called; empty before the first loop."""
        return self.told.loop_name or (f"epoch {self.told.epoch}" if self.told.epoch else "")

    @property
    def metrics(self) -> dict[str, float]:
        """The latest value of each metric."""
        return {name: one.last for name, one in self.histories.items() if one.last is not None}

    @property
    def loss_name(self) -> str:
        """The metric that is shown first; empty where there is none."""
        return next(iter(loss_first(self.histories)), "")

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
        self.rewritten_lines = row.rewritten_lines
        # A process that has ended has 0: the last value that was seen is kept.
        if row.rss_bytes:
            self.memory.rss = row.rss_bytes
            self.memory.peak_rss = max(self.memory.peak_rss, row.rss_bytes)
        self.memory.is_weighed = row.device_bytes is not None
        self.memory.note_device(row.device_bytes)

    def receive(self, message: Metrics) -> None:
        """Take in what the rank has reported of its training."""
        self._note_loop(self.told, message)
        self.told = message
        if message.steps is not None:
            self.pace.add(message.time, message.steps)
        self.batch_pace.add(message.time, message.batches_in_all)
        self.samples_pace.add(message.time, message.samples)
        if not self.memory.is_weighed:
            self.memory.note_device(message.device_bytes)
        for name in message.replaced:
            self.histories.pop(name, None)
        for name, points in message.points:
            history = self.histories.setdefault(name, MetricHistory())
            for step, value in points:
                history.add(value, step)

    def _note_loop(self, before: Metrics, message: Metrics) -> None:
        loop, loop_before = (
            (told.loop_name, told.epoch, told.total_batches) for told in (message, before)
        )
        # One that holds a validation now and then goes on after it.
        goes_on = message.batches > 0 and loop in self.known_loops - {loop_before}
        self.known_loops.add(loop)
        began = message.batches < before.batches or loop != loop_before
        if not message.epoch or not began or goes_on:
            return
        step = float(message.loop_began_at_step)
        # A loop over epochs and the first loop within it begin at one step.
        if self.marks and self.marks[-1][0] == step:
            self.marks.pop()
        if len(self.marks) < _MAX_EPOCH_MARKS:
            self.marks.append((step, message.loop_name or f"epoch {message.epoch}"))


class RunBoard:
    """The facts of a run."""

    def __init__(self, ranks: Iterable[int], *, began_at: float, plan: Plan | None = None) -> None:
        self.host_total_bytes: int | None = None  # of the machine; None where not known
        self.library_messages = LibraryMessages()
        self.warnings = SeenWarnings()
        self.ranks = {rank: RankFacts(rank=rank, since=began_at) for rank in sorted(ranks)}
        self.times = TimeComparison(self.ranks)  # what ranks spend their time on, compared
        self.plan = plan
        self.began = began_at
        self.began_on = dt.datetime.now(dt.timezone.utc)
        self.now = began_at  # the time of the latest look
        self.title = ""  # what is run: the name of a function, or a cell's number
        self.ending = ""  # how it ended, if not well: `failed`, `stopped`, `timed out`

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
        return loss_first(name for facts in self.ranks.values() for name in facts.histories)

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
        return next((facts for facts in self.ranks.values() if facts.told.steps is not None), None)

    @property
    def marks(self) -> list[tuple[float, str]]:
        """Where loops began: those of other ranks are in step with the first that has some."""
        return self.leading_rank.marks if self.leading_rank is not None else []

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second now, of all ranks together; None where none is known."""
        rates = [
            rate
            for facts in self.ranks.values()
            if facts.told.samples and (rate := facts.samples_pace.recent(self.now)) is not None
        ]
        return math.fsum(rates) if rates else None


def loss_first(metrics: Iterable[str]) -> list[str]:
    """The names, each once; in front `loss`, or what has that in its name, or the first one."""
    names = [*dict.fromkeys(metrics)]
    ranked = sorted(names, key=lambda name: (name.lower() != "loss", "loss" not in name.lower()))
    return sorted(names, key=lambda name: name != ranked[0])


def mean(values: Iterable[float]) -> float | None:
    """The mean, which is no number if a value is none. None without values."""
    values = list(values)
    return sum(values) / len(values) if values else None


# Of all epochs where their number is known, else of the loop. It is known from a loop over epochs
# with a bar of `accelerator.progress`, or its `epochs=`, or a bar of tqdm around the loop over
# batches; ranks report all of these. What epochs took that are over counts for those to come, with
# all that lies between their loops.


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """An estimate."""

    seconds: float
    of_what: str  # `epoch` or `loop`; empty for the whole training


def epochs_around(facts: RankFacts, now: float) -> OuterLoop | None:
    """The loop around the innermost one that a rank is in, mostly over epochs."""
    outer = facts.told.outer
    if outer is None:
        return None
    return replace(outer, round_s=outer.round_s + max(0.0, now - facts.told.time))


def is_over_epochs(facts: RankFacts) -> bool:
    """Whether the rounds of the loop around the innermost one are epochs, as far as is known."""
    # Else it is a bar of tqdm around another bar, and may count anything.
    bars = facts.told.bars
    return bool(facts.told.epoch) or any("epoch" in bar.description.lower() for bar in bars[:1])


def steps_in_all(facts: RankFacts, now: float) -> int | None:
    """How many steps a rank will have taken in the end; None where that is not known."""
    around = epochs_around(facts, now)
    loop = facts.told
    if around is None or not loop.total_batches or facts.told.steps is None:
        return None
    # A step may take several batches.
    steps_per_batch = 1.0
    if loop.loop_is_seen and loop.batches:
        steps_per_batch = (facts.told.steps - loop.loop_began_at_step) / loop.batches
    left = round(steps_per_batch * max(0, loop.total_batches - loop.batches))
    if around.done:
        per_epoch = round(around.done_steps / around.done)
        left = max(left, per_epoch - around.round_steps)
    else:
        per_epoch = around.round_steps + left
    return facts.told.steps + left + per_epoch * max(0, around.total - around.done - 1)


def most_left(ranks: Iterable[RankFacts], now: float) -> TimeLeft | None:
    """What the slowest rank has left; None where nothing is known."""
    estimates = [estimate for facts in ranks if (estimate := _rank_left(facts, now)) is not None]
    return max(estimates, key=lambda left: (not left.of_what, left.seconds), default=None)


def _rank_left(facts: RankFacts, now: float) -> TimeLeft | None:
    around = epochs_around(facts, now)
    loop_s = _loop_left_s(facts, now)
    if around is not None and around.total > around.done:
        whole_s = _whole_left_s(facts, around, loop_s, now)
        return None if whole_s is None else TimeLeft(seconds=whole_s, of_what="")
    # What a bar says by itself of the whole training.
    bars = facts.told.bars
    is_whole = facts.told.bar_is_whole or (len(bars) > 1 and not facts.told.epoch)
    if bars and is_whole and bars[0].fraction != 1.0 and bars[0].left_s is not None:
        outer_s = max(0.0, bars[0].left_s - max(0.0, now - facts.told.time))
        return TimeLeft(seconds=outer_s, of_what="")
    if loop_s is None:
        return None
    is_epoch = bool(facts.told.epoch) and not facts.told.loop_name
    return TimeLeft(seconds=loop_s, of_what="epoch" if is_epoch else "loop")


def _whole_left_s(
    facts: RankFacts, around: OuterLoop, loop_s: float | None, now: float
) -> float | None:
    epochs = around.total - around.done - 1
    if around.done and around.done_s > 0:
        per_epoch_s = around.done_s / around.done
        # An epoch that takes longer than those before it is not over for that.
        return max(per_epoch_s - around.round_s, loop_s or 0.0) + per_epoch_s * epochs
    if loop_s is None:
        return None
    first_epoch_s = around.round_s + loop_s
    pace = facts.batch_pace.recent(now)
    inner_bar = next((bar for bar in reversed(facts.told.bars) if bar.left_s == loop_s), None)
    if facts.told.total_batches and pace and around.round_steps <= facts.told.batches:
        # Its first loop: at the pace of now, which a slow start does not count in.
        first_epoch_s = facts.told.total_batches / pace
    elif not facts.told.total_batches and inner_bar is not None:
        first_epoch_s = inner_bar.elapsed_s + loop_s
    return loop_s + first_epoch_s * epochs


def _loop_left_s(facts: RankFacts, now: float) -> float | None:
    if facts.told.total_batches is not None:
        batch_rate = facts.batch_pace.recent(now)
        left_batches = facts.told.total_batches - facts.told.batches
        return left_batches / batch_rate if batch_rate and left_batches > 0 else None
    open_bars = [bar for bar in facts.told.bars if bar.fraction != 1.0]
    return next((bar.left_s for bar in reversed(open_bars) if bar.left_s is not None), None)


ENDED_RUNS: deque[RunBoard] = deque(maxlen=20)  # launches, cells and calls, however they ended
_LEAST_STEPS = 10  # whose time means something


def throughput(board: RunBoard) -> float | None:
    """Samples per second of all ranks over the whole run; None where too little is known."""
    ranks = board.ranks.values()
    if not all(facts.told.samples and (facts.told.steps or 0) >= _LEAST_STEPS for facts in ranks):
        return None
    return sum(facts.samples_pace.overall or 0.0 for facts in ranks) or None


# `[rank1]:[W1125 10:15:30.123456789 socket.cpp:767] `, in all versions of torch since 2.0.
_TORCH_HEAD = r"(?:\[rank\d+\]:)?\[W[^\]]*\] "
_HARMLESS_LINES = (
    # From each rank for every group, in the torch of Colab (2.9): sgl-project/sglang#9652
    # has pages of it. Where the two numbers differ somebody is missing, which is worth knowing.
    r"\[Gloo\] Rank \d+ is connected to (?P<peers>\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : (?P=peers)",
    # A host whose address has no name, as in containers: pytorch/pytorch#159007.
    _TORCH_HEAD + r"\[c10d\] The (?:hostname|remote address) of the client socket cannot be "
    r"retrieved\. err=.*",
    # The process ends, and its groups with it: pytorch/pytorch#126275, "the wall of warning text".
    _TORCH_HEAD + r"Warning: WARNING: (?:destroy_process_group\(\) was not called before program "
    r"exit|process group has NOT been destroyed before we destruct ProcessGroupNCCL).*",
    # A worker uses the device of its local rank, which is what NCCL guesses: pytorch/pytorch#60752.
    _TORCH_HEAD + r"(?:Warning: )?(?:Guessing device ID based on global rank|.*using GPU \d+ (?:to "
    r"perform barrier )?as devices? used by this process (?:is|are) currently unknown).*",
)
_IS_HARMLESS = re.compile("|".join(_HARMLESS_LINES))
_MAX_SEEN_TEXTS = 100
_MAX_SEEN_CHARS = 500
_FIRST_LETTERS = "[/WI"  # of all lines that may be taken
# What installed packages say of themselves, in the forms of `warnings` and their loggers. Seen of
# torch 2.6 to 2.13, transformers 5, DeepSpeed 0.19.
_LINES_OF_PACKAGES = (
    r"\S*/(?:site|dist)-packages/\S+:\d+: \w*Warning: .*",
    _TORCH_HEAD + r"Warning: .*",
    r"[WI]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ torch/\S+\] .*",
    r"\[\d{4}-\d\d-\d\d [\d:,]+\] \[(?:INFO|WARNING)\] \[\w+\.py:\d+:\w+\] .*",
    r"\[transformers\] .*",
)
_OF_PACKAGES = re.compile("|".join(_LINES_OF_PACKAGES))
# As `warnings` writes one, "file:line: Category: text", and as loggers and C++ code imitate it.
_WARNING_LINE = re.compile(r"(?:^|[\s:\[(])(?P<text>[A-Z]\w*Warning: .*)")


@dataclass(slots=True)
class SeenLine:
    """How often a line was seen, and on which ranks."""

    text: str
    count: int = 0
    ranks: set[int] = field(default_factory=set)


class SeenLines:
    """Counts lines by their text, in bounded memory."""

    def __init__(self) -> None:
        self.by_text: dict[str, SeenLine] = {}
        self.num_left_out = 0  # lines that were too many different ones to keep
        self.count = 0

    def note(self, rank: int, line: str) -> None:
        """Count a line."""
        self.count += 1
        text = shorten_text(line, _MAX_SEEN_CHARS)
        if text not in self.by_text and len(self.by_text) >= _MAX_SEEN_TEXTS:
            self.num_left_out += 1
            return
        seen = self.by_text.setdefault(text, SeenLine(text))
        seen.count += 1
        seen.ranks.add(rank)


class SeenWarnings(SeenLines):
    """Warnings in the output of workers: a report tells each once."""

    def take_in(self, rank: int, lines: Sequence[str]) -> None:
        """Count the warnings among lines that a rank has written."""
        for line in lines:
            # First what nearly all lines lack: thousands of lines a second are asked.
            if "Warning: " in line and (found := _WARNING_LINE.search(line)):
                self.note(rank, found["text"].strip())


class LibraryMessages(SeenLines):
    """Lines that libraries print when all is well, which say nothing to who trains a model.

    They are told in full where something has failed. Only lines that are known are taken, each as a
    whole: a line that says something else is shown as ever. Where a panel folds them away, warnings
    and logs of installed packages are taken, too.
    """

    def __init__(self, *, has_panel: bool = False) -> None:
        super().__init__()
        self._has_panel = has_panel
        self._warned: set[tuple[int, str]] = set()
        """Ranks and streams whose last line was a package's warning: its line of code is next."""

    def take_from(self, rank: int, lines: Sequence[str], stream: str = "stderr") -> Sequence[str]:
        """Take out the harmless lines; returns the others."""
        source = (rank, stream)
        # First what nearly all lines lack: thousands of lines a second are asked.
        if source not in self._warned and not any(text[:1] in _FIRST_LETTERS for text in lines):
            return lines
        return [text for text in lines if not self._take(source, text)]

    def _take(self, source: tuple[int, str], text: str) -> bool:
        if source in self._warned:
            self._warned.remove(source)
            if text.startswith("  "):
                return True
        is_of_package = self._has_panel and _OF_PACKAGES.fullmatch(text) is not None
        if not (is_of_package or (text[:1] == "[" and _IS_HARMLESS.fullmatch(text))):
            return False
        if is_of_package and "Warning: " in text:
            self._warned.add(source)
        self.note(source[0], text)
        return True

    def lines(self) -> list[str]:
        """`[0-1] text`, each different one once."""
        return [f"[{number_ranges(seen.ranks)}] {text}" for text, seen in self.by_text.items()]
