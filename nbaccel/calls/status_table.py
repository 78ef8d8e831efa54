"""What each rank of a pool is doing, as a table: between cells, and while a cell runs."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbaccel.base.units import first_few, format_bytes, format_seconds, number_ranges
from nbaccel.calls.pool_planning import PoolState
from nbaccel.output.panel.display import resident
from nbaccel.output.panel.facts import RankStatus
from nbaccel.output.panel.live_html import filled_columns, html_table
from nbaccel.output.report import indented
from nbaccel.plan import Plan
from nbaccel.workers import messaging
from nbaccel.workers.failure import RankActivity
from nbaccel.workers.template import template_for
from nbaccel.workers.worker_processes import WorkerHandle


def rank_status(member: WorkerHandle, *, is_open: bool, is_gone: bool) -> RankStatus:
    """One row of the table."""
    if member.has_ended or is_gone:
        state = "gone"
    elif is_open:
        state = "stopping" if member.is_stopped else "running"
    else:
        state = "idle"
    place = member.whereabouts
    if place is None or state == "gone":
        place = messaging.Whereabouts(stack=(), device_bytes=None)
    return RankStatus(
        rank=member.rank,
        state=state,
        seconds=time.monotonic() - member.since,
        rss_bytes=resident(member),
        device_bytes=place.device_bytes,
        doing=str(RankActivity.of_stack(place.stack)) if is_open and place.stack else "",
        names=place.names,
        group=place.group,
    )


def status_table(
    state: PoolState, reason: str, plan: Plan, rows: Sequence[RankStatus], activity: str
) -> StatusTable:
    """The pool as `%accelerate status` shows it."""
    ended = [row.rank for row in rows if row.state == "gone"]
    told = f": {reason}" if reason else ""
    if activity and state is PoolState.RUNNING:
        told = f" {activity}"
    elif ended and state is PoolState.IDLE:
        have_ended = (
            f"rank {ended[0]} has" if len(ended) == 1 else f"ranks {number_ranges(ended)} have"
        )
        told = (
            f", but {have_ended} ended: the next cell tells why, and the one after that starts "
            "new workers"
        )
    workers = plan.headline() if rows else f"The next cell starts {plan.headline()}"
    left_out = template_for(plan.device).left_out_text()
    return StatusTable(rows, f"{state.name.lower()}{told}. {workers} {left_out}".rstrip())


@dataclass(frozen=True, repr=False)
class StatusTable:
    """The ranks as a table, in a notebook and as text."""

    rows: Sequence[RankStatus]
    headline: str = ""

    def _cells(self) -> list[list[str]]:
        columns = {name: [tell(row) for row in self.rows] for name, tell in _COLUMNS.items()}
        return filled_columns(columns)

    def __str__(self) -> str:
        lines = [line.removeprefix("  ") for line in indented(self._cells())] if self.rows else []
        return "\n".join([self.headline, *lines] if self.headline else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headline = f"<div>{html.escape(self.headline)}</div>" if self.headline else ""
        return headline + (html_table(self._cells()) if self.rows else "")


def _duration_words(row: RankStatus) -> str:
    """Its time in this state; of one that waits in minutes, or the row changes all the time."""
    if row.state == "gone":
        return ""  # when it ended has not been seen
    if row.state != "idle":
        return format_seconds(row.seconds)
    if (minutes := int(row.seconds // 60)) < 1:
        return "under 1 min"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h"


_COLUMNS: dict[str, Callable[[RankStatus], str]] = {
    "rank": lambda row: str(row.rank),
    "state": lambda row: row.state,
    "for": _duration_words,
    "memory": lambda row: format_bytes(row.rss_bytes) if row.rss_bytes else "",
    "on device": lambda row: "" if row.device_bytes is None else format_bytes(row.device_bytes),
    "group": lambda row: row.group,
    "names": lambda row: first_few(row.names, 6),
    "doing": lambda row: row.doing,
}
