"""Lines made of the chunks that are read from a pipe, and those of all ranks put in order.

Each character is copied a bounded number of times, however long its line is.

A line that several ranks have is shown once for them. To recognise it, a line waits a moment for
its twins; lines of one rank never overtake each other. Most lines in a storm have no twin: which
lines have one is known by a count of ranks for each text, so that these cost a look-up.
"""

from __future__ import annotations

import codecs
import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nbaccel.base.units import mark_left_out
from nbaccel.workers import messaging

_REWRITTEN_CHARS = 1_000
_MARKS = re.compile(r"(\n|\r|\x1b\[2K)")  # ECMA-48: erase in line


class _Row:
    """A line that has no end yet. Of a long one the middle is left out."""

    __slots__ = ("_head", "_max_chars", "_num_chars", "_num_dropped", "_pieces", "_under", "moves")

    def __init__(self, max_chars: int | None) -> None:
        self._max_chars = max_chars
        self.moves = False
        """Whether it has been written from its start again."""
        self._under = ""  # what stands there when its last carriage return comes
        self._empty()

    def _empty(self) -> None:
        self._head = ""
        self._pieces: list[str] = []
        self._num_chars = 0  # in the pieces
        self._num_dropped = 0

    def add(self, text: str) -> None:
        """Write at the end."""
        if not text:
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._max_chars is None or self._num_chars <= self._max_chars:
            return
        # Half of the limit is cut away each time, so that the copies stay linear.
        half_chars = self._max_chars // 2
        rest_text = "".join(self._pieces)
        if not self._head:
            self._head = rest_text[:half_chars]
            rest_text = rest_text[half_chars:]
        tail_text = rest_text[-half_chars:]
        self._num_dropped += len(rest_text) - len(tail_text)
        self._pieces = [tail_text]
        self._num_chars = len(tail_text)

    def restart(self) -> None:
        """Go back to the start: what comes covers what is there, as far as it goes."""
        self.moves = True
        if self._num_chars:
            self._under = self._covered()
            self._empty()

    def clear(self) -> None:
        """Erase it."""
        self._under = ""
        self._empty()

    def text(self) -> str:
        """The line. Blanks with which a bar has erased a longer one are not part of it."""
        return self._covered().rstrip() if self.moves else self._covered()

    def _covered(self) -> str:
        text = "".join(self._pieces)
        if self._max_chars is not None and self._head:
            cut_chars = max(0, len(text) - self._max_chars // 2)
            text = mark_left_out(self._head, self._num_dropped + cut_chars, text[cut_chars:])
        return text + self._under[len(text) :]


class LineAssembler:
    """Makes lines of what one stream of one process writes."""

    def __init__(self, max_chars: int | None = None) -> None:
        # Incremental, because a chunk may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_chars = max_chars
        self._row = _Row(max_chars)

    @property
    def rewritten(self) -> str:
        """The unfinished line, if it has been written from its start again."""
        return self._row.text()[:_REWRITTEN_CHARS] if self._row.moves else ""

    def feed(self, output_bytes: bytes, *, at_most: float = math.inf) -> tuple[list[str], int]:
        """Take in a chunk; returns the last lines that it makes, and how many more it had."""
        text = self._decoder.decode(output_bytes)
        num_dropped = int(max(0, text.count("\n") - at_most))
        if num_dropped:
            # The line that was unfinished is among those left out.
            self._row = _Row(self._max_chars)
            text = text.split("\n", num_dropped)[-1]
        lines: list[str] = []
        if not self._row.moves and "\r" not in text and "\x1b" not in text:
            # Nearly all that is printed, and of that there may be thousands of lines a second.
            first, *others = text.split("\n")
            self._row.add(first)
            if others:
                lines = [self._row.text(), *others[:-1]]
                self._row = _Row(self._max_chars)
                self._row.add(others[-1])
            return lines, num_dropped
        # Marks are every second part.
        for number, part in enumerate(_MARKS.split(text)):
            if number % 2 == 0:
                self._row.add(part)
            elif part == "\n":
                lines.append(self._row.text())
                self._row = _Row(self._max_chars)
            elif part == "\r":
                self._row.restart()
            else:
                self._row.clear()
        return lines, num_dropped

    def finish(self) -> list[str]:
        """The line that has no end yet, if there is one; it is removed."""
        self._row.add(self._decoder.decode(b"", final=True))
        text = self._row.text()
        self._row = _Row(self._max_chars)
        return [text] if text else []


_LOOK_AHEAD = 50  # items of a queue in which a twin is looked for: it bounds the cost per line
_DISPLAY_CHARS = 4_000  # the size that a display counts as: a figure is larger, a text smaller


class PrintedLine(NamedTuple):
    """A line of text."""

    time: float
    stream: str
    text: str


class RichOutput(NamedTuple):
    """Rich output, or a request to clear the cell."""

    time: float
    message: messaging.Display | messaging.ClearOutput

    @property
    def clears(self) -> bool:
        """Whether it is a request to clear the cell."""
        return isinstance(self.message, messaging.ClearOutput)

    @property
    def handle(self) -> str | None:
        """By what it can be updated later."""
        if isinstance(self.message, messaging.ClearOutput):
            return None
        display_id = (self.message.content.get("transient") or {}).get("display_id")
        return None if display_id is None else str(display_id)

    @property
    def updates(self) -> bool:
        """Whether it replaces an output that was shown before."""
        message = self.message
        return isinstance(message, messaging.Display) and bool(message.content.get("update"))

    @property
    def stands_alone(self) -> bool:
        """Whether no other output depends on this one: it may be dropped."""
        return not self.clears and self.handle is None

    def is_twin(self, other_item: RichOutput) -> bool:
        """Whether showing one of both is enough."""
        if self.handle is not None and other_item.handle is not None:
            # IPython draws handles at random, so those of two ranks always differ.
            return self.updates == other_item.updates
        return bool(self.message == other_item.message)


OutputItem = PrintedLine | RichOutput


def stream_of(item: OutputItem) -> str | None:
    """Where a line belongs; None for rich output."""
    return item.stream if isinstance(item, PrintedLine) else None


class LineMerger:
    """What all ranks have written and the notebook has not shown yet."""

    def __init__(self, worker_ranks: Iterable[int], *, folds_ranks: bool) -> None:
        self._folds_any = folds_ranks
        self._queues: dict[int, deque[OutputItem]] = {
            worker_rank: deque() for worker_rank in worker_ranks
        }
        self._holders: dict[tuple[str, str], dict[int, int]] = {}
        """Stream and text of a line → rank → how often it is in its queue."""
        self._chars = dict.fromkeys(self._queues, 0)
        self._lines = dict.fromkeys(self._queues, 0)
        self._open = set(self._queues)

    def __bool__(self) -> bool:
        """Whether anything is waiting."""
        return any(self._queues.values())

    def close(self, worker_rank: int) -> None:
        """Stop waiting for what this rank may still write."""
        self._open.discard(worker_rank)

    def size(self, worker_rank: int) -> tuple[int, int]:
        """How many lines of this rank are waiting, and how many characters."""
        return self._lines[worker_rank], self._chars[worker_rank]

    # ---- in

    def add_lines(
        self, worker_rank: int, arrival_time: float, stream_name: str, line_texts: Iterable[str]
    ) -> None:
        """Lines that a rank has written to a stream."""
        # Local names, because the loop below runs for each of many thousands of lines.
        rank_queue = self._queues[worker_rank]
        holders = self._holders
        num_chars = line_number = 0
        for line_number, line_text in enumerate(line_texts, 1):  # noqa: B007  (needed behind the loop)
            rank_queue.append(PrintedLine(arrival_time, stream_name, line_text))
            num_chars += len(line_text) + 1
            ranks = holders.setdefault((stream_name, line_text), {})
            ranks[worker_rank] = ranks.get(worker_rank, 0) + 1
        self._chars[worker_rank] += num_chars
        self._lines[worker_rank] += line_number

    def add_rich(self, worker_rank: int, item: RichOutput) -> None:
        """Something a rank has displayed."""
        self._queues[worker_rank].append(item)
        self._count(worker_rank, item, 1)

    def shorten(self, worker_rank: int, *, output_lines: float, num_chars: float) -> int:
        """Drop a rank's oldest lines and displays until so few are left; returns how many.

        The last one stays, however long it is.
        """
        dropped_lines = 0
        kept_items: list[OutputItem] = []
        rank_queue = self._queues[worker_rank]
        while self._lines[worker_rank] > 1 and (
            self._lines[worker_rank] > output_lines or self._chars[worker_rank] > num_chars
        ):
            queued_item = self._take(worker_rank, 0)
            if isinstance(queued_item, RichOutput) and not queued_item.stands_alone:
                kept_items.append(queued_item)
            else:
                dropped_lines += 1
        # Others depend on them: an update needs its output, so these may not be dropped.
        rank_queue.extendleft(reversed(kept_items))
        return dropped_lines

    # ---- out

    def ready(self, current_time: float, *, hold_s: float) -> Iterator[dict[int, OutputItem]]:
        """Take out what is due: each line or display, by the ranks that it is shown for."""
        while heads := sorted(
            (rank_queue[0].time, worker_rank)
            for worker_rank, rank_queue in self._queues.items()
            if rank_queue
        ):
            first_rank = heads[0][1]
            # Lines older than the next rank's first may be shown one after the other.
            wait_until = heads[1][0] if len(heads) > 1 else current_time
            rank_queue = self._queues[first_rank]
            has_moved = False
            while (
                rank_queue
                and rank_queue[0].time <= wait_until
                and self._is_alone(first_rank, rank_queue[0])
            ):
                # Lines of a rank never overtake each other, so nothing behind it may come out.
                if self._is_awaited([first_rank], rank_queue[0], current_time - hold_s):
                    return
                has_moved = True
                yield {first_rank: self._take(first_rank, 0)}
            if not has_moved:
                arrive_together = self._together(
                    rank_queue[0], num_heads=len(heads), waiting_since=current_time - hold_s
                )
                if not arrive_together:
                    return
                yield {
                    worker_rank: self._take(worker_rank, position)
                    for worker_rank, position in sorted(arrive_together.items())
                }

    def _is_alone(self, rank: int, item: OutputItem) -> bool:
        """Whether no other rank has this line, as far as is known."""
        if not isinstance(item, PrintedLine):
            return False
        return not self._folds_any or len(self._holders[item.stream, item.text]) == 1

    def _is_awaited(self, ranks: Iterable[int], item: OutputItem, waiting_since: float) -> bool:
        """Whether other ranks may still write the same."""
        return (
            item.time > waiting_since and self._folds(item) and bool(self._open.difference(ranks))
        )

    def _together(
        self, queued_item: OutputItem, *, num_heads: int, waiting_since: float
    ) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, or what has to come out before; or none."""
        twin_items = self._twins(queued_item)
        if self._is_awaited(twin_items, queued_item, waiting_since):
            return {}
        return self._before(twin_items, queued_item) if len(twin_items) < num_heads else twin_items

    def _take(self, rank: int, position: int) -> OutputItem:
        rank_queue = self._queues[rank]
        if position:
            item = rank_queue[position]
            del rank_queue[position]
        else:
            item = rank_queue.popleft()
        self._count(rank, item, -1)
        if isinstance(item, PrintedLine):
            self._forget(rank, item)
        return item

    def _count(self, rank: int, item: OutputItem, sign: int) -> None:
        """Displays count as lines do, except for those that cannot be dropped."""
        if isinstance(item, PrintedLine):
            num_chars = len(item.text) + 1
        elif item.stands_alone:
            num_chars = _DISPLAY_CHARS
        else:
            return
        self._lines[rank] += sign
        self._chars[rank] += sign * num_chars

    def _forget(self, rank: int, line: PrintedLine) -> None:
        ranks = self._holders[line[1:]]
        # A count, because a rank may have the same line in its queue several times.
        ranks[rank] -= 1
        if not ranks[rank]:
            del ranks[rank]
        if not ranks:
            del self._holders[line[1:]]

    # ---- twins

    def _twins(self, item: OutputItem) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, of ranks where it may come out now."""
        places = {rank: self._reach(rank, item) for rank in self._queues}
        return {rank: position for rank, position in places.items() if position is not None}

    def _reach(self, rank: int, queued_item: OutputItem) -> int | None:
        """Lines of the other stream do not block it: the order between two pipes is not known."""
        if not self._may_have(rank, queued_item):
            return None
        for position, other_item in enumerate(itertools.islice(self._queues[rank], _LOOK_AHEAD)):
            if self._same(other_item, queued_item):
                return position
            if (
                stream_of(other_item) in (None, stream_of(queued_item))
                or stream_of(queued_item) is None
            ):
                return None
        return None

    def _may_have(self, rank: int, item: OutputItem) -> bool:
        """Whether a twin may be in a rank's queue."""
        return not isinstance(item, PrintedLine) or rank in self._holders.get(item[1:], ())

    def _before(self, twin_items: dict[int, int], queued_item: OutputItem) -> dict[int, int]:
        """Whose heads have to come out first, if a missing twin is only held up behind one."""
        for rank, rank_queue in self._queues.items():
            if rank in twin_items or not self._may_have(rank, queued_item):
                continue
            deeper_items = itertools.islice(rank_queue, 1, _LOOK_AHEAD)
            if any(self._same(other_item, queued_item) for other_item in deeper_items):
                return self._twins(rank_queue[0])
        return twin_items

    def _folds(self, item: OutputItem) -> bool:
        """Whether it may be shown once for several ranks, and is worth waiting for them."""
        return self._folds_any and not (isinstance(item, RichOutput) and item.updates)

    def _same(self, queued_item: OutputItem, other_item: OutputItem) -> bool:
        if queued_item is other_item:
            return True
        if not self._folds(queued_item):
            return False
        if isinstance(queued_item, PrintedLine):
            return isinstance(other_item, PrintedLine) and queued_item[1:] == other_item[1:]
        return isinstance(other_item, RichOutput) and queued_item.is_twin(other_item)
