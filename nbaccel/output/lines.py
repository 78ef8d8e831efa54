"""Lines made of the chunks that are read from a pipe, and those of all ranks put in order.

Each character is copied a bounded number of times, however long its line is.

A line that several ranks have is shown once for them. To recognise it, a line waits a moment for
its twins; lines of one rank never overtake each other. Most lines in a storm have no twin: which
lines have one is known by a count of ranks for each text, so that these cost a look-up.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nbaccel.base.units import mark_left_out
from nbaccel.workers import messaging

__all__ = ["LineAssembler", "LineMerger", "OutputItem", "PrintedLine", "RichOutput", "stream_of"]


_BAR_CHARS = 1_000
_MOST_BARS = 2  # as many as of tqdm
_LINE_UP = "\x1b[A"  # ECMA-48: cursor up
_ERASE_LINE = "\x1b[2K"  # ECMA-48: erase in line, all of it; rich draws its bars anew with it
_CURSOR_HIDDEN = "\x1b[?25l"
_CURSOR_SHOWN = "\x1b[?25h"  # DEC private modes
_ONE_LINE_UP = "\x1b[1A"
_FRAME_MARK = re.compile(r"(\n|\x1b\[1A|\x1b\[\?25[hl])")
_FRAME_BEGIN = re.compile(r"\x1b\[(?:1A|\?25[hl])")
_UNFINISHED_SEQUENCE = re.compile(r"\x1b(?:\[[?\d;]*)?\Z")
_MOST_HELD_LINES = 100
_WAY_DOWN = re.compile(r"(?<=\n)\n+(?=\r)")


class LineAssembler:
    """Makes lines of what one stream of one process writes."""

    def __init__(self, max_chars: int | None = None, *, parts_bars: bool = False) -> None:
        # Incremental, because a chunk may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._max_chars = max_chars
        self._parts_bars = parts_bars
        self._frames = _LiveFrames()
        self._held_back = ""  # the start of a terminal sequence whose end has not come
        self._begin()
        self.bar = ""
        """The unfinished line, if it has been rewritten with carriage returns."""

    @property
    def bars(self) -> tuple[str, ...]:
        """The unfinished line if it is rewritten; of several that are drawn anew the first two."""
        upper_lines = self._frames.upper_lines
        lines = [*upper_lines, self._bar()] if upper_lines else [self.bar]
        return tuple(filter(None, lines[:_MOST_BARS]))

    def _begin(self) -> None:
        self._under = ""  # what stands on the line when its last carriage return comes
        self._is_rewritten = False
        self._last = _PendingText(self._max_chars)  # what came after that

    def feed(self, output_bytes: bytes, *, at_most: int | None = None) -> tuple[list[str], int]:
        """Take in a chunk."""
        line_text = self._decode(output_bytes)
        if self._parts_bars and (self._frames.is_open or _FRAME_BEGIN.search(line_text)):
            return self._feed_frames(line_text, at_most)
        dropped_lines = 0 if at_most is None else max(0, line_text.count("\n") - at_most)
        if at_most is not None and dropped_lines:
            # The line that was unfinished is among those left out.
            self._begin()
            first_text, *more_texts = line_text.rsplit("\n", at_most + 1)[1:]
        else:
            first_text, *more_texts = line_text.split("\n")
        self._add(first_text)
        output_lines = []
        if more_texts:
            are_rewritten = [self._is_rewritten, *("\r" in text for text in more_texts[:-1])]
            output_lines = [self._take(), *map(_rewrite_line, more_texts[:-1])]
            if self._parts_bars and any(are_rewritten):
                output_lines = [
                    output_line
                    for output_line, is_rewritten in zip(output_lines, are_rewritten, strict=True)
                    if output_line or not is_rewritten
                ]
            self._add(more_texts[-1])
        self.bar = self._bar() if self._is_rewritten else ""
        return output_lines, dropped_lines

    def _feed_frames(self, text: str, at_most: int | None) -> tuple[list[str], int]:
        """Take in text of a program that draws several lines anew again and again."""
        output_lines: list[str] = []
        for part in filter(None, _FRAME_MARK.split(text)):
            if part in (_CURSOR_HIDDEN, _CURSOR_SHOWN):
                self._frames.is_open = part == _CURSOR_HIDDEN
            elif part == _ONE_LINE_UP:
                self._frames.take_back()
                self._begin()
                self._is_rewritten = True
            elif part == "\n":
                was_erased = self._is_rewritten and not (self._last or self._under)
                finished_line = self._take()
                if not was_erased:
                    self._frames.held.append(finished_line)
            else:
                output_lines += self._frames.lines_above(part)
                self._add(part)
        output_lines += self._frames.lines_to_show()
        self.bar = self._bar() if self._is_rewritten else ""
        num_dropped = 0 if at_most is None else max(0, len(output_lines) - at_most)
        return output_lines[num_dropped:], num_dropped

    def _decode(self, output_bytes: bytes) -> str:
        text = self._decoder.decode(output_bytes)
        if not self._parts_bars:
            return text
        text = self._held_back + text
        self._held_back = ""
        if "\x1b" in text:
            if unfinished := _UNFINISHED_SEQUENCE.search(text):
                text = text[: unfinished.start()]
                self._held_back = unfinished[0]
            # tqdm goes down a line, draws an inner bar there, and comes up again: the inner bar is
            # a line, and where it comes up to a bar stands already.
            text = text.replace(_LINE_UP, "\n\r")
        is_line_start = not (self._last or self._under or self._is_rewritten)
        if "\n\n" in text or (is_line_start and text[:1] == "\n"):
            text = self._without_way_down(text, is_line_start=is_line_start)
        return text

    def _without_way_down(self, text: str, *, is_line_start: bool) -> str:
        """The text without empty lines that a bar follows: the way down to an inner bar.

        An empty line at the end is held back until it is known what follows; the last one of all
        is not shown.
        """
        above = "\n" if is_line_start else ""
        text = _WAY_DOWN.sub("", above + text)
        if text.endswith("\n\n"):
            text = text[:-1]
            self._held_back = "\n" + self._held_back
        return text.removeprefix(above)

    def held_lines(self) -> list[str]:
        """Finished lines that were held back because they might be drawn anew; they are removed."""
        return self._frames.close()

    def finish(self) -> str | None:
        """The line that has no end yet, if there is one; it is removed."""
        text = self._held_back.strip("\n") + self._decoder.decode(b"", final=True)
        self._held_back = ""
        if not (text or self._last or self._under or self._is_rewritten):
            self.bar = ""
            return None
        self._add(text)
        is_empty = not self._last and not self._under
        drops_blank = self._parts_bars and self._is_rewritten
        line = self._take()
        self.bar = ""
        return None if is_empty or (drops_blank and not line) else line

    def _add(self, line_text: str) -> None:
        if "\r" in line_text:
            first_text, *more_texts, line_text = line_text.split("\r")
            self._last.add(first_text)
            self._under = _overlay_parts([self._under, self._last.text(), *more_texts])
            self._last = _PendingText(self._max_chars)
            self._is_rewritten = True
        self._last.add(line_text)

    def _take(self) -> str:
        line = self._last.text()
        if self._is_rewritten:
            # Blanks with which a bar has erased a longer one are not part of the line.
            line = _overlay_parts([self._under, line]).rstrip()
        self._begin()
        return line

    def _bar(self) -> str:
        bar = [self._under[:_BAR_CHARS], self._last.start(_BAR_CHARS)]
        return _overlay_parts(bar).rstrip()


class _LiveFrames:
    """Finished lines that may be drawn anew: rich draws bars below each other so.

    It hides the cursor, writes a frame of lines, erases it line by line upwards, and writes the
    next; at the end it shows the cursor again. What it prints meanwhile stands above the frame.

    Attributes:
        is_open: Whether the cursor is hidden.
        held: Lines of the present frame, and of what was printed above it.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.held: list[str] = []
        self._was_erased = False
        self._num_taken_back = 0
        self._num_upper = 0  # lines of a frame above its last one

    @property
    def upper_lines(self) -> list[str]:
        """The lines of the present frame above its last one."""
        return self.held[-self._num_upper :] if self.is_open and self._num_upper else []

    def take_back(self) -> None:
        """The cursor goes up, to draw the last line anew."""
        if self.held:
            self.held.pop()
        self._num_taken_back += 1

    def lines_above(self, text: str) -> list[str]:
        """Take in a text that is written; returns the lines that it no longer can erase."""
        _, erasure, new_text = text.rpartition(_ERASE_LINE)
        if self._num_taken_back and new_text.strip("\r"):
            self._num_upper = self._num_taken_back
            self._num_taken_back = 0
        self._was_erased = self._was_erased or bool(erasure)
        if not (self._was_erased and new_text.strip("\r")):
            return []
        self._was_erased = False
        return self._release()

    def lines_to_show(self) -> list[str]:
        """The lines that are shown at the end of a chunk."""
        is_through = not self.is_open or len(self.held) > _MOST_HELD_LINES
        return self._release() if is_through else []

    def close(self) -> list[str]:
        """Nothing is drawn anew any more; returns the lines of the last frame."""
        self.is_open = False
        return self._release()

    def _release(self) -> list[str]:
        released = self.held
        self.held = []
        return released


