"""Lines made of the chunks that are read from a pipe, and those of all ranks put in order.

Each character is copied a bounded number of times, however long its line is.

A line that several ranks have is shown once for them. To recognise it, a line waits a moment for
its twins; lines of one rank never overtake each other. Most lines in a storm have no twin: each
rank's lines are counted by their text, so that to know this is a look-up.
"""

from __future__ import annotations

import codecs
import itertools
import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nbaccel.base.units import mark_left_out
from nbaccel.workers import messaging

_REWRITTEN_CHARS = 1_000
_MARKS = re.compile(r"(\r|\x1b\[2K)")  # ECMA-48: erase in line


class LineAssembler:
    """Makes lines of what one stream of one process writes; long ones lose their middle."""

    def __init__(self, max_chars: float = math.inf) -> None:
        # Incremental, because a chunk may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_chars = max_chars
        self._begin_line()

    def _begin_line(self) -> None:
        self._moves = False
        """Whether the line has been written from its start again."""
        self._under = ""  # what stands there when its last carriage return comes
        self._empty_line()

    def _empty_line(self) -> None:
        self._head = ""
        self._pieces: list[str] = []
        self._num_chars = 0  # in the pieces
        self._num_dropped = 0

    @property
    def rewritten(self) -> str:
        """The unfinished line, if it has been written from its start again."""
        return self._line()[:_REWRITTEN_CHARS] if self._moves else ""

    def feed(self, output_bytes: bytes, *, at_most: float = math.inf) -> tuple[list[str], int]:
        """Take in a chunk; returns the last lines that it makes, and how many more it had."""
        text = self._decoder.decode(output_bytes)
        num_dropped = int(max(0, text.count("\n") - at_most))
        if num_dropped:
            # The line that was unfinished is among those left out.
            self._begin_line()
            text = text.split("\n", num_dropped)[-1]
        first, *others = text.split("\n")
        self._write(first)
        lines = []
        for other in others:
            lines.append(self._line())
            self._begin_line()
            self._write(other)
        return lines, num_dropped

    def finish(self) -> list[str]:
        """The line that has no end yet, if there is one; it is removed."""
        self._add(self._decoder.decode(b"", final=True))
        text = self._line()
        self._begin_line()
        return [text] if text else []

    def _write(self, text: str) -> None:
        """Go on with the line, and do what marks in it say."""
        for part in _MARKS.split(text):
            if part == "\r":
                # What comes covers what is there, as far as it goes.
                self._moves = True
                if self._num_chars:
                    self._under = self._covered()
                    self._empty_line()
            elif part == "\x1b[2K":
                self._under = ""
                self._empty_line()
            elif part:
                self._add(part)

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._num_chars <= self._max_chars:
            return
        # Half of the limit is cut away each time, so that the copies stay linear.
        half_chars = int(self._max_chars) // 2
        rest_text = "".join(self._pieces)
        if not self._head:
            self._head = rest_text[:half_chars]
            rest_text = rest_text[half_chars:]
        tail_text = rest_text[-half_chars:]
        self._num_dropped += len(rest_text) - len(tail_text)
        self._pieces = [tail_text]
        self._num_chars = len(tail_text)

    def _line(self) -> str:
        """Blanks with which a bar has erased a longer one are not part of it."""
        return self._covered().rstrip() if self._moves else self._covered()

    def _covered(self) -> str:
        text = "".join(self._pieces)
        if self._head:
            cut_chars = max(0, len(text) - int(self._max_chars) // 2)
            text = mark_left_out(self._head, self._num_dropped + cut_chars, text[cut_chars:])
        return text + self._under[len(text) :]


_LOOK_AHEAD = 50  # items of a queue in which a twin is looked for: it bounds the cost per line
_CLEARING = "clearing the cell"
_DISPLAY_CHARS = 4_000  # the size that a display counts as: a figure is larger, a text smaller


class PrintedLine(NamedTuple):
    """A line of text."""

    time: float
    stream: str
    text: str

    def is_twin(self, other_item: OutputItem) -> bool:
        """Whether showing one of both is enough."""
        return isinstance(other_item, PrintedLine) and self[1:] == other_item[1:]


@dataclass(frozen=True)
class RichOutput:
    """Rich output, or a request to clear the cell."""

    time: float
    message: messaging.Display | messaging.ClearOutput
    stream: ClassVar[None] = None
    text: ClassVar[str] = ""

    @property
    def clears(self) -> bool:
        """Whether it is a request to clear the cell."""
        return isinstance(self.message, messaging.ClearOutput)

    @property
    def handle(self) -> str | None:
        """By what it can be updated later: others depend on it, and it may not be dropped."""
        if isinstance(self.message, messaging.ClearOutput):
            return _CLEARING
        display_id = (self.message.content.get("transient") or {}).get("display_id")
        return None if display_id is None else str(display_id)

    @property
    def updates(self) -> bool:
        """Whether it replaces an output that was shown before."""
        message = self.message
        return isinstance(message, messaging.Display) and bool(message.content.get("update"))

    def is_twin(self, other_item: OutputItem) -> bool:
        """Whether showing one of both is enough."""
        if not isinstance(other_item, RichOutput):
            return False
        if self.handle is None or other_item.handle is None:
            return bool(self.message == other_item.message)
        # IPython draws handles at random, so those of two ranks always differ.
        return (self.clears, self.updates) == (other_item.clears, other_item.updates)


OutputItem = PrintedLine | RichOutput


class LineMerger:
    """What all ranks have written and the notebook has not shown yet."""

    def __init__(self, worker_ranks: Iterable[int], *, folds_ranks: bool) -> None:
        self._folds_any = folds_ranks
        self._queues = {rank: deque[OutputItem]() for rank in worker_ranks}
        self._texts = {rank: defaultdict[tuple[str, str], int](int) for rank in self._queues}
        """Rank → stream and text of a line → how often it is in the queue."""
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
        texts = self._texts[worker_rank]
        num_chars = line_number = 0
        for line_number, line_text in enumerate(line_texts, 1):  # noqa: B007  (needed behind the loop)
            rank_queue.append(PrintedLine(arrival_time, stream_name, line_text))
            num_chars += len(line_text) + 1
            texts[stream_name, line_text] += 1
        self._chars[worker_rank] += num_chars
        self._lines[worker_rank] += line_number

    def add_rich(self, worker_rank: int, item: RichOutput) -> None:
        """Something a rank has displayed."""
        self._queues[worker_rank].append(item)
        self._count(worker_rank, item, 1)

    def shorten(self, worker_rank: int, output_lines: float, num_chars: float) -> int:
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
            if isinstance(queued_item, RichOutput) and queued_item.handle is not None:
                kept_items.append(queued_item)
            else:
                dropped_lines += 1
        # Others depend on them: an update needs its output, so these may not be dropped.
        rank_queue.extendleft(reversed(kept_items))
        return dropped_lines

    # ---- out

    def ready(self, current_time: float, *, hold_s: float) -> Iterator[dict[int, OutputItem]]:
        """Take out what is due: each line or display, by the ranks that it is shown for."""
        while heads := [(queue[0].time, rank) for rank, queue in self._queues.items() if queue]:
            first_rank = min(heads)[1]
            item = self._queues[first_rank][0]
            others = self._others(first_rank)
            twin_items = self._twins(first_rank, others)
            # Lines of a rank never overtake each other, so nothing behind it may come out.
            if (
                item.time > current_time - hold_s
                and self._folds(item)
                and self._open.difference(twin_items)
            ):
                return
            taken = self._before(twin_items, item, others)
            yield {rank: self._take(rank, position) for rank, position in sorted(taken.items())}

    def _take(self, rank: int, position: int) -> OutputItem:
        rank_queue = self._queues[rank]
        item = rank_queue[position]
        del rank_queue[position]
        self._count(rank, item, -1)
        if isinstance(item, PrintedLine):
            texts = self._texts[rank]
            texts[item[1:]] -= 1
            if not texts[item[1:]]:
                del texts[item[1:]]
        return item

    def _count(self, rank: int, item: OutputItem, sign: int) -> None:
        """Displays count as lines do, except for those that cannot be dropped."""
        if isinstance(item, PrintedLine):
            num_chars = len(item.text) + 1
        elif item.handle is None:
            num_chars = _DISPLAY_CHARS
        else:
            return
        self._lines[rank] += sign
        self._chars[rank] += sign * num_chars

    # ---- twins

    def _folds(self, item: OutputItem) -> bool:
        """Whether it may be shown once for several ranks, and is worth waiting for them."""
        return self._folds_any and not (isinstance(item, RichOutput) and item.updates)

    def _others(self, first_rank: int) -> list[int]:
        """Ranks in whose queues the head of the first one's may have a twin."""
        item = self._queues[first_rank][0]
        if not self._folds(item):
            return []
        key = item[1:] if isinstance(item, PrintedLine) else None
        return [
            rank
            for rank, texts in self._texts.items()
            if rank != first_rank and (key is None or key in texts)
        ]

    def _twins(self, first_rank: int, others: Iterable[int]) -> dict[int, int]:
        """Rank → where in its queue the head of the first one's has a twin that may come out."""
        item = self._queues[first_rank][0]
        places = {first_rank: 0} | {rank: self._reach(rank, item) for rank in others}
        return {rank: position for rank, position in places.items() if position is not None}

    def _reach(self, rank: int, queued_item: OutputItem) -> int | None:
        """Lines of the other stream do not block it: the order between two pipes is not known."""
        for position, other_item in enumerate(itertools.islice(self._queues[rank], _LOOK_AHEAD)):
            if queued_item.is_twin(other_item):
                return position
            if other_item.stream in (None, queued_item.stream) or queued_item.stream is None:
                return None
        return None

    def _before(
        self, twin_items: dict[int, int], queued_item: OutputItem, others: Iterable[int]
    ) -> dict[int, int]:
        """Whose heads have to come out first, if a missing twin is only held up behind one."""
        for rank in others:
            deeper_items = itertools.islice(self._queues[rank], 1, _LOOK_AHEAD)
            if rank not in twin_items and any(map(queued_item.is_twin, deeper_items)):
                return self._twins(rank, self._others(rank))
        return twin_items
