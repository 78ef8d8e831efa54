"""What the ranks of a running cell are at: below the cell while it runs, and as a table.

A cell that runs for more than a second says so:

    2 ranks · 12 s · up to 1.2 GiB each
    [0] waiting in all_reduce (Cell In[3], line 5) · 310.0 MiB
    [1] running (Cell In[3], line 4) · 312.5 MiB

In a notebook these lines are changed in place, and their first one stays. A terminal cannot change
what it has shown, so there a line is added now and then.
"""

from __future__ import annotations

import html
import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.launch import publish
from nbaccel.units import counted, format_bytes, format_seconds, spans

__all__ = ["RankStatus", "StatusLine", "StatusTable"]

FIRST_S = 1.0
EVERY_S = 1.0
_IN_A_TERMINAL_S = (1.0, 5.0, 15.0, 60.0)
_GROUPS = 8  # a cluster's worth of ranks that all do something else is no longer read

# No colour is named, and the background shows through: it reads on light and dark alike.
_QUIET = "opacity:0.7;font-size:0.9em;line-height:1.5"
_CELL = "text-align:left;padding:0.2em 1.2em 0.2em 0;border:none;background:none"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank, at one moment."""

    rank: int
    state: str
    """In a word or two: `idle`, `running`, `stopped`."""
    seconds: float
    """For how long it has been in that state."""
    rss_bytes: int
    device_bytes: int | None = None
    """What it holds on its device; None where there is none, or nobody can tell."""
    doing: str = ""
    """`waiting in all_reduce (Cell In[3], line 5)`"""


class StatusLine:
    """Tells what a cell is at while it runs, and afterwards how long that took.

    Args:
        ranks: The ranks that run it.
        say: Prints a line where there is no notebook; by default to stderr.
        clock: Seconds of a clock that never goes back.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks = len(ranks)
        self._say = say or _say
        self._clock = clock
        self._began = clock()
        self._in_place = publish.has_cells()
        self._due = _every_second() if self._in_place else _less_and_less()
        self._next = self._began + next(self._due)
        self._id = uuid.uuid4().hex
        self._told = False  # whether something has been shown
        self._stands = False  # whether it is still there
        self._peak_rss = 0
        self._peak_device: int | None = None

    def due_in(self) -> float:
        """Seconds until `update` shows something; look at the ranks only then."""
        return max(0.0, self._next - self._clock())

    def update(self, rows: Sequence[RankStatus]) -> None:
        """Show the ranks, if it is time.

        Args:
            rows: One per rank.
        """
        now = self._clock()
        if now < self._next:
            return
        while self._next <= now:
            self._next = self._began + next(self._due)
        self._peak_rss = max([self._peak_rss, *(row.rss_bytes for row in rows)])
        on_devices = [row.device_bytes for row in rows if row.device_bytes is not None]
        if on_devices:
            self._peak_device = max([self._peak_device or 0, *on_devices])
        lines = [self._summary(), *_doings(rows)]
        if self._in_place:
            self._place(lines)
        else:
            self._say("\n".join(f"nbaccel: {line}" for line in lines))
        self._told = True

    def cleared(self) -> None:
        """The cell has been cleared, and what stood there is gone."""
        self._stands = False

    def finish(self, *, failed: bool = False, interrupted: bool = False) -> None:
        """Leave one line, if there has been anything to see.

        Args:
            failed: The cell raised.
            interrupted: The user stopped it.
        """
        if not self._told:
            return
        how = "stopped after " if interrupted else "failed after " if failed else ""
        line = self._summary(how)
        if self._in_place:
            self._place([line])
        else:
            self._say(f"nbaccel: {line}")

    def _summary(self, how: str = "") -> str:
        each = " each" if self._num_ranks > 1 else ""
        parts = [
            counted(self._num_ranks, "rank"),
            f"{how}{format_seconds(self._clock() - self._began)}",
        ]
        if self._peak_rss:
            device = self._peak_device
            beside = f" (on the device {format_bytes(device)})" if device is not None else ""
            parts.append(f"up to {format_bytes(self._peak_rss)}{each}{beside}")
        return " · ".join(parts)

    def _place(self, lines: Sequence[str]) -> None:
        shown = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        content: dict[str, Any] = {
            "data": {
                "text/plain": "\n".join(lines),
                "text/html": f'<div style="{_QUIET}">{shown}</div>',
            },
            "metadata": {},
            "transient": {"display_id": self._id},
        }
        if self._stands:
            content["update"] = True
        publish.display(content)
        self._stands = True


class StatusTable:
    """The ranks as a table, in a notebook and as text.

    Args:
        rows: One per rank.
        headline: A line above them.
    """

    def __init__(self, rows: Sequence[RankStatus], *, headline: str = "") -> None:
        self.rows = tuple(rows)
        self.headline = headline

    def _cells(self) -> list[list[str]]:
        has_device = any(row.device_bytes is not None for row in self.rows)
        head = ["rank", "state", "for", "memory", *(["on device"] if has_device else []), "doing"]
        return [head, *(_cells_of(row, has_device=has_device) for row in self.rows)]

    def __str__(self) -> str:
        cells = self._cells() if self.rows else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
        return "\n".join([self.headline, *lines] if self.headline else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        above = f"<div>{html.escape(self.headline)}</div>" if self.headline else ""
        if not self.rows:
            return above
        head, *body = self._cells()
        top = "".join(f'<th style="{_CELL};opacity:0.6">{html.escape(c)}</th>' for c in head)
        lines = (
            "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(c)}</td>' for c in line) + "</tr>"
            for line in body
        )
        return above + (
            '<table style="border:none;margin:0"><thead><tr style="background:none">'
            f"{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )


def _cells_of(row: RankStatus, *, has_device: bool) -> list[str]:
    device = "-" if row.device_bytes is None else format_bytes(row.device_bytes)
    return [
        str(row.rank),
        row.state,
        format_seconds(row.seconds),
        format_bytes(row.rss_bytes),
        *([device] if has_device else []),
        row.doing,
    ]


def _doings(rows: Sequence[RankStatus]) -> list[str]:
    """A line for each thing that some rank does, with what these ranks have in memory."""
    groups: dict[str, list[RankStatus]] = {}
    for row in sorted(rows, key=lambda row: row.rank):
        groups.setdefault(row.doing or row.state, []).append(row)
    lines = [
        f"[{spans([r.rank for r in same])}] {doing} · {_held(same)}"
        for doing, same in groups.items()
    ]
    if len(lines) > _GROUPS:
        return [*lines[:_GROUPS], f"… and {len(lines) - _GROUPS} more"]
    return lines


def _held(rows: Sequence[RankStatus]) -> str:
    """`1.0 GiB`, or from least to most: `0.9 GiB to 1.2 GiB`; the device's behind it."""
    told = _from_to([row.rss_bytes for row in rows])
    on_device = [row.device_bytes for row in rows if row.device_bytes is not None]
    return f"{told}, on the device {_from_to(on_device)}" if on_device else told


def _from_to(sizes: Sequence[int]) -> str:
    least, most = format_bytes(min(sizes)), format_bytes(max(sizes))
    return most if least == most else f"{least} to {most}"


def _every_second() -> Iterator[float]:
    return (FIRST_S + i * EVERY_S for i in itertools.count())


def _less_and_less() -> Iterator[float]:
    yield from _IN_A_TERMINAL_S
    last = _IN_A_TERMINAL_S[-1]
    yield from (last * 2**i for i in itertools.count(1))


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
