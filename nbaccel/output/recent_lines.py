"""The newest lines of each rank, which a panel shows when the cell's own end is out of sight."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from nbaccel.base.units import shorten_text

__all__ = ["RecentLine", "RecentLines"]

_MAX_LINES = 200
_MAX_CHARS = 400


class RecentLine(NamedTuple):
    """A line that has been shown."""

    number: int
    """How many were shown before it."""
    ranks: tuple[int, ...]
    text: str


class RecentLines:
    """Some hundred lines of each rank.

    Attributes:
        num_shown: How many lines have been shown in all.
    """

    def __init__(self) -> None:
        self.num_shown = 0
        self._lines: defaultdict[int, deque[RecentLine]] = defaultdict(
            lambda: deque(maxlen=_MAX_LINES)
        )

    def add(self, ranks: Sequence[int], line_text: str) -> None:
        """A line is shown."""
        line = RecentLine(self.num_shown, tuple(ranks), shorten_text(line_text, _MAX_CHARS))
        self.num_shown += 1
        for worker_rank in ranks:
            self._lines[worker_rank].append(line)

    def by_rank(self) -> dict[int, list[RecentLine]]:
        """The newest lines of each rank that has printed some."""
        return {worker_rank: list(lines) for worker_rank, lines in self._lines.items()}
