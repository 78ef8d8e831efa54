"""What workers print, as the notebook shows it: by rank, folded, at most ten times a second.

How much is shown, and how fast, is bounded, so that neither server nor browser is overloaded.

    up to WHOLE_CHARS   all of it, at most _WHOLE.chars_per_s a second: a rank that is faster waits
                        in its `print`
    after that          the newest of it once a second, and how many lines were left out: no rank
                        waits any more
    end_is_near         (Stop, a failure) the last of what is waiting, at once

Jupyter's server drops whatever exceeds a megabyte a second (`iopub_data_rate_limit`, over three
seconds), updates of displays as well as text; a browser keeps all text of a cell in its memory.

    rank 0 pipe ──► lines ─┐                          [0-1] loading
                           ├─► fold equal heads ─►    [0] saved
    rank 1 pipe ──► lines ─┘   at a bounded pace      [0-1] epoch 1

A line that all ranks print is shown once. To recognise it, a line waits up to `HOLD_S` for its
twins; lines of one rank never overtake each other. A line that is being rewritten with carriage
returns is drawn in place for the lowest rank that has one; where the call has a panel, that shows
those of all ranks.

Rich output waits in the same queues: a picture comes after the lines that its rank printed before.
What cannot be shown twice (output that is updated later, the cell being cleared) is taken from the
lowest rank that has it, as a bar is.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from string import Template
from typing import NamedTuple, TextIO

from nbaccel.base.units import number_ranges, shorten_text
from nbaccel.output import publish
from nbaccel.output.lines import (
    LineAssembler,
    LineMerger,
    OutputItem,
    PrintedLine,
    RichOutput,
)
from nbaccel.output.panel.facts import LibraryMessages, SeenWarnings
from nbaccel.output.publish import CellPlace
from nbaccel.output.rank_logs import RankLogs
from nbaccel.workers import messaging

WHOLE_CHARS = 10_000_000
AT_THE_END_CHARS = 200_000
"""What is waiting when all workers have finished is shown at once, unless it is more."""
MAX_LINE_CHARS = 1_000_000
"""Of a longer line head and tail are shown."""


class _Stage(NamedTuple):
    """How much is shown at a time, and how much of one rank may wait.

    With more waiting it waits itself, or only its newest lines are kept.
    """

    chars_per_s: float
    chars_at_once: float
    waiting_lines: float
    waiting_chars: float


# Just below Jupyter's limit of a megabyte a second, so that the server drops nothing.
_WHOLE = _Stage(900_000, 90_000, 200_000, 1_200_000)
_SLOW = _Stage(100_000, 100_000, 100, 50_000)
_ENDING = _Stage(math.inf, math.inf, 200, 200_000)
_UNPACED = _Stage(math.inf, math.inf, math.inf, math.inf)
_MOST_FULL = 3
"""So many times that is dropped at once, because a pipe is read to its end when a worker ends."""
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

_FIRST_TICK_S = 0.05
"""A call in a cell that is over by then leaves no place for a panel behind."""

_ShownEntry = tuple[list[int], OutputItem]
"""Something to be shown, and the ranks that have it."""


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
        self._dropped: dict[int, int] = {}
        self._owners: dict[str, int] = {}
        """Rank whose output is shown, by the handle of one that can be shown once only."""
        self._drawn = ""
        # A notebook paints stderr as an error, which a bar or a notice is not.
        self._own_stream = "stdout" if publish.has_cells() else "stderr"
        self._drawn_on = self._own_stream
        self._next_tick = 0.0 if self._place is None else time.monotonic() + _FIRST_TICK_S
        self._is_over = False
        self.library_messages = LibraryMessages(has_panel=self._place is not None)
        self.warnings = SeenWarnings()

    def feed(self, worker_rank: int, stream: str, output_bytes: bytes) -> None:
        """Take in what a worker wrote."""
        if self._rank_logs and (
            problem := self._rank_logs.write(worker_rank, stream, output_bytes)
        ):
            self.notice(problem)
        source = self._sources[worker_rank, stream]
        at_most = math.inf if self._pace.waits else self._pace.stage.waiting_lines
        output_lines, dropped_lines = source.feed(output_bytes, at_most=at_most)
        self._queue(worker_rank, stream, output_lines)
        self._note_dropped(worker_rank, dropped_lines)
        if self._fullness(worker_rank) > _MOST_FULL:
            self._shorten(worker_rank)

    def feed_display(
        self, worker_rank: int, message: messaging.Display | messaging.ClearOutput
    ) -> None:
        """Take in rich output. What the rank has printed before it must have been fed before."""
        for stream in ("stdout", "stderr"):
            if not self._sources[worker_rank, stream].rewritten:
                # An unfinished line (`print("...", end="")`) comes before the picture.
                self._finish(worker_rank, stream)
        self._waiting.add_rich(worker_rank, RichOutput(time.monotonic(), message))

    def close(self, worker_rank: int) -> None:
        """Note that this rank writes nothing further."""
        for stream in ("stdout", "stderr"):
            self._finish(worker_rank, stream)
        self._waiting.close(worker_rank)

    def _finish(self, rank: int, stream: str) -> None:
        source = self._sources.get((rank, stream))
        if source is not None and (lines := source.finish()):
            self._queue(rank, stream, lines)

    def _queue(self, rank: int, stream: str, output_lines: Sequence[str]) -> None:
        self.warnings.take_in(rank, output_lines)
        output_lines = self.library_messages.take_from(rank, output_lines, stream)
        if (rank, stream) not in self._hidden:
            arrival_time = time.monotonic()
            for on, line_run in itertools.groupby(
                output_lines, key=functools.partial(self._stream_for, stream)
            ):
                self._waiting.add_lines(rank, arrival_time, on, line_run)
        # From the end, because a chunk may hold thousands of lines and only the last few are kept.
        last_lines = itertools.islice(filter(str.strip, reversed(output_lines)), _LAST_LINES)
        self._tails[rank].extend(
            shorten_text(output_line, _TAIL_CHARS) for output_line in reversed([*last_lines])
        )

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

    # ---- too much of it

    def is_full(self, worker_rank: int) -> bool:
        """Whether so much of this rank is waiting that reading should stop."""
        return self._pace.waits and self._fullness(worker_rank) > 1

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
        """Stop was pressed, or a rank has failed: what is waiting is shown at once, or dropped.

        The last lines of each rank are kept, with a notice of how many are not shown.
        """
        if self._pace.stage is not _UNPACED:
            self._pace.stage = _ENDING

    def _shorten(self, rank: int) -> None:
        stage = self._pace.stage
        lines = self._waiting.shorten(rank, stage.waiting_lines, stage.waiting_chars)
        self._note_dropped(rank, lines)

    def _note_dropped(self, rank: int, num_lines: int) -> None:
        if num_lines:
            self._dropped[rank] = self._dropped.get(rank, 0) + num_lines

    def _tell_dropped(self) -> None:
        names = f" of rank {number_ranges(self._dropped)}" if len(self._ranks) > 1 else ""
        num_lines = sum(self._dropped.values())
        words = f"{num_lines:,} line{'s' * (num_lines != 1)}"
        self._dropped.clear()
        self._write(self._own_stream, f"{_OWN_PREFIX}… {words}{names} not shown\n")

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
        self._erase(
            # Without new lines the bar is overwritten in place, with no blank line in between.
            keep_bar=bar if not (entries or has_gap) and stream == self._drawn_on else ""
        )
        if has_gap:
            self._tell_dropped()
        self._show(entries)
        self._draw(bar, stream)

    def show_last(self, *, has_summary: bool = False) -> None:
        """The call is over: show what is left, below a summary if there will be one."""
        self._is_over = not has_summary
        self.tick(is_final=True)

    def _due(self, current_time: float, is_final: bool) -> list[_ShownEntry]:
        """What is to be shown now, within what the pace leaves room for."""
        items = self._entries(current_time, -math.inf if is_final else HOLD_S)
        if self._pace.stage is _ENDING:
            for worker_rank in self._ranks:
                self._shorten(worker_rank)
        room = math.inf
        if not is_final:
            room = self._pace.room(current_time, has_gaps=bool(self._dropped))
        entries: list[_ShownEntry] = []
        num_chars = 0
        while num_chars < room and (entry := next(items, None)):
            entries.append(entry)
            # Each line costs a prefix and a line end too, also an empty one.
            num_chars += len(entry[1].text) + 5
        if self._pace.spend(num_chars):
            entries.append(([], PrintedLine(current_time, self._own_stream, _TOO_MUCH)))
        return entries

    def _entries(self, current_time: float, hold_s: float) -> Iterator[_ShownEntry]:
        for popped_items in self._waiting.ready(current_time, hold_s=hold_s):
            # The lowest, as elsewhere: twins of outputs that are updated later differ.
            rank = min(popped_items)
            for queued_item in popped_items.values():
                if isinstance(queued_item, RichOutput) and queued_item.handle is not None:
                    owner = self._owners.get(queued_item.handle, rank)
                    self._owners[queued_item.handle] = min(rank, owner)
            yield [*popped_items], popped_items[rank]

    def notice(self, text: str) -> None:
        """Show a line of the launcher, after what has been printed so far."""
        self.tick(is_final=True)
        # What has another output below it cannot be drawn over: it would stay for good.
        self._erase()
        self._write(self._own_stream, text + "\n")

    def _bar(self) -> tuple[str, str]:
        """What the lowest rank draws in place, and on which stream."""
        lowest = min(self._rewritten(), default=None)
        if self._place is not None or lowest is None:
            return "", self._drawn_on
        rank, stream, text = lowest
        return self._prefix([rank]) + text, "stdout" if self._own_stream == "stdout" else stream

    def _erase(self, keep_bar: str = "") -> None:
        if self._drawn and not keep_bar:
            self._write(self._drawn_on, "\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""

    def _draw(self, bar: str, stream: str) -> None:
        if bar and bar != self._drawn:
            # Padded, because a shorter bar would leave the end of the old one.
            self._write(stream, "\r" + bar.ljust(len(self._drawn)))
            self._drawn = bar
            self._drawn_on = stream

    def _show(self, entries: list[_ShownEntry]) -> None:
        """One write per run of lines of the same stream: each write is a message to the browser."""
        # Of updates of the same output only the last needs to be shown.
        newest_updates = {
            (min(ranks), item.handle): item
            for ranks, item in entries
            if isinstance(item, RichOutput) and item.updates
        }
        for stream, entry_run in itertools.groupby(entries, key=lambda entry: entry[1].stream):
            if stream is not None:
                lines = [f"{self._prefix(ranks)}{item.text}\n" for ranks, item in entry_run]
                self._write(stream, "".join(lines))
                continue
            for ranks, item in entry_run:
                if isinstance(item, RichOutput) and (
                    newest_updates.get((min(ranks), item.handle)) is item or not item.updates
                ):
                    self._publish(ranks, item)

    def _publish(self, ranks: list[int], item: RichOutput) -> None:
        if item.handle is not None and self._owners[item.handle] != min(ranks):
            return
        label = self._prefix(ranks).rstrip()
        if label and not item.clears and not item.updates and len(ranks) < len(self._ranks):
            self._write("stdout", label + "\n")
        if self._place is not None and not item.clears:
            self._place.hold()
        publish.show_message(item.message)
        if self._place is not None and item.clears:
            self._place.note_cleared()

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
