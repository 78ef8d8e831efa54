"""What workers print, as the notebook shows it: by rank, folded, at most ten times a second.

    rank 0 pipe ──► lines ─┐                          [0-1] loading
                           ├─► fold equal heads ─►    [0] saved
    rank 1 pipe ──► lines ─┘   at a bounded pace      [0-1] epoch 1

A line that all ranks print is shown once. To recognise it, a line waits up to `HOLD_S` for its
twins; lines of one rank never overtake each other. A line that is being rewritten with carriage
returns (a progress bar) is drawn in place for the lowest rank that has one.

Rich output waits in the same queues: a picture comes after the lines that its rank printed before.
What cannot be shown twice (output that is updated later, the cell being cleared) is taken from the
lowest rank that has it, as a bar is.
"""

from __future__ import annotations

import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from string import Template
from typing import TextIO

from nbaccel.launch import publish, wire
from nbaccel.launch.folding import Folding, Item, Line, Rich, stream_of
from nbaccel.launch.lines import Lines
from nbaccel.launch.pacing import AT_THE_END_CHARS, LINE_CHARS, WHOLE_CHARS, Amount, Pace
from nbaccel.units import shortened, spans

TICK_S = 0.1
HOLD_S = 0.15
_LAST_LINES = 20
_TAIL_CHARS = 2_000

_TOO_MUCH = (
    f"more than {WHOLE_CHARS // 1_000_000} MB have been printed here. From now on, of what is "
    "printed fast only some lines are shown, because a browser keeps all of them in memory. Write "
    "to a file what you want to keep."
)

# What gloo says of every group when all is well, from each rank, in the torch of Colab and Kaggle
# (2.9). Nobody can turn it off, and nobody asked.
_GLOO = re.compile(
    r"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. "
    r"Expected number of connected peer ranks is : \1"
)

_Entry = tuple[list[int], Item]
"""Something to be shown, and the ranks that have it."""


