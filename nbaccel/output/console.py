"""What workers print, as the notebook shows it: by rank, folded, at most ten times a second.

    rank 0 pipe ──► lines ─┐                          [0-1] loading
                           ├─► fold equal heads ─►    [0] saved
    rank 1 pipe ──► lines ─┘   at a bounded pace      [0-1] epoch 1

    up to WHOLE_CHARS   all of it, at most _WHOLE.chars_per_s a second: a rank that is faster waits
                        in its `print`
    after that          the newest of it once a second, and how many lines were left out: no rank
                        waits any more
    end_is_near         (Stop, a failure) the last of what is waiting, at once

Jupyter's server drops whatever exceeds a megabyte a second (`iopub_data_rate_limit`, over three
seconds), updates of displays as well as text; a browser keeps all text of a cell in its memory.

A line that all ranks print is shown once: it waits up to `HOLD_S` for its twins; lines of one rank
never overtake each other. Rich output waits in the same queues. A line that is rewritten with
carriage returns, and output that cannot be shown twice, is that of the lowest rank which has one.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import itertools
import math
import os
import re
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple, TextIO

from nbaccel.base.errors import ConfigError
from nbaccel.base.log import write_notice
from nbaccel.base.units import mark_left_out, number_ranges, shorten_text
from nbaccel.output import publish
from nbaccel.output.panel.facts import LibraryMessages, SeenWarnings
from nbaccel.output.publish import CellPlace
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
        self._moves = False  # whether the line has been written from its start again
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
        # The pattern takes ten times as long as both searches, and few lines have a mark.
        for part in _MARKS.split(text) if "\r" in text or "\x1b[2K" in text else (text,):
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
_DISPLAY_CHARS = 4_000  # of any display: a figure is larger, a text smaller


class OutputItem(NamedTuple):
    """A line of text; or rich output, or a request to clear the cell: these have a message."""

    time: float
    key: Any  # of several ranks' items that have the same one is shown
    stream: str | None = None
    text: str = ""
    message: messaging.Display | messaging.ClearOutput | None = None
    # By what it can be updated later: others depend on it, and it may not be dropped.
    handle: str | None = None
    updates: bool = False  # whether it replaces an output that was shown before

    @property
    def num_chars(self) -> int:
        """The size that it counts as; nothing for what cannot be dropped."""
        if self.message is None:
            return len(self.text) + 1
        return _DISPLAY_CHARS if self.handle is None else 0


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

    def close(self, rank: int) -> None:
        """Stop waiting for what this rank may still write."""
        self._open.discard(rank)

    def size(self, rank: int) -> tuple[int, int]:
        """How many lines of this rank are waiting, and how many characters."""
        return self._lines[rank], self._chars[rank]

    def add_lines(
        self, rank: int, arrival_time: float, stream_name: str, line_texts: Iterable[str]
    ) -> None:
        """Lines that a rank has written to a stream."""
        # Local names, because the loop below runs for each of many thousands of lines.
        queue = self._queues[rank]
        texts = self._texts[rank]
        num_chars = line_number = 0
        for line_number, line_text in enumerate(line_texts, 1):  # noqa: B007  (needed behind the loop)
            key = stream_name, line_text
            queue.append(OutputItem(arrival_time, key, stream_name, line_text))
            num_chars += len(line_text) + 1
            texts[key] += 1
        self._chars[rank] += num_chars
        self._lines[rank] += line_number

    def add_rich(
        self, rank: int, arrival_time: float, message: messaging.Display | messaging.ClearOutput
    ) -> None:
        """Rich output of a rank, or its request to clear the cell: it waits among the lines."""
        handle: str | None = _CLEARING
        updates = False
        if isinstance(message, messaging.Display):
            display_id = (message.content.get("transient") or {}).get("display_id")
            handle = None if display_id is None else str(display_id)
            updates = bool(message.content.get("update"))
        # IPython draws handles at random, so those of two ranks always differ.
        key = message if handle is None else (handle == _CLEARING, updates)
        item = OutputItem(arrival_time, key, message=message, handle=handle, updates=updates)
        self._queues[rank].append(item)
        self._count(rank, item, 1)

    def shorten(self, rank: int, output_lines: float, num_chars: float) -> int:
        """Drop a rank's oldest lines and displays until so few are left, or one: how many."""
        dropped_lines = 0
        kept_items: list[OutputItem] = []
        queue = self._queues[rank]
        while self._lines[rank] > 1 and (
            self._lines[rank] > output_lines or self._chars[rank] > num_chars
        ):
            item = self._take(rank, 0)
            if item.handle is not None:
                kept_items.append(item)
            else:
                dropped_lines += 1
        # Others depend on them: an update needs its output, so these may not be dropped.
        queue.extendleft(reversed(kept_items))
        return dropped_lines

    def ready(self, now: float, *, hold_s: float) -> Iterator[dict[int, OutputItem]]:
        """Take out what is due: each line or display, by the ranks that it is shown for."""
        while heads := [(queue[0].time, rank) for rank, queue in self._queues.items() if queue]:
            first_rank = min(heads)[1]
            item = self._queues[first_rank][0]
            twins, held_up = self._twins(first_rank)
            # Lines of a rank never overtake each other, so nothing behind it may come out.
            if item.time > now - hold_s and self._folds(item) and self._open.difference(twins):
                return
            # What holds a missing twin up has to come out first.
            taken = self._twins(held_up[0])[0] if held_up else twins
            yield {rank: self._take(rank, position) for rank, position in sorted(taken.items())}

    def _take(self, rank: int, position: int) -> OutputItem:
        queue = self._queues[rank]
        item = queue[position]
        del queue[position]
        self._count(rank, item, -1)
        if item.message is None:
            texts = self._texts[rank]
            texts[item.key] -= 1
            if not texts[item.key]:
                del texts[item.key]
        return item

    def _count(self, rank: int, item: OutputItem, sign: int) -> None:
        if num_chars := item.num_chars:
            self._lines[rank] += sign
            self._chars[rank] += sign * num_chars

    def _folds(self, item: OutputItem) -> bool:
        """Whether it may be shown once for several ranks, and is worth waiting for them."""
        return self._folds_any and not item.updates

    def _twins(self, first_rank: int) -> tuple[dict[int, int], list[int]]:
        """Rank → where in its queue the head of the first one's has a twin that may come out.

        Then the ranks that have one which may not, behind another line.
        """
        item = self._queues[first_rank][0]
        twins = {first_rank: 0}
        held_up = []
        for rank, texts in self._texts.items() if self._folds(item) else ():
            if rank == first_rank or (item.message is None and item.key not in texts):
                continue
            queue = self._queues[rank]
            ahead = enumerate(itertools.islice(queue, _LOOK_AHEAD))
            position = next((place for place, other in ahead if other.key == item.key), None)
            if position is None:
                continue
            # Lines of the other stream do not block it: the order between two pipes is not known.
            before = itertools.islice(queue, position)
            if any(item.stream is None or other.stream in (None, item.stream) for other in before):
                held_up.append(rank)
            else:
                twins[rank] = position
        return twins, held_up


