"""What workers print, as the notebook shows it: by rank, folded, at most ten times a second.

    rank 0 pipe ──► lines ─┐                          [0-1] loading
                           ├─► fold equal heads ─►    [0] saved
    rank 1 pipe ──► lines ─┘                          [0-1] epoch 1

A line that all ranks print is shown once. To recognise it, a line waits up to `HOLD_S` for its
twins; lines of one rank never overtake each other. A line that is being rewritten with carriage
returns (a progress bar) is drawn in place for the lowest rank that has one.

Rich output waits in the same queues: a picture comes after the lines that its rank printed before.
What cannot be shown twice (output that is updated later, the cell being cleared) is taken from the
lowest rank that has it, as a bar is.
"""

from __future__ import annotations

import codecs
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from string import Template
from typing import TextIO

from nbaccel.launch import publish, wire
from nbaccel.units import spans

TICK_S = 0.1
HOLD_S = 0.15
_LAST_LINES = 20
_LOOK_AHEAD = 50


@dataclass(frozen=True, slots=True)
class _Line:
    time: float
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class _Rich:
    """Rich output, or the wish to clear the cell."""

    time: float
    message: wire.Display | wire.ClearOutput

    @property
    def clears(self) -> bool:
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
        message = self.message
        return isinstance(message, wire.Display) and bool(message.content.get("update"))

    def is_twin(self, other: _Rich) -> bool:
        """Whether showing one of both is enough."""
        if self.handle is not None and other.handle is not None:
            return self.updates == other.updates  # their handles differ by chance alone
        return bool(self.message == other.message)


_Item = _Line | _Rich


@dataclass
class _Source:
    """One stream of one rank."""

    rank: int
    stream: str
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    partial: str = ""
    bar: str = ""

    def feed(self, data: bytes, now: float) -> Iterator[_Line]:
        *lines, self.partial = (self.partial + self.decoder.decode(data)).split("\n")
        for text in lines:
            yield _Line(now, self.stream, _after_returns(text))
        self.bar = _after_returns(self.partial) if "\r" in self.partial else ""
        if self.bar:
            self.partial = "\r" + self.bar  # only its last state matters

    def finish(self, now: float) -> Iterator[_Line]:
        rest, self.partial, self.bar = self.partial + self.decoder.decode(b"", final=True), "", ""
        if rest:
            yield _Line(now, self.stream, _after_returns(rest))


def _after_returns(text: str) -> str:
    """What is left on the line once every carriage return has been carried out."""
    shown = ""
    for part in text.split("\r"):
        shown = part + shown[len(part) :] if part else shown
    return shown.rstrip() if "\r" in text else shown


