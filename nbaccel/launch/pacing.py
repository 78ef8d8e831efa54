"""How much text is shown in a cell, and how fast, so that neither server nor browser drowns in it.

    up to WHOLE_CHARS   all of it, at most _WHOLE.per_s characters a second: a rank that is faster
                        waits in its `print`
    after that          the newest of it once a second, and how many lines were left out: nobody
                        waits any more
    the end is near     (Stop, a failure) the last of what is waiting, at once

Jupyter's server drops whatever exceeds a megabyte a second (`iopub_data_rate_limit`, over three
seconds), updates of displays as well as text; a browser keeps all text of a cell in its memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["LINE_CHARS", "Amount", "Pace"]

WHOLE_CHARS = 10_000_000
AT_THE_END_CHARS = 200_000
"""What is waiting when all workers are through is shown at once, unless it is more."""
LINE_CHARS = 1_000_000
"""Of a longer line head and tail are shown."""


@dataclass(frozen=True, slots=True)
class Amount:
    """So many lines, and so many characters."""

    lines: int
    chars: int

    def is_exceeded_by(self, lines: int, chars: int) -> bool:
        """Whether either is more."""
        return lines > self.lines or chars > self.chars


@dataclass(frozen=True, slots=True)
class _Rate:
    per_s: float
    at_once: float


_WHOLE = _Rate(900_000.0, 90_000.0)
_SLOW = _Rate(100_000.0, 100_000.0)
_PAUSE_S = 1.0
_WAITING = Amount(20_000, 1_200_000)
_NEWEST = Amount(100, 50_000)
_LAST = Amount(200, 200_000)
_MOST = Amount(600_000, 3_600_000)


class _Stage(enum.Enum):
    WHOLE = 0
    SLOW = 1
    ENDING = 2


class Pace:
    """The pace of one cell or launch.

    Args:
        now: The time (CLOCK_MONOTONIC).
    """

    def __init__(self, now: float) -> None:
        self._stage = _Stage.WHOLE
        self._credit = _WHOLE.at_once
        self._since = now
        self._next = now
        self._total = 0

    def end(self) -> None:
        """From now on only the last lines are of interest."""
        self._stage = _Stage.ENDING

    @property
    def is_ending(self) -> bool:
        """Whether only the last lines are of interest."""
        return self._stage is _Stage.ENDING

    @property
    def waits(self) -> bool:
        """Whether a rank that prints too much is made to wait; otherwise its lines are dropped."""
        return self._stage is _Stage.WHOLE

    @property
    def backlog(self) -> Amount:
        """How much of one rank may be waiting."""
        if self.is_ending:
            return _LAST
        return _WAITING if self.waits else _NEWEST

    @property
    def most(self) -> Amount:
        """What is more than this is dropped: a pipe is read to its end when a worker ends."""
        return _MOST if self.waits else Amount(2 * self.backlog.lines, 2 * self.backlog.chars)

    def room(self, now: float, *, has_gaps: bool) -> float:
        """How many characters may be shown now; nothing if it is not positive.

        Args:
            now: The time.
            has_gaps: Whether lines have been dropped since some were shown: that is told with the
                next ones, and not ten times a second.
        """
        if self.is_ending:
            return float("inf")
        if has_gaps and now < self._next:
            return 0.0
        self._next = now + _PAUSE_S
        rate = _WHOLE if self.waits else _SLOW
        self._credit = min(rate.at_once, self._credit + rate.per_s * (now - self._since))
        self._since = now
        return self._credit

    def spend(self, chars: int) -> bool:
        """So many have been shown; returns whether from now on no longer all will be."""
        self._credit -= chars
        self._total += chars
        if self.waits and self._total > WHOLE_CHARS:
            self._stage = _Stage.SLOW
            return True
        return False