WHOLE_CHARS = 10_000_000
AT_THE_END_CHARS = 200_000  # at the end so much is shown at once
MAX_LINE_CHARS = 1_000_000  # of a longer line head and tail are shown


class _Stage(NamedTuple):
    """How much is shown at a time, and how much of one rank may wait."""

    chars_per_s: float
    chars_at_once: float
    waiting_lines: float
    waiting_chars: float
    most_full: float = 3  # times that may be there before lines are dropped


# Just below Jupyter's limit of a megabyte a second, so that the server drops nothing. When a worker
# ends, its pipe is read to the end, which may be full of short lines: none of them is dropped.
_WHOLE = _Stage(900_000, 90_000, 20_000, 1_200_000, most_full=30)
_SLOW = _Stage(100_000, 100_000, 100, 50_000)
_ENDING = _Stage(math.inf, math.inf, 200, 200_000)
_UNPACED = _Stage(math.inf, math.inf, math.inf, math.inf)
_NOTE_PAUSE_S = 1.0


class _OutputPace:
    """The pace of one cell or launch."""

    def __init__(self, current_time: float, stage: _Stage) -> None:
        self.stage = stage
        self._credit = stage.chars_at_once
        self._since = current_time
        self._next = current_time
        self._total = 0

    @property
    def waits(self) -> bool:
        """Whether a rank that prints too much has to wait; otherwise its lines are dropped."""
        return self.stage is _WHOLE

    def room(self, current_time: float, *, has_gaps: bool) -> float:
        """How many characters may be shown now; nothing if it is not positive."""
        if self.stage in (_ENDING, _UNPACED):
            return math.inf
        if has_gaps and current_time < self._next:
            return 0.0
        self._next = current_time + _NOTE_PAUSE_S
        new_credit = self.stage.chars_per_s * (current_time - self._since)
        # Capped, so that a pause in the output is not followed by one huge burst.
        self._credit = min(self.stage.chars_at_once, self._credit + new_credit)
        self._since = current_time
        return self._credit

    def spend(self, num_chars: int) -> bool:
        """So many have been shown; returns whether from now on no longer all will be."""
        self._credit -= num_chars
        self._total += num_chars
        if not self.waits or self._total <= WHOLE_CHARS:
            return False
        self.stage = _SLOW
        return True