class Console:
    """Collects the workers' output and shows it in the notebook.

    Args:
        ranks: Global ranks of this node's workers, in order.
        template: Prefix of each line, with `${rank}`, `${local_rank}` and `${role_name}`;
            None for `[rank] `, with folding.
        paced: Whether there is a limit to how much is shown how fast; by default in a notebook.
    """

    def __init__(
        self, ranks: list[int], *, template: str | None = None, paced: bool | None = None
    ) -> None:
        self._ranks = ranks
        self._template = template
        is_paced = publish.has_cells() if paced is None else paced
        self._pace = Pace(time.monotonic()) if is_paced else None
        limit = LINE_CHARS if is_paced else None
        self._sources = {(r, s): Lines(limit) for r in ranks for s in ("stdout", "stderr")}
        self._waiting = Folding(ranks, folds=template is None)
        self._tails: dict[int, deque[str]] = {r: deque(maxlen=_LAST_LINES) for r in ranks}
        self._prefixes: dict[tuple[int, ...], str] = {}
        self._dropped: dict[int, int] = {}
        self._live = _Live()
        self.clears = 0
        """How often workers have cleared the cell."""
        self._drawn = ""
        self._drawn_on = "stderr"
        self._next_tick = 0.0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what a worker wrote."""
        source, pace = self._sources[rank, stream], self._pace
        at_most = None if pace is None or pace.waits else pace.backlog.lines
        lines, dropped = source.feed(data, at_most=at_most)
        self._queue(rank, stream, lines)
        self._note_dropped(rank, dropped)
        if pace is not None and pace.most.is_exceeded_by(*self._waiting.size(rank)):
            self._shorten(rank, pace.backlog)

    def feed_display(self, rank: int, message: wire.Display | wire.ClearOutput) -> None:
        """Take in rich output. What the rank has printed before it must have been fed before.

        Args:
            rank: Who sent it.
            message: What to show, or to clear what is shown.
        """
        for stream in ("stdout", "stderr"):
            if not self._sources[rank, stream].bar:
                self._finish(rank, stream)  # `print("...", end="")`: it stands before the picture
        self._waiting.add_rich(rank, Rich(time.monotonic(), message))

    def close(self, rank: int) -> None:
        """This rank writes no more."""
        for stream in ("stdout", "stderr"):
            self._finish(rank, stream)
        self._waiting.close(rank)

    def _finish(self, rank: int, stream: str) -> None:
        rest = self._sources[rank, stream].finish()
        if rest is not None:
            self._queue(rank, stream, [rest])

    def _queue(self, rank: int, stream: str, lines: Sequence[str]) -> None:
        if any(map(_GLOO.fullmatch, lines)):
            lines = [line for line in lines if not _GLOO.fullmatch(line)]
        self._waiting.add_lines(rank, time.monotonic(), stream, lines)
        last = itertools.islice(filter(str.strip, reversed(lines)), _LAST_LINES)
        self._tails[rank].extend(shortened(line, _TAIL_CHARS) for line in reversed([*last]))

    # ---- too much of it

    def is_full(self, rank: int) -> bool:
        """Whether so much of this rank is waiting that no more should be read."""
        pace = self._pace
        return (
            pace is not None
            and pace.waits
            and pace.backlog.is_exceeded_by(*self._waiting.size(rank))
        )

    @property
    def is_behind(self) -> bool:
        """Whether more is waiting than should be shown at once."""
        waiting = sum(self._waiting.size(rank)[1] for rank in self._ranks)
        return self._pace is not None and self._pace.waits and waiting > AT_THE_END_CHARS

    def end_is_near(self) -> None:
        """Stop was pressed, or a rank has failed: what is waiting is shown at once, or dropped.

        Of each rank the last lines are kept, and how many are not shown is told.
        """
        if self._pace is not None:
            self._pace.end()

    def _shorten(self, rank: int, limit: Amount) -> None:
        dropped = self._waiting.shorten(rank, lines=limit.lines, chars=limit.chars)
        self._note_dropped(rank, dropped)

    def _note_dropped(self, rank: int, number: int) -> None:
        if number:
            self._dropped[rank] = self._dropped.get(rank, 0) + number

    def _tell_dropped(self) -> None:
        if self._dropped:
            who = f" of rank {spans(self._dropped)}" if len(self._ranks) > 1 else ""
            number = sum(self._dropped.values())
            lines = f"{number:,} line{'s' * (number != 1)}"
            self._dropped.clear()
            _write("stderr", f"nbaccel: … {lines}{who} not shown\n")

    def tails(self) -> dict[int, list[str]]:
        """The last lines of each rank."""
        return {rank: list(tail) for rank, tail in self._tails.items()}

    def last_lines(self) -> dict[int, str]:
        """The last line of each rank that has printed one."""
        return {rank: tail[-1] for rank, tail in self._tails.items() if tail}

    def due_in(self) -> float | None:
        """Seconds until `tick` has something to do; None if nothing is waiting."""
        waiting = self._waiting or self._dropped or self._bar() != (self._drawn, self._drawn_on)
        return max(0.0, self._next_tick - time.monotonic()) if waiting else None

    def tick(self, *, final: bool = False) -> None:
        """Show what is due. Cheap to call often."""
        now = time.monotonic()
        if now < self._next_tick and not final:
            return
        self._next_tick = now + TICK_S
        batch = self._due(now, final)
        has_gap = bool(self._dropped) and (final or bool(batch))
        bar, bar_stream = self._bar()
        if not batch and not has_gap and bar == self._drawn:
            return
        self._erase(keep=bar if not (batch or has_gap) and bar_stream == self._drawn_on else "")
        if has_gap:
            self._tell_dropped()
        self._show(batch)
        self._draw(bar, bar_stream)

    def _due(self, now: float, final: bool) -> list[_Entry]:
        """What is to be shown now, within what the pace leaves room for."""
        found = self._entries(now, float("-inf") if final else HOLD_S)
        pace = self._pace
        if pace is None:
            return list(found)
        if pace.is_ending:
            for rank in self._ranks:
                self._shorten(rank, pace.backlog)
        room = float("inf") if final else pace.room(now, has_gaps=bool(self._dropped))
        batch: list[_Entry] = []
        chars = 0
        while chars < room and (entry := next(found, None)):
            batch.append(entry)
            chars += len(_text(entry[1])) + 5
        if pace.spend(chars):
            batch.append(([], Line(now, "stderr", _TOO_MUCH)))
        return batch

    def _entries(self, now: float, hold_s: float) -> Iterator[_Entry]:
        for popped in self._waiting.ready(now, hold_s=hold_s):
            shower = min(popped)  # of outputs that are updated, twins differ
            for rank, item in popped.items():
                if isinstance(item, Rich):
                    self._live.note(rank, item, with_rank=shower)
            yield [*popped], popped[shower]

    def notice(self, text: str, *, stream: str = "stderr") -> None:
        """Show a line of the launcher's own, after what has been printed so far."""
        self.make_room()
        _write(stream, text + "\n")

    def make_room(self) -> None:
        """Show what is waiting and take a bar away, before something else is shown in the cell.

        What has another output below it cannot be drawn over: it would stay for good.
        """
        self.tick(final=True)
        self._erase()

    def _bar(self) -> tuple[str, str]:
        for (rank, stream), source in self._sources.items():
            if source.bar:
                return self._prefix([rank]) + source.bar, stream
        return "", self._drawn_on

    def _erase(self, keep: str = "") -> None:
        if self._drawn and not keep:
            _write(self._drawn_on, "\r" + " " * len(self._drawn) + "\r")
            self._drawn = ""

    def _draw(self, bar: str, stream: str) -> None:
        if bar and bar != self._drawn:
            _write(stream, "\r" + bar.ljust(len(self._drawn)))
            self._drawn, self._drawn_on = bar, stream

    def _show(self, batch: list[_Entry]) -> None:
        """One write per run of lines of the same stream: each write is a message to the browser."""
        newest = {
            self._live.key(ranks, item): item for ranks, item in batch if isinstance(item, Rich)
        }
        for stream, run in itertools.groupby(batch, key=lambda entry: stream_of(entry[1])):
            if stream is not None:
                lines = (f"{self._prefix(ranks)}{_text(item)}\n" for ranks, item in run)
                _write(stream, "".join(lines))
                continue
            for ranks, item in run:
                if isinstance(item, Rich) and newest[self._live.key(ranks, item)] is item:
                    self._publish(ranks, item)

    def _publish(self, ranks: list[int], item: Rich) -> None:
        shower = min(ranks)
        if not self._live.may_show(shower, item):
            return
        self.clears += item.clears
        label = self._prefix(ranks).rstrip()
        if label and not item.clears and not item.updates and len(ranks) < len(self._ranks):
            _write("stdout", label + "\n")
        publish.show(item.message)

    def _prefix(self, ranks: Sequence[int]) -> str:
        key = tuple(ranks)
        if key not in self._prefixes:
            self._prefixes[key] = self._prefix_of(key)
        return self._prefixes[key]

    def _prefix_of(self, ranks: tuple[int, ...]) -> str:
        if not ranks:
            return "nbaccel: "
        if self._template is None:
            return f"[{spans(ranks)}] "
        local = {rank: i for i, rank in enumerate(self._ranks)}
        values = {"rank": ranks[0], "local_rank": local[ranks[0]], "role_name": "worker"}
        return Template(self._template).safe_substitute(values)