class Console:
    """Collects the workers' output and shows it in the notebook.

    Args:
        ranks: Global ranks of this node's workers, in order.
        template: Prefix of each line, with `${rank}`, `${local_rank}` and `${role_name}`;
            None for `[rank] `, with folding.
    """

    def __init__(self, ranks: list[int], *, template: str | None = None) -> None:
        self._ranks = ranks
        self._template = template
        self._sources = {(r, s): _Source(r, s) for r in ranks for s in ("stdout", "stderr")}
        self._queues: dict[int, deque[_Item]] = {r: deque() for r in ranks}
        self._tails: dict[int, deque[str]] = {r: deque(maxlen=_LAST_LINES) for r in ranks}
        self._open = set(ranks)
        self._live = _Live()
        self.clears = 0
        """How often workers have cleared the cell."""
        self._drawn = ""
        self._drawn_on = "stderr"
        self._next_tick = 0.0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what a worker wrote."""
        self._queue(rank, self._sources[rank, stream].feed(data, time.monotonic()))

    def feed_display(self, rank: int, message: wire.Display | wire.ClearOutput) -> None:
        """Take in rich output. What the rank has printed before it must have been fed before.

        Args:
            rank: Who sent it.
            message: What to show, or to clear what is shown.
        """
        now = time.monotonic()
        for stream in ("stdout", "stderr"):
            source = self._sources[rank, stream]
            if not source.bar:  # `print("...", end="")`: it stands before the picture
                self._queue(rank, source.finish(now))
        self._queues[rank].append(_Rich(now, message))

    def close(self, rank: int) -> None:
        """This rank writes no more."""
        for stream in ("stdout", "stderr"):
            self._queue(rank, self._sources[rank, stream].finish(time.monotonic()))
        self._open.discard(rank)

    def _queue(self, rank: int, lines: Iterator[_Line]) -> None:
        for line in lines:
            self._queues[rank].append(line)
            if line.text.strip():
                self._tails[rank].append(line.text)

    def tails(self) -> dict[int, list[str]]:
        """The last lines of each rank."""
        return {rank: list(tail) for rank, tail in self._tails.items()}

    def last_lines(self) -> dict[int, str]:
        """The last line of each rank that has printed one."""
        return {rank: tail[-1] for rank, tail in self._tails.items() if tail}

    def due_in(self) -> float | None:
        """Seconds until `tick` has something to do; None if nothing is waiting."""
        waiting = any(self._queues.values()) or self._bar() != (self._drawn, self._drawn_on)
        return max(0.0, self._next_tick - time.monotonic()) if waiting else None

    def tick(self, *, final: bool = False) -> None:
        """Show what is due. Cheap to call often."""
        now = time.monotonic()
        if now < self._next_tick and not final:
            return
        self._next_tick = now + TICK_S
        batch = list(self._ready(now, final))
        bar, bar_stream = self._bar()
        if not batch and bar == self._drawn:
            return
        self._erase(keep=bar if not batch and bar_stream == self._drawn_on else "")
        self._show(batch)
        self._draw(bar, bar_stream)

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

    def _ready(self, now: float, final: bool) -> Iterator[tuple[list[int], _Item]]:
        while any(self._queues.values()):
            heads = {r: q[0] for r, q in self._queues.items() if q}
            first = min(heads.values(), key=lambda item: item.time)
            twins = self._twins(first)
            missing = self._open - set(twins) if self._folds(first) else set()
            if missing and not final and now - first.time < HOLD_S:
                return
            if len(twins) < len(heads):
                twins = self._before(twins, first)
            popped: dict[int, _Item] = {}
            for r, at in sorted(twins.items()):
                popped[r] = self._queues[r][at]
                del self._queues[r][at]
            for r, item in popped.items():
                if isinstance(item, _Rich):
                    self._live.note(r, item, with_rank=min(popped))
            yield [*popped], popped[min(popped)]  # of outputs that are updated, twins differ

    def _twins(self, item: _Item) -> dict[int, int]:
        """Rank → where in its queue the item's twin is, of ranks where it may come out now."""
        places = {r: self._reach(q, item) for r, q in self._queues.items()}
        return {r: at for r, at in places.items() if at is not None}

    def _reach(self, queue: deque[_Item], item: _Item) -> int | None:
        """Lines of the other stream do not stand in the way: which came first nobody can tell."""
        for at, other in enumerate(itertools.islice(queue, _LOOK_AHEAD)):
            if self._same(other, item):
                return at
            if _stream(other) in (None, _stream(item)) or _stream(item) is None:
                return None
        return None

    def _before(self, twins: dict[int, int], item: _Item) -> dict[int, int]:
        """Whose heads have to come out first, if a missing twin is only held up behind one."""
        for rank, queue in self._queues.items():
            deeper = itertools.islice(queue, 1, _LOOK_AHEAD)
            if rank not in twins and any(self._same(other, item) for other in deeper):
                return self._twins(queue[0])
        return twins

    def _folds(self, item: _Item) -> bool:
        """Whether it may be shown once for several ranks, and is worth waiting for them."""
        return self._template is None and not (isinstance(item, _Rich) and item.updates)

    def _same(self, item: _Item, other: _Item) -> bool:
        if item is other:
            return True
        if not self._folds(item):
            return False
        if isinstance(item, _Line):
            return isinstance(other, _Line) and (item.text, item.stream) == (
                other.text,
                other.stream,
            )
        return isinstance(other, _Rich) and item.is_twin(other)

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

    def _show(self, batch: list[tuple[list[int], _Item]]) -> None:
        """One write per run of lines of the same stream: each write is a message to the browser."""
        newest = {self._live.key(ranks, item): item for ranks, item in batch}
        for stream, run in itertools.groupby(batch, key=lambda entry: _stream(entry[1])):
            if stream is not None:
                lines = (f"{self._prefix(ranks)}{_text(item)}\n" for ranks, item in run)
                _write(stream, "".join(lines))
                continue
            for ranks, item in run:
                if isinstance(item, _Rich) and newest[self._live.key(ranks, item)] is item:
                    self._publish(ranks, item)

    def _publish(self, ranks: list[int], item: _Rich) -> None:
        shower = min(ranks)
        if not self._live.may_show(shower, item):
            return
        self.clears += item.clears
        label = self._prefix(ranks).rstrip()
        if label and not item.clears and not item.updates and len(ranks) < len(self._ranks):
            _write("stdout", label + "\n")
        publish.show(item.message)

    def _prefix(self, ranks: list[int]) -> str:
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

    def note(self, rank: int, item: _Rich, *, with_rank: int) -> None:
        """An item leaves its queue; `with_rank`'s twin of it is the one that is shown."""
        if item.clears:
            self._clearer = rank if self._clearer is None else min(rank, self._clearer)
        elif item.handle is not None:
            if rank != with_rank:
                self._folded.add((rank, item.handle))
            else:
                self._owners[item.handle] = min(rank, self._owners.get(item.handle, rank))

    def may_show(self, rank: int, item: _Rich) -> bool:
        """Whether this rank's item is the one that counts."""
        if item.clears:
            return rank == self._clearer
        handle = item.handle
        return handle is None or (
            (rank, handle) not in self._folded and self._owners.get(handle, rank) == rank
        )

    def key(self, ranks: list[int], item: _Item) -> object:
        """Equal for updates of the same output, of which the last one makes the others needless."""
        if isinstance(item, _Rich) and item.updates:
            return (min(ranks), item.handle)
        return id(item)


def _stream(item: _Item) -> str | None:
    return item.stream if isinstance(item, _Line) else None


def _text(item: _Item) -> str:
    return item.text if isinstance(item, _Line) else ""


def _write(stream: str, text: str) -> None:
    target: TextIO = getattr(sys, stream)
    target.write(text)
    target.flush()