_OWN_PREFIX = "nbaccel: "
_IS_BAR = re.compile(r"\d%\|.*\]$")  # as tqdm draws one
TICK_S = 0.1
HOLD_S = 0.15
_LAST_LINES = 20
_TAIL_CHARS = 2_000

_TOO_MUCH = (
    f"more than {WHOLE_CHARS // 1_000_000} MB have been printed here. From now on, of what is "
    "printed fast only some lines are shown, because a browser keeps all of them in memory. "
    "Write to a file what you want to keep."
)

_FIRST_TICK_S = 0.05  # a call in a cell that is over by then leaves no place for a panel behind

_ShownEntry = tuple[list[int], OutputItem]  # something to be shown, and the ranks that have it


class Console:
    """Collects the workers' output and shows it in the notebook."""

    def __init__(
        self,
        ranks: list[int],
        *,
        prefix_template: str | None = None,
        paced: bool | None = None,
        hidden: Collection[tuple[int, str]] = (),
        rank_logs: RankLogs | None = None,
        place: CellPlace | None = None,
    ) -> None:
        self._place = place if place is not None and place.has_panel else None
        self._ranks = ranks
        self._template = prefix_template
        self._hidden = frozenset(hidden)
        self._rank_logs = rank_logs
        is_paced = publish.has_cells() if paced is None else paced
        self._pace = _OutputPace(time.monotonic(), _WHOLE if is_paced else _UNPACED)
        limit = MAX_LINE_CHARS if is_paced else math.inf
        # Made when something is printed: most cells print nothing.
        self._sources: defaultdict[tuple[int, str], LineAssembler] = defaultdict(
            lambda: LineAssembler(limit)
        )
        self._waiting = LineMerger(ranks, folds_ranks=prefix_template is None)
        self._tails = {rank: deque[str](maxlen=_LAST_LINES) for rank in ranks}
        self._dropped: Counter[int] = Counter()
        self._owners: dict[str, int] = {}  # handle of what is shown once → its rank
        self._drawn = ""
        # A notebook paints stderr as an error, which a bar or a notice is not.
        self._own_stream = "stdout" if publish.has_cells() else "stderr"
        self._drawn_on = self._own_stream
        self._next_tick = 0.0 if self._place is None else time.monotonic() + _FIRST_TICK_S
        self._is_over = False
        self.library_messages = LibraryMessages(has_panel=self._place is not None)
        self.warnings = SeenWarnings()

    def feed(self, rank: int, stream: str, output_bytes: bytes) -> None:
        """Take in what a worker wrote."""
        if self._rank_logs and (problem := self._rank_logs.write(rank, stream, output_bytes)):
            self.notice(problem)
        source = self._sources[rank, stream]
        at_most = math.inf if self._pace.waits else self._pace.stage.waiting_lines
        output_lines, dropped_lines = source.feed(output_bytes, at_most=at_most)
        self._queue(rank, stream, output_lines)
        self._dropped += Counter({rank: dropped_lines})
        if self._fullness(rank) > self._pace.stage.most_full:
            self._shorten(rank)

    def feed_display(self, rank: int, message: messaging.Display | messaging.ClearOutput) -> None:
        """Take in rich output. What the rank has printed before it must have been fed before."""
        for stream in ("stdout", "stderr"):
            if not self._sources[rank, stream].rewritten:
                # An unfinished line (`print("...", end="")`) comes before the picture.
                self._finish(rank, stream)
        self._waiting.add_rich(rank, time.monotonic(), message)

    def close(self, rank: int) -> None:
        """Note that this rank writes nothing further."""
        for stream in ("stdout", "stderr"):
            self._finish(rank, stream)
        self._waiting.close(rank)

    def _finish(self, rank: int, stream: str) -> None:
        source = self._sources.get((rank, stream))
        if source is not None and (lines := source.finish()):
            self._queue(rank, stream, lines)

    def _queue(self, rank: int, stream: str, output_lines: Sequence[str]) -> None:
        self.warnings.take_in(rank, output_lines)
        output_lines = self.library_messages.take_from(rank, output_lines, stream)
        if (rank, stream) not in self._hidden:
            arrival_time = time.monotonic()
            stream_of = functools.partial(self._stream_for, stream)
            for on, line_run in itertools.groupby(output_lines, stream_of):
                self._waiting.add_lines(rank, arrival_time, on, line_run)
        # From the end, because a chunk may hold thousands of lines and only the last few are kept.
        last = itertools.islice(filter(str.strip, reversed(output_lines)), _LAST_LINES)
        self._tails[rank].extend(shorten_text(line, _TAIL_CHARS) for line in reversed([*last]))

    def _stream_for(self, stream: str, line: str) -> str:
        """A bar and a worker's own notice are no errors; other lines stay where they were."""
        if self._own_stream in (stream, "stderr"):
            return stream
        is_error = not line.startswith(_OWN_PREFIX) and not _IS_BAR.search(line)
        return stream if is_error else self._own_stream

    def rewritten_lines(self) -> dict[int, tuple[str, ...]]:
        """Unfinished lines that ranks draw in place, by rank."""
        found: dict[int, tuple[str, ...]] = {}
        for rank, _, text in self._rewritten():
            found[rank] = (*found.get(rank, ()), text)
        return found

    def _rewritten(self) -> Iterator[tuple[int, str, str]]:
        for (rank, stream), source in self._sources.items():
            if source.rewritten and (rank, stream) not in self._hidden:
                yield rank, stream, source.rewritten

    def is_full(self, rank: int) -> bool:
        """Whether so much of this rank is waiting that reading should stop."""
        return self._pace.waits and self._fullness(rank) > 1

    def _fullness(self, rank: int) -> float:
        num_lines, num_chars = self._waiting.size(rank)
        stage = self._pace.stage
        return max(num_lines / stage.waiting_lines, num_chars / stage.waiting_chars)

    @property
    def is_behind(self) -> bool:
        """Whether more is waiting than should be shown at once."""
        amount = sum(self._waiting.size(rank)[1] for rank in self._ranks)
        return self._pace.waits and amount > AT_THE_END_CHARS

    def end_is_near(self) -> None:
        """Stop was pressed or a rank has failed: of what waits only the last lines are shown."""
        if self._pace.stage is not _UNPACED:
            self._pace.stage = _ENDING

    def _shorten(self, rank: int) -> None:
        stage = self._pace.stage
        lines = self._waiting.shorten(rank, stage.waiting_lines, stage.waiting_chars)
        self._dropped += Counter({rank: lines})

    def tails(self) -> dict[int, list[str]]:
        """The last lines of each rank."""
        return {rank: list(lines) for rank, lines in self._tails.items()}

    def due_in(self) -> float | None:
        """Seconds until `tick` has something to do; None if nothing is waiting."""
        amount = self._waiting or self._dropped or self._bar() != (self._drawn, self._drawn_on)
        return max(0.0, self._next_tick - time.monotonic()) if amount else None

    def tick(self, *, is_final: bool = False) -> None:
        """Show what is due. Cheap to call often."""
        current_time = time.monotonic()
        if current_time < self._next_tick and not is_final:
            return
        self._next_tick = current_time + TICK_S
        entries = self._due(current_time, is_final)
        has_gap = bool(self._dropped) and (is_final or bool(entries))
        bar, stream = self._bar()
        if not entries and not has_gap and bar == self._drawn:
            return
        # Without new lines the bar is overwritten in place, with no blank line in between.
        if entries or has_gap or not bar or stream != self._drawn_on:
            self._erase()
        if has_gap:
            names = f" of rank {number_ranges(self._dropped)}" if len(self._ranks) > 1 else ""
            lines = sum(self._dropped.values())
            words = f"{lines:,} line{'s' * (lines != 1)}{names}"
            self._dropped.clear()
            self._write(self._own_stream, f"{_OWN_PREFIX}… {words} not shown\n")
        self._show(entries)
        if bar and bar != self._drawn:
            # Padded, because a shorter bar would leave the end of the old one.
            self._write(stream, "\r" + bar.ljust(len(self._drawn)))
            self._drawn = bar
            self._drawn_on = stream

    def show_last(self, *, has_summary: bool = False) -> None:
        """The call is over: show what is left, below a summary if there will be one."""
        self._is_over = not has_summary
        self.tick(is_final=True)

    def _due(self, current_time: float, is_final: bool) -> list[_ShownEntry]:
        due = self._waiting.ready(current_time, hold_s=-math.inf if is_final else HOLD_S)
        if self._pace.stage is _ENDING:
            for rank in self._ranks:
                self._shorten(rank)
        room = math.inf if is_final else self._pace.room(current_time, has_gaps=bool(self._dropped))
        entries: list[_ShownEntry] = []
        num_chars = 0
        while num_chars < room and (items := next(due, None)):
            # The lowest, as elsewhere: twins of outputs that are updated later differ.
            rank = min(items)
            for item in items.values():
                if item.handle is not None:
                    self._owners[item.handle] = min(rank, self._owners.get(item.handle, rank))
            entries.append(([*items], items[rank]))
            # Each line costs a prefix and a line end too, also an empty one.
            num_chars += len(items[rank].text) + 5
        if self._pace.spend(num_chars):
            entries.append(([], OutputItem(current_time, None, self._own_stream, _TOO_MUCH)))
        return entries

    def notice(self, text: str) -> None:
        """Show a line of the launcher, after what has been printed so far."""
        self.tick(is_final=True)
        # What has another output below it cannot be drawn over: it would stay for good.
        self._erase()
        self._write(self._own_stream, text + "\n")

    def _bar(self) -> tuple[str, str]:
        lowest = min(self._rewritten(), default=None)
        if self._place is not None or lowest is None:
            return "", self._drawn_on
        rank, stream, text = lowest
        return self._prefix([rank]) + text, "stdout" if self._own_stream == "stdout" else stream

    def _erase(self) -> None:
        if self._drawn:
            self._write(self._drawn_on, "\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""

    def _show(self, entries: list[_ShownEntry]) -> None:
        """One write per run of lines of the same stream: each write is a message to the browser."""
        # Of updates of the same output only the last needs to be shown.
        newest = {(min(ranks), item.handle): item for ranks, item in entries if item.updates}
        for stream, entry_run in itertools.groupby(entries, key=lambda entry: entry[1].stream):
            if stream is not None:
                lines = [f"{self._prefix(ranks)}{item.text}\n" for ranks, item in entry_run]
                self._write(stream, "".join(lines))
                continue
            for ranks, item in entry_run:
                if not item.updates or newest.get((min(ranks), item.handle)) is item:
                    self._publish(ranks, item)

    def _publish(self, ranks: list[int], item: OutputItem) -> None:
        if item.handle is not None and self._owners[item.handle] != min(ranks):
            return
        label = self._prefix(ranks).rstrip()
        is_new = not item.updates and item.handle != _CLEARING
        if label and is_new and len(ranks) < len(self._ranks):
            self._write("stdout", label + "\n")
        match item.message:
            case messaging.ClearOutput(wait):
                publish.clear(wait_for_new=wait)
                if self._place is not None:
                    self._place.note_cleared()
            case messaging.Display(content):
                if self._place is not None:
                    self._place.hold()
                publish.publish_display(content)

    def _write(self, stream: str, text: str) -> None:
        if self._place is not None and not self._is_over:
            self._place.hold()
        # Looked up at each write, because user code may redirect the stream meanwhile.
        target_stream: TextIO = getattr(sys, stream)
        target_stream.write(text)
        target_stream.flush()

    def _prefix(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return _OWN_PREFIX
        if self._template is None:
            return f"[{number_ranges(ranks)}] "
        local_rank = self._ranks.index(ranks[0])
        return Template(self._template).safe_substitute(
            rank=ranks[0], local_rank=local_rank, role_name="worker"
        )


STREAM_NAMES = ("stdout", "stderr")


class RankLogs:
    """The files of one group of workers."""

    def __init__(self, log_dir: str, ranks: Iterable[int]) -> None:
        self._files: dict[tuple[int, str], io.FileIO] = {}
        name = f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}"
        # Two starts of one process within a second: restarts of workers that fail at once.
        names = (f"{name}_{number}" if number else name for number in itertools.count())
        folders = (Path(log_dir).expanduser() / name for name in names)
        try:
            self.folder = next(folder for folder in folders if not folder.exists())
            self.folder.mkdir(parents=True)
            write_notice(f"nbaccel: what each rank prints is written to {self.folder}\n")
            for rank in ranks:
                for name in STREAM_NAMES:
                    path = self.folder / f"rank_{rank}.{name}.log"
                    self._files[rank, name] = io.FileIO(path, "a")
        except OSError as error:
            self.close()
            raise ConfigError(
                f"log_dir={log_dir!r} cannot be written: {error}. Nothing of what workers print "
                "would be kept. Give a folder that can be written, or leave log_dir out."
            ) from error

    def write(self, rank: int, stream_name: str, output_bytes: bytes) -> str:
        """Append what a rank has written."""
        file = self._files.get((rank, stream_name))
        if file is None:
            return ""
        try:
            # A single write may take only a part, and the disk may be full for the rest.
            while output_bytes:
                output_bytes = output_bytes[file.write(output_bytes) :]
        except OSError as error:
            # Training goes on: a full disk for logs must not cost hours of work.
            self._drop(rank, stream_name)
            return (
                f"nbaccel: rank {rank}'s {stream_name} is no longer written to {self.folder}: "
                f"{error.strerror or error}. Training goes on; what follows is shown only here."
            )
        return ""

    def close(self) -> None:
        """Close all files."""
        for rank, name in tuple(self._files):
            self._drop(rank, name)

    def _drop(self, rank: int, name: str) -> None:
        # Network file systems report a failed write when the file is closed.
        with contextlib.suppress(OSError):
            self._files.pop((rank, name)).close()


def hidden_streams(shown_output: str, ranks: Sequence[int]) -> frozenset[tuple[int, str]]:
    """What is not shown, by rank and stream."""
    # ``0:3,1:2`` by local rank; a number alone stands for all other ranks, under None.
    parts = [part.rpartition(":") for part in shown_output.replace(" ", "").split(",")]
    numbers = {int(text) if text else None: int(number) for text, _, number in parts}
    return frozenset(
        (rank, name)
        for local_rank, rank in enumerate(ranks)
        # As torchrun numbers streams: 1 is stdout, 2 stderr, 3 both.
        for bit, name in enumerate(STREAM_NAMES, 1)
        if not numbers.get(local_rank, numbers.get(None, 0)) & bit
    )