class _Live:
    """Whose word counts where only one rank's can be shown."""

    def __init__(self) -> None:
        self._clearer: int | None = None
        self._owners: dict[str, int] = {}
        self._folded: set[tuple[int, str]] = set()

    def note(self, rank: int, item: Rich, *, with_rank: int) -> None:
        """An item leaves its queue; `with_rank`'s twin of it is the one that is shown."""
        if item.clears:
            self._clearer = rank if self._clearer is None else min(rank, self._clearer)
        elif item.handle is not None:
            if rank != with_rank:
                self._folded.add((rank, item.handle))
            else:
                self._owners[item.handle] = min(rank, self._owners.get(item.handle, rank))

    def may_show(self, rank: int, item: Rich) -> bool:
        """Whether this rank's item is the one that counts."""
        if item.clears:
            return rank == self._clearer
        handle = item.handle
        return handle is None or (
            (rank, handle) not in self._folded and self._owners.get(handle, rank) == rank
        )

    def key(self, ranks: list[int], item: Rich) -> object:
        """Equal for updates of the same output, of which the last one makes the others needless."""
        if item.updates:
            return (min(ranks), item.handle)
        return id(item)


def _text(item: Item) -> str:
    return item.text if isinstance(item, Line) else ""


def _write(stream: str, text: str) -> None:
    target: TextIO = getattr(sys, stream)
    target.write(text)
    target.flush()