class _PendingText:
    """Text that grows at its end. Of a long one the middle is left out."""

    def __init__(self, max_chars: int | None) -> None:
        self._max_chars = max_chars
        self._head = ""
        self._pieces: deque[str] = deque()
        self._num_chars = 0  # in the pieces
        self._num_dropped = 0

    def __bool__(self) -> bool:
        return bool(self._head or self._num_chars)

    def add(self, text: str) -> None:
        if not text:
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._max_chars is not None and self._num_chars > self._max_chars:
            self._shorten(self._max_chars // 2)

    def _shorten(self, half_chars: int) -> None:
        """Half of the limit is cut away each time, so that the copies stay linear."""
        rest_text = "".join(self._pieces)
        if not self._head:
            self._head = rest_text[:half_chars]
            rest_text = rest_text[half_chars:]
        tail_text = rest_text[-half_chars:]
        self._num_dropped += len(rest_text) - len(tail_text)
        self._pieces = deque([tail_text])
        self._num_chars = len(tail_text)

    def text(self) -> str:
        tail_text = "".join(self._pieces)
        if self._max_chars is not None and self._head:
            cut_text = max(0, len(tail_text) - self._max_chars // 2)
            return mark_left_out(self._head, self._num_dropped + cut_text, tail_text[cut_text:])
        return self._head + tail_text

    def start(self, num_chars: int) -> str:
        """The first characters."""
        return (
            self._head[:num_chars] or "".join(itertools.islice(self._pieces, num_chars))[:num_chars]
        )


def _rewrite_line(text: str) -> str:
    return _overlay_parts(text.split("\r")).rstrip() if "\r" in text else text


def _overlay_parts(text_parts: Sequence[str]) -> str:
    """What is visible of texts that overwrite each other, each from the line's first column."""
    pieces: list[str] = []
    text_width = 0
    for text_part in reversed(text_parts):
        _, erasure, text = text_part.rpartition(_ERASE_LINE)
        if len(text) > text_width:
            pieces.append(text[text_width:])
            text_width = len(text)
        if erasure:
            break
    return "".join(pieces)


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
        self._known: dict[int, dict[tuple[str, str], int]] = {
            worker_rank: {} for worker_rank in self._queues
        }
        """Rank → how often each line is in its queue."""
        self._holders: dict[tuple[str, str], int] = {}
        """Line → how many ranks have it in their queues."""
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
        keys = self._known[worker_rank]
        holders = self._holders
        num_chars = line_number = 0
        for line_number, line_text in enumerate(line_texts, 1):  # noqa: B007  (needed behind the loop)
            rank_queue.append(PrintedLine(arrival_time, stream_name, line_text))
            num_chars += len(line_text) + 1
            line_key = (stream_name, line_text)
            items_before = keys.get(line_key, 0)
            keys[line_key] = items_before + 1
            if not items_before:
                holders[line_key] = holders.get(line_key, 0) + 1
        self._chars[worker_rank] += num_chars
        self._lines[worker_rank] += line_number

    def add_rich(self, worker_rank: int, item: RichOutput) -> None:
        """Something a rank has displayed."""
        self._queues[worker_rank].append(item)
        self._count(worker_rank, item, 1)

    def shorten(self, worker_rank: int, *, output_lines: int, num_chars: int) -> int:
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
        return not self._folds_any or self._holders[item.stream, item.text] == 1

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
        line_key = (line.stream, line.text)
        keys = self._known[rank]
        # A count, because a rank may have the same line in its queue several times.
        if keys[line_key] > 1:
            keys[line_key] -= 1
            return
        del keys[line_key]
        if self._holders[line_key] > 1:
            self._holders[line_key] -= 1
        else:
            del self._holders[line_key]

    # ---- twins

    def _twins(self, item: OutputItem) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, of ranks where it may come out now."""
        places = {rank: self._reach(rank, item) for rank in self._queues}
        return {rank: position for rank, position in places.items() if position is not None}

    def _reach(self, rank: int, queued_item: OutputItem) -> int | None:
        """Lines of the other stream do not block it: the order between two pipes is not known."""
        if (
            isinstance(queued_item, PrintedLine)
            and (queued_item.stream, queued_item.text) not in self._known[rank]
        ):
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

    def _before(self, twin_items: dict[int, int], queued_item: OutputItem) -> dict[int, int]:
        """Whose heads have to come out first, if a missing twin is only held up behind one."""
        for rank, rank_queue in self._queues.items():
            if rank in twin_items:
                continue
            if (
                isinstance(queued_item, PrintedLine)
                and (queued_item.stream, queued_item.text) not in self._known[rank]
            ):
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
