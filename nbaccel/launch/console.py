"""What workers print, as the notebook shows it: by rank, folded, at most ten times a second.

    rank 0 pipe ──► lines ─┐                          [0-1] loading
                           ├─► fold equal heads ─►    [0] saved
    rank 1 pipe ──► lines ─┘                          [0-1] epoch 1

A line that all ranks print is shown once. To recognise it, a line waits up to `HOLD_S` for its
twins; lines of one rank never overtake each other. A line that is being rewritten with carriage
returns (a progress bar) is drawn in place for the lowest rank that has one.
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

TICK_S = 0.1
HOLD_S = 0.15
_LAST_LINES = 20
_LOOK_AHEAD = 50


@dataclass(frozen=True, slots=True)
class _Line:
    time: float
    stream: str
    text: str


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
        self._queues: dict[int, deque[_Line]] = {r: deque() for r in ranks}
        self._tails: dict[int, deque[str]] = {r: deque(maxlen=_LAST_LINES) for r in ranks}
        self._open = set(ranks)
        self._drawn = ""
        self._drawn_on = "stderr"
        self._next_tick = 0.0

    def feed(self, rank: int, stream: str, data: bytes) -> None:
        """Take in what a worker wrote."""
        self._queue(rank, self._sources[rank, stream].feed(data, time.monotonic()))

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
        self._print(batch)
        self._draw(bar, bar_stream)

    def notice(self, text: str, *, stream: str = "stderr") -> None:
        """Show a line of the launcher's own, after what has been printed so far."""
        self.tick(final=True)
        self._erase()
        _write(stream, text + "\n")

    def _ready(self, now: float, final: bool) -> Iterator[tuple[list[int], _Line]]:
        while any(self._queues.values()):
            heads = {r: q[0] for r, q in self._queues.items() if q}
            rank, first = min(heads.items(), key=lambda item: item[1].time)
            twins = [r for r, line in heads.items() if self._same(line, first)] or [rank]
            missing = self._open - set(twins) if self._template is None else set()
            if missing and not final and now - first.time < HOLD_S:
                return
            if len(twins) < len(heads):
                twins, first = self._before(twins, first)
            for r in twins:
                self._queues[r].popleft()
            yield twins, first

    def _before(self, twins: list[int], line: _Line) -> tuple[list[int], _Line]:
        """What has to come out first, if a missing twin is only held up in another rank's queue."""
        for rank, queue in self._queues.items():
            deeper = itertools.islice(queue, 1, _LOOK_AHEAD)
            if rank not in twins and any(self._same(other, line) for other in deeper):
                head = queue[0]
                return [r for r, q in self._queues.items() if q and self._same(q[0], head)], head
        return twins, line

    def _same(self, line: _Line, other: _Line) -> bool:
        return self._template is None and (line.text, line.stream) == (other.text, other.stream)

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

    def _print(self, batch: list[tuple[list[int], _Line]]) -> None:
        """One write per run of lines of the same stream: each write is a message to the browser."""
        run: list[str] = []
        stream = ""
        for ranks, line in batch:
            if line.stream != stream and run:
                _write(stream, "".join(run))
                run = []
            stream = line.stream
            run.append(f"{self._prefix(ranks)}{line.text}\n")
        if run:
            _write(stream, "".join(run))

    def _prefix(self, ranks: list[int]) -> str:
        if self._template is None:
            return f"[{_spans(sorted(ranks))}] "
        local = {rank: i for i, rank in enumerate(self._ranks)}
        values = {"rank": ranks[0], "local_rank": local[ranks[0]], "role_name": "worker"}
        return Template(self._template).safe_substitute(values)


def _spans(ranks: list[int]) -> str:
    """`[0, 1, 2, 5]` → `0-2,5`."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank if rank is not None else -1
    return ",".join(parts)


def _write(stream: str, text: str) -> None:
    target: TextIO = getattr(sys, stream)
    target.write(text)
    target.flush()
