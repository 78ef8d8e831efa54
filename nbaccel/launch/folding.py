"""Lines and displays of all ranks, waiting to be shown: in order, and what all have once.

A line that several ranks have is shown once for them. To recognise it, a line waits a moment for
its twins; lines of one rank never overtake each other. Most lines in a storm have no twin: which
lines have one is known by a count of ranks for each text, so that these cost a look-up.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nbaccel.launch import wire

__all__ = ["Folding", "Item", "Line", "Rich", "stream_of"]

_LOOK_AHEAD = 50
_DISPLAY_CHARS = 4_000  # what a display counts as: a figure is more, a text less


class Line(NamedTuple):
    """A line of text."""

    time: float
    stream: str
    text: str


class Rich(NamedTuple):
    """Rich output, or the wish to clear the cell."""

    time: float
    message: wire.Display | wire.ClearOutput

    @property
    def clears(self) -> bool:
        """Whether it is the wish to clear the cell."""
        return isinstance(self.message, wire.ClearOutput)

    @property
    def handle(self) -> str | None:
        """By what it can be updated later."""
        if isinstance(self.message, wire.ClearOutput):
            return None
        found = (self.message.content.get("transient") or {}).get("display_id")
        return None if found is None else str(found)

    @property
    def updates(self) -> bool:
        """Whether it replaces an output that was shown before."""
        message = self.message
        return isinstance(message, wire.Display) and bool(message.content.get("update"))

    @property
    def stands_alone(self) -> bool:
        """Whether no other output depends on this one: it may be dropped."""
        return not self.clears and self.handle is None

    def is_twin(self, other: Rich) -> bool:
        """Whether showing one of both is enough."""
        if self.handle is not None and other.handle is not None:
            return self.updates == other.updates  # their handles differ by chance alone
        return bool(self.message == other.message)


Item = Line | Rich


def stream_of(item: Item) -> str | None:
    """Where a line belongs; None for rich output."""
    return item.stream if isinstance(item, Line) else None


class Folding:
    """What all ranks have written and nobody has seen yet.

    Args:
        ranks: The ranks.
        folds: Whether what several ranks have is shown once for all of them.
    """

    def __init__(self, ranks: Iterable[int], *, folds: bool) -> None:
        self._folds_any = folds
        self._queues: dict[int, deque[Item]] = {rank: deque() for rank in ranks}
        self._known: dict[int, dict[tuple[str, str], int]] = {rank: {} for rank in self._queues}
        """Rank → how often each line is in its queue."""
        self._holders: dict[tuple[str, str], int] = {}
        """Line → how many ranks have it in their queues."""
        self._chars = dict.fromkeys(self._queues, 0)
        self._lines = dict.fromkeys(self._queues, 0)
        self._open = set(self._queues)

    def __bool__(self) -> bool:
        """Whether anything is waiting."""
        return any(self._queues.values())

    def close(self, rank: int) -> None:
        """Nobody waits any longer for what this rank may still write."""
        self._open.discard(rank)

    def size(self, rank: int) -> tuple[int, int]:
        """How many lines of this rank are waiting, and how many characters."""
        return self._lines[rank], self._chars[rank]

    # ---- in

    def add_lines(self, rank: int, time: float, stream: str, texts: Iterable[str]) -> None:
        """Lines that a rank has written to a stream."""
        queue, known, holders = self._queues[rank], self._known[rank], self._holders
        chars = number = 0
        for number, text in enumerate(texts, 1):  # noqa: B007  (needed behind the loop)
            queue.append(Line(time, stream, text))
            chars += len(text) + 1
            key = (stream, text)
            before = known.get(key, 0)
            known[key] = before + 1
            if not before:
                holders[key] = holders.get(key, 0) + 1
        self._chars[rank] += chars
        self._lines[rank] += number

    def add_rich(self, rank: int, item: Rich) -> None:
        """Something a rank has displayed."""
        self._queues[rank].append(item)
        self._count(rank, item, 1)

    def shorten(self, rank: int, *, lines: int, chars: int) -> int:
        """Drop a rank's oldest lines and displays until so few are left; returns how many.

        The last one stays, however long it is.
        """
        dropped = 0
        kept: list[Item] = []
        queue = self._queues[rank]
        while self._lines[rank] > 1 and (self._lines[rank] > lines or self._chars[rank] > chars):
            item = self._take(rank, 0)
            if isinstance(item, Rich) and not item.stands_alone:
                kept.append(item)
            else:
                dropped += 1
        queue.extendleft(reversed(kept))
        return dropped

    # ---- out

    def ready(self, now: float, *, hold_s: float) -> Iterator[dict[int, Item]]:
        """Take out what is due: each line or display, by the ranks that it is shown for.

        Args:
            now: The time.
            hold_s: How long one waits for its twins.
        """
        while heads := sorted((q[0].time, rank) for rank, q in self._queues.items() if q):
            first = heads[0][1]
            until = heads[1][0] if len(heads) > 1 else now
            queue, moved = self._queues[first], False
            while queue and queue[0].time <= until and self._is_alone(first, queue[0]):
                if self._is_awaited([first], queue[0], now - hold_s):
                    return
                moved = True
                yield {first: self._take(first, 0)}
            if not moved:
                together = self._together(queue[0], num_heads=len(heads), since=now - hold_s)
                if not together:
                    return
                yield {rank: self._take(rank, at) for rank, at in sorted(together.items())}

    def _is_alone(self, rank: int, item: Item) -> bool:
        """Whether no other rank has this line, as far as is known."""
        if not isinstance(item, Line):
            return False
        return not self._folds_any or self._holders[item.stream, item.text] == 1

    def _is_awaited(self, ranks: Iterable[int], item: Item, since: float) -> bool:
        """Whether other ranks may still write the same."""
        return item.time > since and self._folds(item) and bool(self._open.difference(ranks))

    def _together(self, item: Item, *, num_heads: int, since: float) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, or what has to come out before; or none."""
        twins = self._twins(item)
        if self._is_awaited(twins, item, since):
            return {}
        return self._before(twins, item) if len(twins) < num_heads else twins

    def _take(self, rank: int, at: int) -> Item:
        queue = self._queues[rank]
        if at:
            item = queue[at]
            del queue[at]
        else:
            item = queue.popleft()
        self._count(rank, item, -1)
        if isinstance(item, Line):
            self._forget(rank, item)
        return item

    def _count(self, rank: int, item: Item, sign: int) -> None:
        """Displays count as lines do, but for those that cannot be dropped."""
        if isinstance(item, Line):
            chars = len(item.text) + 1
        elif item.stands_alone:
            chars = _DISPLAY_CHARS
        else:
            return
        self._lines[rank] += sign
        self._chars[rank] += sign * chars

    def _forget(self, rank: int, line: Line) -> None:
        key = (line.stream, line.text)
        known = self._known[rank]
        if known[key] > 1:
            known[key] -= 1
            return
        del known[key]
        if self._holders[key] > 1:
            self._holders[key] -= 1
        else:
            del self._holders[key]

    # ---- twins

    def _twins(self, item: Item) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, of ranks where it may come out now."""
        places = {rank: self._reach(rank, item) for rank in self._queues}
        return {rank: at for rank, at in places.items() if at is not None}

    def _reach(self, rank: int, item: Item) -> int | None:
        """Lines of the other stream do not stand in the way: which came first nobody can tell."""
        if isinstance(item, Line) and (item.stream, item.text) not in self._known[rank]:
            return None
        for at, other in enumerate(itertools.islice(self._queues[rank], _LOOK_AHEAD)):
            if self._same(other, item):
                return at
            if stream_of(other) in (None, stream_of(item)) or stream_of(item) is None:
                return None
        return None

    def _before(self, twins: dict[int, int], item: Item) -> dict[int, int]:
        """Whose heads have to come out first, if a missing twin is only held up behind one."""
        for rank, queue in self._queues.items():
            if rank in twins:
                continue
            if isinstance(item, Line) and (item.stream, item.text) not in self._known[rank]:
                continue
            deeper = itertools.islice(queue, 1, _LOOK_AHEAD)
            if any(self._same(other, item) for other in deeper):
                return self._twins(queue[0])
        return twins

    def _folds(self, item: Item) -> bool:
        """Whether it may be shown once for several ranks, and is worth waiting for them."""
        return self._folds_any and not (isinstance(item, Rich) and item.updates)

    def _same(self, item: Item, other: Item) -> bool:
        if item is other:
            return True
        if not self._folds(item):
            return False
        if isinstance(item, Line):
            return isinstance(other, Line) and item[1:] == other[1:]
        return isinstance(other, Rich) and item.is_twin(other)
