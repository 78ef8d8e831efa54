"""The facts that a dashboard shows, by rank. Nothing is drawn and nobody is asked here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it brings torch, which a board can do without
    from nbaccel.launch.wire import Metrics

__all__ = ["Board", "History", "Pace", "RankFacts", "RankStatus", "loss_name"]

_POINTS = 240
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
    """What it holds on its device; None where there is none, or nobody can tell."""
    doing: str = ""
    """`waiting in all_reduce (Cell In[3], line 5)`"""
    last_line: str = ""
    """What it printed last."""


class History:
    """Values of a whole run in bounded memory: thinned out evenly when they become too many.

    Args:
        most: How many values are kept.
    """

    def __init__(self, most: int = _POINTS) -> None:
        self._most = most
        self._kept: list[float] = []
        self._stride = 1
        self._offered = 0
        self._last: float | None = None

    def add(self, value: float) -> None:
        """Take in the next value."""
        self._last = value
        if self._offered % self._stride == 0:
            self._kept.append(value)
        self._offered += 1
        if len(self._kept) > self._most:
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


class Pace:
    """How fast steps are taken, by the clock of who takes them.

    Args:
        window_s: Seconds that "now" reaches back.
    """

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[tuple[float, int]] = deque()
        self._first: tuple[float, int] | None = None

    def add(self, time: float, steps: int) -> None:
        """So many steps had been taken at this time."""
        if self._points and steps < self._points[-1][1]:  # it counts from the start again
            self._points.clear()
            self._first = None
        self._first = self._first or (time, steps)
        self._points.append((time, steps))
        while len(self._points) > 2 and self._points[1][0] < time - self._window_s:
            self._points.popleft()

    @property
    def overall(self) -> float | None:
        """Steps per second since the first one; None while that cannot be told."""
        return _rate(self._first, self._points[-1]) if self._first is not None else None

    def recent(self, now: float) -> float | None:
        """Steps per second in the window before now; 0 if none has come for long."""
        if len(self._points) < 2:
            return None
        gap = self._points[-1][0] - self._points[-2][0]
        if now - self._points[-1][0] > max(self._window_s, 3 * gap):
            return 0.0
        return _rate(self._points[0], self._points[-1])


def _rate(start: tuple[float, int], end: tuple[float, int]) -> float | None:
    seconds = end[0] - start[0]
    return (end[1] - start[1]) / seconds if seconds > 0 else None


@dataclass(kw_only=True, slots=True)
class RankFacts:
    """What is known of one rank."""

    rank: int
    state: str = ""
    since: float = 0.0
    """When it came into that state."""
    steps: int | None = None
    pace: Pace = field(default_factory=Pace)
    metrics: dict[str, float] = field(default_factory=dict)
    loss: History = field(default_factory=History)
    loss_name: str = ""
    """Which metric `loss` is."""
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    device_bytes: int | None = None
    peak_device_bytes: int | None = None
    is_weighed: bool = False
    """Whether somebody else has told of its device, who knows more than its own allocator."""
    last_line: str = ""
    doing: str = ""


class Board:
    """The facts of a run.

    Args:
        ranks: The ranks that take part.
        began: When it began (CLOCK_MONOTONIC, as all times here).
    """

    def __init__(self, ranks: Iterable[int], *, began: float) -> None:
        self.ranks: dict[int, RankFacts] = {
            rank: RankFacts(rank=rank, since=began) for rank in sorted(ranks)
        }
        self.began = began
        self.now = began
        """The time of the latest look."""
        self.ending = ""
        """How it ended, if not well: `failed`, `stopped`, `timed out`."""

    @property
    def seconds(self) -> float:
        """How long it has taken, up to the latest look."""
        return self.now - self.began

    def see(self, rows: Sequence[RankStatus]) -> None:
        """Take in what a look at the workers has found."""
        for row in rows:
            facts = self.ranks.setdefault(row.rank, RankFacts(rank=row.rank))
            if not facts.state:
                facts.since = self.now - row.seconds
            elif facts.state != row.state:
                facts.since = self.now
            facts.state = row.state
            facts.doing = row.doing
            facts.last_line = row.last_line or facts.last_line
            if row.rss_bytes:  # of one that has gone, the last one that was seen
                facts.rss_bytes = row.rss_bytes
                facts.peak_rss_bytes = max(facts.peak_rss_bytes, row.rss_bytes)
            facts.is_weighed = row.device_bytes is not None
            _weigh_device(facts, row.device_bytes)

    def hear(self, rank: int, message: Metrics) -> None:
        """Take in what a rank has told of its training."""
        facts = self.ranks.get(rank)
        if facts is None:
            return
        facts.steps = message.steps
        facts.pace.add(message.time, message.steps)
        facts.metrics = dict(message.values)
        if not facts.is_weighed:
            _weigh_device(facts, message.device_bytes)
        name = loss_name(facts.metrics)
        if name is None:
            return
        if name != facts.loss_name:
            facts.loss_name, facts.loss = name, History()
        facts.loss.add(facts.metrics[name])


def loss_name(metrics: Mapping[str, float]) -> str | None:
    """The metric to draw: `loss`, or what has that in its name, or the first one there is."""
    by_fit = sorted(metrics, key=_how_far_from_loss)
    return by_fit[0] if by_fit else None


def mean(values: Iterable[float]) -> float | None:
    """The mean, in which one that is no number shows; None without values."""
    found = list(values)
    return (
        math.fsum(found) / len(found) if all(map(math.isfinite, found)) and found else _odd(found)
    )


def _odd(values: Sequence[float]) -> float | None:
    return next((v for v in values if not math.isfinite(v)), None)


def _how_far_from_loss(name: str) -> int:
    plain = name.lower()
    return 0 if plain == "loss" else 1 if "loss" in plain else 2


def _weigh_device(facts: RankFacts, device_bytes: int | None) -> None:
    if device_bytes is not None:
        facts.device_bytes = device_bytes
        facts.peak_device_bytes = max(facts.peak_device_bytes or 0, device_bytes)
